"""What people do with a model in a wrapper who have read none of our pages: right, or told of, as under torch's DDP."""

import contextlib
import copy
import itertools
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Mlp, assert_gradients, assert_step, local_gradients, mean_by_hand, row_batch, wrappers
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from compiled_ddp import EagerDDP, compile_ddp, torch_private
from compiled_ddp.comm_hooks import Ranks, TopK
from compiled_ddp.graph.backend import Entry
from compiled_ddp.graph.kept_state import state_kept
from compiled_ddp.integrations.torch import EagerDistributedDataParallel
from compiled_ddp.passes.ops import add_in_order
from compiled_ddp.reducers.traced_hook import HookProgram, check_hook
from compiled_ddp.step import reduction
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def loss_of(rank: int, step: int = 0) -> Callable[[nn.Module], Tensor]:
    return lambda module: module(row_batch(rank, step)).square().sum()


# ---- gradients that share memory -------------------------------------------------------------------------------------


class Fused(nn.Module):
    """Two weights, each above what goes into a bucket together with others, used as one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(5, 8000, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.q.weight, self.k.weight]).t() * 0.01


def _fused(rank: int) -> None:
    """The backward of `cat` leaves two views of one tensor in .grad, which the next backward adds to."""
    ddp = EagerDDP(Fused())
    for step in range(3):
        ddp.zero_grad()
        own = local_gradients(copy.deepcopy(ddp.module), loss_of(rank, step))
        expected = mean_by_hand(ddp, lambda m: loss_of(rank, step)(m) + loss_of(rank, step + 9)(m))  # noqa: B023
        with ddp.no_sync():
            loss_of(rank, step)(ddp).backward()
        assert all(torch.equal(p.grad, own[n]) for n, p in ddp.module.named_parameters())  # type: ignore[arg-type]
        loss_of(rank, step + 9)(ddp).backward()
        assert_gradients(ddp.module, expected, rtol=1e-4)


def _flat(rank: int, wrapper: str) -> None:
    """The user's .grad are views of one flat tensor, which an optimizer reads."""
    model = Fused()
    ddp = wrappers([wrapper])[wrapper](model)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    parts = flat.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    for step in range(3):
        flat.zero_()
        expected = mean_by_hand(ddp, loss_of(rank, step))
        loss_of(rank, step)(ddp).backward()
        assert_gradients(model, expected, rtol=1e-4)
        torch.testing.assert_close(flat.double(), torch.cat([e.view(-1) for e in expected.values()]))


def test_gradients_that_are_views_of_one_tensor_are_reduced(ranks2: RankPool) -> None:
    ranks2.run(_fused)
    for wrapper in BOTH:
        ranks2.run(_flat, wrapper)


# ---- communication hooks ---------------------------------------------------------------------------------------------


def test_what_is_added_at_an_index_is_added_in_order_and_by_no_operator_of_any_order() -> None:
    values = torch.tensor([1.0, 2.0**30, -(2.0**30), 5.0])
    found = add_in_order(torch.zeros(3), torch.tensor([2, 2, 2, 0]), values)
    assert found.tolist() == [5.0, 0.0, 0.0]  # the 1 is lost first: another order would keep it
    hook, flat = TopK(), torch.zeros(64)
    program = HookProgram(hook, Ranks(3, "any"), flat, hook.initial_state(flat))
    called = [node for node in program.graph.nodes if node.op == "call_function"]
    assert add_in_order in {node.target for node in called}
    sums = [node for node in called if node.target is torch.ops.aten.index_put.default and node.args[3:] == (True,)]
    assert not sums and torch.ops.aten.index_add.default not in {node.target for node in called}


def _torchs_hook(rank: int) -> str:
    with pytest.raises(TypeError) as error:
        EagerDDP(nn.Linear(2, 2), comm_hook=fp16_compress_hook)
    return str(error.value)


def test_a_hook_of_torchs_kind_is_told_where_it_belongs(ranks2: RankPool) -> None:
    assert all("pass it to register_comm_hook(state, hook)" in found for found in ranks2.run(_torchs_hook))


class Counting:
    """Exact for some steps, then in bfloat16, as with torch's start_powerSGD_iter."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, gradients: Tensor, ranks: Ranks) -> Tensor:
        self.steps += 1
        mean = ranks.all_reduce(gradients / ranks.size)
        return mean if self.steps < 5 else mean.bfloat16().to(gradients.dtype)


class SetUpOnce(Counting):
    def __call__(self, gradients: Tensor, ranks: Ranks) -> Tensor:
        self.steps = max(self.steps, 1)
        return ranks.all_reduce(gradients / ranks.size)


def test_a_hook_that_counts_its_calls_in_python_is_refused() -> None:
    calls = 0

    def counting(gradients: Tensor, ranks: Ranks) -> Tensor:
        nonlocal calls
        calls += 1
        return ranks.all_reduce(gradients / ranks.size)

    parameters = {"weight": torch.zeros(3)}
    for hook, what in ((Counting(), "steps"), (counting, "calls")):
        with pytest.raises(ValueError, match=f"changes its {what} in each call, and is traced once for each bucket"):
            check_hook(hook, parameters)
    check_hook(SetUpOnce(), parameters)


# ---- steps that a rank leaves out ------------------------------------------------------------------------------------


def _optimizer_in_hooks(rank: int, wrapper: str) -> list[Tensor]:
    """Hooks that step without torch.no_grad(), as autograd calls them with grad mode off."""
    ddp = wrappers([wrapper])[wrapper](nn.Linear(5, 3))

    def descend(parameter: Tensor) -> None:
        parameter -= 0.01 * parameter.grad

    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    for step in range(4):
        ddp.zero_grad()
        if step == 2 and rank == 1:
            ddp.skip_step()
        else:
            loss_of(rank, step)(ddp).backward()
    return [parameter.detach() for parameter in ddp.parameters()]


@pytest.mark.parametrize("wrapper", BOTH)
def test_hooks_of_a_skipped_step_run_without_gradients_as_in_a_backward(ranks2: RankPool, wrapper: str) -> None:
    ours, theirs = ranks2.run(_optimizer_in_hooks, wrapper)
    assert all(map(torch.equal, ours, theirs))


def _frozen_retry(rank: int) -> None:
    """A discriminator that is frozen while the generator learns; on one rank its forward raises, and is tried again."""
    generator, discriminator = EagerDDP(nn.Linear(5, 5)), EagerDDP(nn.Linear(5, 1))
    for step in range(4):
        discriminator.requires_grad_(False)
        fake = generator(row_batch(rank, step))
        if step == 1 and rank == 1:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                discriminator(fake[:, :2])
        discriminator(fake).sum().backward()
        discriminator.requires_grad_(True)
        discriminator(fake.detach()).sum().backward()


def test_a_frozen_models_forward_that_raises_is_no_step(ranks2: RankPool) -> None:
    ranks2.run(_frozen_retry)


def _evaluated_through_the_wrapper(rank: int, wrapper: str) -> str:
    ddp = wrappers([wrapper])[wrapper](nn.Linear(5, 3))
    loss_of(rank)(ddp).backward()
    ddp.eval()
    with torch.no_grad():
        ddp(row_batch(rank))
    ddp.module.train()  # the model by its own name: the wrapper stays as it is
    kept = ddp(row_batch(rank)) if rank == 1 else None  # a step that this rank alone drops
    with pytest.raises(RuntimeError) as error:
        loss_of(rank)(ddp).backward()
    del kept
    return str(error.value)


@pytest.mark.parametrize("wrapper", BOTH)
def test_it_is_the_models_mode_that_tells_training_from_evaluation(ranks2: RankPool, wrapper: str) -> None:
    found = ranks2.run(_evaluated_through_the_wrapper, wrapper)
    assert all("averaged gradients of different steps" in message for message in found)


class StepsItself(nn.Module):
    """As a training step of Lightning's that is optimized by hand: it calls backward, first for this rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 3)
        self.wrapper: list[Any] = []
        self.own: list[Tensor] = []

    def forward(self, x: Tensor) -> None:
        self.step(self.net(x).square().sum())

    @torch.compiler.disable
    def step(self, loss: Tensor) -> None:
        (ddp,) = self.wrapper
        with ddp.no_sync():
            loss.backward(retain_graph=True)
            assert self.net.weight.grad is not None
            self.own.append(self.net.weight.grad.clone())
        ddp.zero_grad()
        loss.backward()


def _local_inside(rank: int, wrapper: str) -> None:
    model = StepsItself()
    ddp = wrappers([wrapper])[wrapper](model)
    model.wrapper.append(ddp)
    for step in range(3):
        expected = mean_by_hand(EagerDDP(copy.deepcopy(model.net)), loss_of(rank, step))
        own = local_gradients(copy.deepcopy(model.net), loss_of(rank, step))
        ddp.zero_grad()
        ddp(row_batch(rank, step))
        torch.testing.assert_close(model.own[-1], own["weight"])
        assert_gradients(model.net, expected)


@pytest.mark.parametrize("wrapper", BOTH)
def test_no_sync_inside_of_the_modules_own_forward_keeps_its_backwards_local(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_local_inside, wrapper)


# ---- parts that come and go ------------------------------------------------------------------------------------------


def _turns(rank: int, wrapper: str) -> int:
    """Two parts are trained in turns, one of which was frozen when the model was wrapped."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    ddp = wrappers([wrapper])[wrapper](model)
    for step in range(6):
        model[0].requires_grad_(step % 2 == 1)
        model[1].requires_grad_(step % 2 == 0)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        expected = {n: e for n, e in mean_by_hand(ddp, loss_of(rank, step)).items() if n in trained}
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of buckets that go by hooks
            loss_of(rank, step)(ddp).backward()
        for name in trained:
            torch.testing.assert_close(model.get_parameter(name).grad.double(), expected[name])  # type: ignore[union-attr]
    refreshes: int = ddp._watched_model._refreshes
    return refreshes


@pytest.mark.parametrize("wrapper", BOTH)
def test_parts_that_are_trained_in_turns_change_the_model_once(ranks2: RankPool, wrapper: str) -> None:
    assert ranks2.run(_turns, wrapper) == [1, 1]


class OwnCache(nn.Linear):
    """A buffer whose size is this rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__(5, 3)
        self.register_buffer("cache", torch.zeros(3 + rank))
        self.late = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(super().forward(x))


def _other_sizes(rank: int) -> None:
    ddp = EagerDDP(OwnCache(rank), broadcast_buffers=False)
    assert_step(ddp, loss_of(rank), unused=("late.weight", "late.bias"))
    ddp.module.late.requires_grad_(True)  # every rank looks at the model anew
    assert_step(ddp, loss_of(rank, 1))


def test_buffers_that_nobody_sends_may_differ_between_ranks(ranks2: RankPool) -> None:
    ranks2.run(_other_sizes)


def test_collectives_of_another_thread_are_not_taken_for_the_models_for_ever() -> None:
    launched = [0]
    with mock.patch.object(reduction._counted, "number", side_effect=lambda: launched[0]):
        found = reduction.ModelsCollectives()
        found.begin()
        launched[0] += 1
        found.end()
        assert found.seen
        for _ in range(reduction._QUIET_UNTIL_FORGOTTEN):
            assert found.seen
            found.begin()
            found.end()
        assert not found.seen


# ---- errors name the rank that people know ---------------------------------------------------------------------------


def _on_a_subgroup(rank: int) -> str | None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    ddp = EagerDDP(nn.Linear(5, 3), process_group=group)
    loss = loss_of(rank)(ddp)
    if rank == 1:
        loss.register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        ddp.abandon_backward()
        return None
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    return str(error.value)


def _raise(_: Tensor) -> None:
    raise ZeroDivisionError


def test_an_error_on_a_subgroup_names_the_global_rank(ranks3: RankPool) -> None:
    *_, message = ranks3.run(_on_a_subgroup)
    assert message is not None and message.startswith("rank 2: ")


# ---- state -----------------------------------------------------------------------------------------------------------


class Converted(nn.Module):
    """Transposes what version 1 has saved, as third parties' modules convert old checkpoints."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *others: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"].t().clone()
        super()._load_from_state_dict(state, prefix, metadata, *others)  # type: ignore[no-untyped-call]


def _versions(rank: int) -> None:
    bare, expected = Converted(), Converted().weight.detach()
    alone, inside = EagerDDP(Converted()), nn.Sequential(EagerDDP(Converted()))
    torchs = EagerDistributedDataParallel(Converted())
    states = {
        "own": [(alone, alone.state_dict()), (inside, inside.state_dict()), (torchs, torchs.state_dict())],
        "bare": [(alone, bare.state_dict()), (torchs, bare.state_dict())],
        "inside": [(inside, nn.Sequential(Converted()).state_dict())],
    }
    for what, pairs in states.items():
        for model, state in pairs:
            model.load_state_dict(state)
            (loaded,) = model.parameters()
            assert torch.equal(loaded, expected), (what, type(model).__name__)


def test_versions_of_modules_are_loaded_whatever_wraps_them(ranks2: RankPool) -> None:
    ranks2.run(_versions)


class WithExtraState(nn.Linear):
    """Keeps averages of its parameters as extra state, by their names."""

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"weight": torch.ones(3), "bias": torch.ones(3)}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.loaded = state


def _own_state(rank: int) -> None:
    ddp, called = EagerDDP(nn.Linear(3, 3)), list[str]()
    ddp.register_load_state_dict_pre_hook(lambda *_: called.append("pre"))  # type: ignore[no-untyped-call]
    ddp.register_load_state_dict_post_hook(lambda *_: called.append("post"))  # type: ignore[no-untyped-call]
    ddp.register_buffer("seen", torch.tensor(7.0))
    saved = {key: value.clone() for key, value in ddp.state_dict().items()}
    ddp.seen.zero_()
    assert str(ddp.load_state_dict(saved)) == "<All keys matched successfully>"
    assert ddp.seen.item() == 7.0 and called == ["pre", "post"]

    extra = EagerDDP(WithExtraState(3, 3))
    extra.load_state_dict(extra.state_dict())
    assert "weight" in extra.module.loaded

    both = OrderedDict({**nn.Linear(3, 3).state_dict(), "module.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match=r"module\.weight"):  # one of two that are meant for one
        EagerDDP(nn.Linear(3, 3)).load_state_dict(both)

    pickled = EagerDDP(nn.Linear(3, 3), process_group=dist.group.WORLD)
    pickle.loads(pickle.dumps(pickled))


def test_what_belongs_to_the_wrapper_itself_is_saved_and_loaded(ranks2: RankPool) -> None:
    ranks2.run(_own_state)


# ---- copies, and what a wrapper is asked for -------------------------------------------------------------------------


class Delegating(nn.Module):
    """Hands on what it has not to a wrapper inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(3, 3)

    def __getattr__(self, name: str) -> Any:
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def _asked(rank: int) -> None:
    ddp = EagerDDP(Mlp())
    teacher = copy.deepcopy(ddp).requires_grad_(False)
    assert (teacher.device.type, teacher.device_type) == ("cpu", "cpu")

    student = copy.deepcopy(ddp)
    for parameter in student.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    student(row_batch(rank))
    with student.no_sync():
        loss_of(rank)(student).backward()  # local, as is promised of copies

    ddp.module.temperature = 1.0
    ddp.temperature *= 0.5  # read from the model, and so written there
    ddp.note = "the wrapper's own"
    assert ddp.module.temperature == 0.5 and "temperature" not in vars(ddp) and not hasattr(ddp.module, "note")

    EagerDDP(Delegating(EagerDDP(nn.Linear(5, 3))))
    sparse = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3))
    with EagerDDP(sparse).join(enable=False):
        pass

    compiled = nn.Linear(5, 3)
    compiled.compile(backend="eager")
    in_place = compiled._compiled_call_impl
    assert compile_ddp(compiled, backend="aot_eager").unwrap()._compiled_call_impl is in_place


def test_what_users_ask_of_wrappers_and_copies(ranks2: RankPool) -> None:
    ranks2.run(_asked)


def test_a_warm_up_keeps_buffers_whose_elements_share_memory() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("shared", torch.zeros(1).expand(4))
    module.register_buffer("seen", torch.zeros(1))
    with state_kept(module):
        module.seen.add_(1)
    assert module.seen.item() == 0.0


class ComplexScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(torch.ones(5000), torch.ones(5000)))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight.conj()).abs().square().sum()


def _conjugated(rank: int) -> None:
    """A product with a conjugate leaves a lazily conjugated gradient, of a parameter that is looked at by itself."""
    ddp = EagerDDP(ComplexScale())
    x = torch.complex(torch.ones(5000), torch.full((5000,), 1.0 + rank))
    ddp(x).backward()
    own = copy.deepcopy(ddp.module)
    own.weight.grad = None
    own(x).backward()
    assert own.weight.grad is not None
    mean = torch.view_as_real(own.weight.grad.resolve_conj()).clone()
    dist.all_reduce(mean)
    assert ddp.module.weight.grad is not None
    torch.testing.assert_close(torch.view_as_real(ddp.module.weight.grad.resolve_conj()), mean / 2)


def test_a_conjugated_gradient_is_reduced(ranks2: RankPool) -> None:
    ranks2.run(_conjugated)


# ---- graphs ----------------------------------------------------------------------------------------------------------


class HandsOn(nn.Module):
    """A block that returns its input first, which hangs on the block before it: a call of the same graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.contiguous(), torch.tanh(self.linear(x))


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HandsOn() for _ in range(3))

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def run(self, block: nn.Module, x: Tensor) -> Any:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            skip, x = self.run(block, x)
            total = total + skip.sum()
        return total + x.square().sum()


def _handed_on(rank: int) -> list[str]:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Handing())
    for step in range(4):
        assert_step(ddp, lambda module: module(row_batch(rank, step)))  # noqa: B023
    return [section.origin for section in ddp.plan.sections]


def test_a_graph_that_hands_on_its_input_reduces(ranks2: RankPool) -> None:
    assert ranks2.run(_handed_on) == [["graph"] * 3] * 2


class Tail(nn.Module):
    """Its output is no graph's that reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x * 2


def _looked_for(rank: int) -> int:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Tail())
    for _ in range(4):
        loss_of(rank)(ddp).backward()
    with mock.patch.object(Entry, "_find", side_effect=Entry._find, autospec=True) as find:
        for _ in range(3):
            loss_of(rank)(ddp).backward()
    return find.call_count


def test_hooks_of_our_own_are_not_taken_for_a_users(ranks2: RankPool) -> None:
    assert ranks2.run(_looked_for) == [0, 0]


def test_what_dynamo_has_given_up_is_forgotten_when_it_begins_anew() -> None:
    limits = torch_private.captures.RecompileLimits()
    limits.note("forward has been captured too often")
    limits.forget_if_reset()
    assert len(limits.notes) == 1
    torch.compiler.reset()
    limits.forget_if_reset()
    assert not limits.notes


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(5, 33), nn.Linear(33, 16, bias=False)

    def forward(self, x: Tensor, *, logits: bool = False) -> Any:
        y = self.out(torch.tanh(self.into(x)))
        loss = y.square().sum()
        return (loss, y.detach()) if logits else loss


def _returned(rank: int) -> None:
    """Two backwards of the same operators, the second of which must not write into what its forward has returned."""
    ddp = compile_ddp(Logits())
    ddp(row_batch(rank)).backward()
    loss, y = ddp(row_batch(rank), logits=True)
    before = y.clone()
    loss.backward()
    assert torch.equal(y, before)


@pytest.mark.inductor
def test_no_cached_backward_overwrites_what_another_forward_has_returned(ranks2: RankPool) -> None:
    ranks2.run(_returned)


def _in_double(rank: int) -> None:
    ddp = compile_ddp(nn.Linear(5, 3).double(), backend="aot_eager", reduction="weighted", smallest_graph_mb=0)
    x = row_batch(rank).double()
    expected = copy.deepcopy(ddp.module)
    expected(x).square().sum().backward()
    ddp.set_weight(1.0 + rank)
    ddp(x).square().sum().backward()
    for parameter, other in zip(ddp.module.parameters(), expected.parameters(), strict=True):
        assert other.grad is not None and parameter.grad is not None
        mean = other.grad * (1.0 + rank)
        dist.all_reduce(mean)
        torch.testing.assert_close(parameter.grad, mean / 3, rtol=1e-14, atol=1e-14)


def test_a_weighted_mean_of_float64_is_one_of_float64_in_graphs(ranks2: RankPool) -> None:
    ranks2.run(_in_double)


# ---- operators of other libraries ------------------------------------------------------------------------------------

for operator, arguments in {"cube": "Tensor x", "cube_backward": "Tensor x, Tensor gradient"}.items():
    torch.library.define(f"compiled_ddp_habits::{operator}", f"({arguments}) -> Tensor")


@torch.library.impl("compiled_ddp_habits::cube", "CPU")
def _cube(x: Tensor) -> Tensor:
    return x**3


@torch.library.impl("compiled_ddp_habits::cube_backward", "CPU")
def _cube_backward(x: Tensor, gradient: Tensor) -> Tensor:
    """By autograd itself, as a kernel does that recomputes a part of the model."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x**3, x, gradient)[0]


for operator in ("cube", "cube_backward"):
    torch.library.register_fake(f"compiled_ddp_habits::{operator}", lambda x, *_: torch.empty_like(x))
torch.library.register_autograd(
    "compiled_ddp_habits::cube",
    lambda ctx, gradient: torch.ops.compiled_ddp_habits.cube_backward(*ctx.saved_tensors, gradient),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.compiled_ddp_habits.cube(self.layer(x))


def _by_autograd(rank: int, backend: str) -> None:
    torch.compiler.reset()
    ddp = compile_ddp(Cubed(), backend=backend)
    for step in range(3):
        assert_step(ddp, loss_of(rank, step))
    assert [row[1] for row in ddp.explain().rows] == ["graph"]


def _cubes(gradients: Tensor, ranks: Ranks) -> Tensor:
    return ranks.all_reduce(torch.ops.compiled_ddp_habits.cube_backward(gradients, torch.ones_like(gradients)))


def _by_autograd_in_a_hook(rank: int) -> None:
    torch.compiler.reset()
    ddp = compile_ddp(nn.Linear(5, 3), backend="aot_eager", comm_hook=_cubes)
    for step in range(3):
        own = local_gradients(copy.deepcopy(ddp.module), loss_of(rank, step))
        ddp.zero_grad()
        loss_of(rank, step)(ddp).backward()
        for name, parameter in ddp.module.named_parameters():
            expected = 3 * own[name].square()  # type: ignore[union-attr]
            dist.all_reduce(expected)
            torch.testing.assert_close(parameter.grad, expected)
    assert {row[1] for row in ddp.explain().rows} == {"graph"}


def test_an_operator_in_a_communication_hook_may_ask_autograd(ranks2: RankPool) -> None:
    ranks2.run(_by_autograd_in_a_hook)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_operator_whose_kernel_asks_autograd_runs_in_the_graph_as_in_eager_mode(
    ranks2: RankPool, backend: str
) -> None:
    ranks2.run(_by_autograd, backend)


# ---- numbers by themselves -------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """A scalar is used last, so that its gradient is the first one in the bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.gate = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * self.layer(x)


class Scalar(Gated):
    """Its loss is its output: a tangent without dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def _weighted_scalars(rank: int, backend: str, model: type[Gated], dtype: torch.dtype) -> None:
    torch.compiler.reset()
    ddp = compile_ddp(model().to(dtype), backend=backend, reduction="weighted")
    loss = lambda module: module(row_batch(rank).to(dtype)).square().mean()  # noqa: E731
    own = local_gradients(copy.deepcopy(ddp.module), loss)
    for _ in range(2):
        ddp.zero_grad()
        ddp.set_weight(1.0 + 2 * rank)
        loss(ddp).backward()
        for name, parameter in ddp.module.named_parameters():
            each = [torch.empty_like(own[name]) for _ in range(2)]  # type: ignore[arg-type]
            dist.all_gather(each, own[name])  # type: ignore[arg-type]
            assert parameter.grad is not None and parameter.grad.dtype == dtype
            torch.testing.assert_close(parameter.grad, (each[0] + 3 * each[1]) / 4, rtol=0.03, atol=0.01)
    assert {row[1] for row in ddp.explain().rows} == {"graph"}


@pytest.mark.parametrize(
    ("backend", "model", "dtype"),
    [
        *itertools.product(["aot_eager"], [Gated, Scalar], [torch.float16, torch.bfloat16, torch.float32]),
        pytest.param("inductor", Scalar, torch.float16, marks=pytest.mark.inductor),
        *(
            pytest.param("inductor", *case, marks=[pytest.mark.inductor, pytest.mark.slow])
            for case in [(Gated, torch.bfloat16), (Gated, torch.float32)]
        ),
    ],
)
def test_a_weighted_mean_of_a_gradient_without_dimension_keeps_its_dtype(
    ranks2: RankPool, backend: str, dtype: torch.dtype, model: type[Gated]
) -> None:
    ranks2.run(_weighted_scalars, backend, model, dtype)
