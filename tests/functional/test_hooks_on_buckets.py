"""compile_step with communication hooks that are given whole buckets, and may keep something for each.

Held against the maths of a compression by hand, which keeps what it owes parameter by parameter, and against hooks in
EagerDDP; and by what must hold of every one: what was applied and what is owed are together what was to be applied.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_sent_by_steps import Small
from test_whole_step import OPTIMIZERS, Fails, Loop, Net, assert_same, batch, graphs
from torch import Tensor, nn

from compiled_ddp import EagerDDP, SavedPlan, compile_step
from compiled_ddp.comm_hooks import PowerSGD, Ranks, StatefulHook, TopK
from compiled_ddp.torch_private import for_tests
from ranks import RankPool


class Gated(nn.Module):
    """Of whose two branches a batch uses one, by a flag that a graph has fixed; and one is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(5, 1)
        self.never = nn.Linear(5, 1)

    def forward(self, x: Tensor, y: Tensor, is_left: bool) -> Tensor:
        branch = self.left if is_left else self.right
        loss: Tensor = ((branch(torch.tanh(self.trunk(x))).squeeze(1) - y) ** 2).mean()
        return loss


class Sparsified:
    """What TopK stands for, by hand: of one bucket, of all parameters, the last one first."""

    def __init__(
        self, model: nn.Module, fraction: float, clip: float | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self.model, self.fraction, self.clip, self.group = copy.deepcopy(model), fraction, clip, group
        self.optimizer = OPTIMIZERS["momentum"](self.model.parameters())
        self.trained = [p for p in self.model.parameters() if p.requires_grad][::-1]
        self.owed = [torch.zeros_like(parameter) for parameter in self.trained]

    def step(self, batches: Sequence[Any]) -> None:
        for each in batches:
            (self.model(*each) / len(batches)).backward()
        uses = [parameter.grad is not None for parameter in self.trained]
        somewhere = torch.tensor(uses, dtype=torch.float32)
        dist.all_reduce(somewhere, group=self.group)
        every = zip(self.trained, self.owed, uses, strict=True)
        wanted = torch.cat([(p.grad + owed if is_used else 0 * owed).reshape(-1) for p, owed, is_used in every])
        largest = wanted.abs().topk(max(1, int(self.fraction * wanted.numel()))).indices
        sent = torch.zeros_like(wanted).index_copy(0, largest, wanted[largest])
        mean = sent / dist.get_world_size(self.group)
        dist.all_reduce(mean, group=self.group)
        sizes = [parameter.numel() for parameter in self.trained]
        for number, (left, part) in enumerate(zip((wanted - sent).split(sizes), mean.split(sizes), strict=True)):
            parameter = self.trained[number]
            parameter.grad = part.view_as(parameter) if somewhere[number] else None
            if uses[number]:
                self.owed[number] = left.view_as(parameter)
        if self.clip is not None:
            nn.utils.clip_grad_norm_([p for p in self.trained if p.grad is not None], self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def assert_same(self, step: Any) -> None:
        for name, value in self.model.state_dict().items():
            torch.testing.assert_close(step.model.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        ((key, (owed,)),) = step.comm_hook_state_dict().items()
        assert key.split(",") == [names[id(parameter)] for parameter in self.trained]
        torch.testing.assert_close(owed, torch.cat([each.reshape(-1) for each in self.owed]), rtol=1e-4, atol=1e-6)


def made(make: Callable[[], nn.Module] = Net, kind: str = "momentum", **options: Any) -> Any:
    torch.manual_seed(0)
    model = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    return compile_step(model, optimizer, **{"backend": "aot_eager", **options})


def owed_by_all(step: Any) -> dict[str, Tensor]:
    """What all ranks owe together to each parameter, as a mean, wherever; the first tensor of a state is that."""
    shapes = dict(step.model.named_parameters())
    owed = {name: torch.zeros_like(each) for name, each in shapes.items()}
    for key, (flat, *_) in step.comm_hook_state_dict().items():
        names = key.partition("#")[0].split(",")
        for name, part in zip(names, flat.split([shapes[name].numel() for name in names]), strict=True):
            mean = part / 2
            dist.all_reduce(mean)
            owed[name] += mean.view_as(shapes[name])
    return owed


# ---- the same as by hand ---------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "accumulated": {"accumulate": 3},
    "clipped": {"clip_grad_norm": 0.2},
    "both": {"accumulate": 2, "clip_grad_norm": 0.2},
}


def _sparsifies(rank: int, options: Mapping[str, Any]) -> None:
    """Behind some updates one that ends early, where it has several batches."""
    step = made(comm_hook=TopK(0.2), **options)
    loop, batches = Sparsified(step.model, 0.2, options.get("clip_grad_norm")), options.get("accumulate", 1)
    for n in range(5):
        taken = [batch(rank, n * batches + number) for number in range(batches)]
        for each in taken:
            step(*each)
        loop.step(taken)
        loop.assert_same(step)
    if batches > 1:
        step(*batch(rank, 90))
        step.flush()
        loop.step([batch(rank, 90)])
        loop.assert_same(step)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_compression_is_what_it_is_by_hand(ranks2: RankPool, options: str) -> None:
    ranks2.run(_sparsifies, OPTIONS[options])


# Which branch each rank's batch uses in each step, the left one or the right one.
BRANCHES = {
    "one on one rank": [(True, False), (True, True), (False, True), (True, True), (False, False)],
    "the same one": [(True, True), (False, False), (True, True)],
}


def _holds_back(rank: int, branches: Sequence[Sequence[bool]], accumulate: int) -> None:
    step = made(Gated, comm_hook=TopK(0.3), accumulate=accumulate)
    loop = Sparsified(step.model, 0.3)
    for n, of_ranks in enumerate(branches):
        taken = [(*batch(rank, n), of_ranks[rank]), (*batch(rank, 9 + n), not of_ranks[0])][:accumulate]
        for each in taken:
            step(*each)
        loop.step(taken)
        loop.assert_same(step)
    assert torch.equal(step.model.never.weight, gated().never.weight)


def gated() -> Gated:
    torch.manual_seed(0)
    return Gated()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("branches", BRANCHES)
def test_what_is_owed_to_a_parameter_waits_until_a_batch_uses_it(
    ranks2: RankPool, branches: str, accumulate: int
) -> None:
    ranks2.run(_holds_back, BRANCHES[branches], accumulate)


# ---- the same as in a wrapper ----------------------------------------------------------------------------------------


def by_largest(gradients: Tensor, ranks: Ranks) -> Tensor:
    largest = ranks.all_gather(gradients.abs().amax().view(1)).amax()
    return ranks.all_reduce((gradients / largest).to(torch.float16)).to(gradients.dtype) * largest / ranks.size


def twice(gradients: Tensor, ranks: Ranks) -> Tensor:
    return (ranks.all_reduce(gradients) + ranks.all_reduce(gradients * 2)) / (3 * ranks.size)


def signs(gradients: Tensor, ranks: Ranks) -> Tensor:
    return ranks.all_reduce(gradients.sign().to(torch.int8)).to(gradients.dtype) / ranks.size


TINY = 1e-9  # MiB: every parameter has a bucket of its own

HOOKS: dict[str, Any] = {
    "TopK": TopK(0.1),
    "PowerSGD": PowerSGD(2),
    "by_largest": by_largest,
    "twice": twice,
    "signs": signs,
}


def _as_in_a_wrapper(rank: int, hook: str, backend: str, cap: float) -> list[str]:
    step = made(comm_hook=HOOKS[hook], backend=backend, bucket_cap_mb=cap)
    torch.manual_seed(0)
    ddp = EagerDDP(Net(), comm_hook=HOOKS[hook], bucket_cap_mb=cap, broadcast_buffers=False)
    optimizer = OPTIMIZERS["momentum"](ddp.parameters())
    for n in range(4):
        expected = ddp(*batch(rank, n))
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(step(*batch(rank, n)), expected.detach(), rtol=1e-4, atol=1e-6)
    for name, value in ddp.module.state_dict().items():
        torch.testing.assert_close(step.model.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    everywhere = [torch.empty_like(step.model.first.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, step.model.first.weight.detach())
    assert all(torch.equal(each, everywhere[0]) for each in everywhere)
    assert graphs(step) == 1
    assert (step.comm_hook_state_dict() != {}) == isinstance(HOOKS[hook], StatefulHook)
    return str(step.explain()).splitlines()


@pytest.mark.parametrize("hook", HOOKS)
def test_buckets_are_reduced_as_in_a_wrapper(ranks2: RankPool, hook: str) -> None:
    told, _ = ranks2.run(_as_in_a_wrapper, hook, "aot_eager", TINY)
    buckets = 7
    assert f"The forward and backward of Net, {buckets} buckets and the update of SGD are one graph." in told
    assert any(line.startswith("Buckets are sent, and averaged, as ") for line in told)


def with_the_rest(gradients: Tensor, ranks: Ranks) -> Tensor:
    """What was rounded away is added again, by each rank its own."""
    sent = gradients.to(torch.bfloat16)
    return ranks.all_reduce(sent).to(gradients.dtype) / ranks.size + (gradients - sent)


def _differs(rank: int, kind: str, accumulate: int) -> str:
    step = made(kind=kind, comm_hook=with_the_rest, accumulate=accumulate)
    for n in range(accumulate - 1):
        step(*batch(rank, n))
    with pytest.raises(RuntimeError, match="comm_hook=with_the_rest what comes of parameter ") as raised:
        step(*batch(rank, accumulate))
    return str(raised.value)


@pytest.mark.parametrize(("kind", "accumulate"), [("momentum", 1), ("Adagrad", 1), ("AdamW", 2)])
def test_a_hook_that_leaves_something_else_on_each_rank_is_told_of(
    ranks2: RankPool, kind: str, accumulate: int
) -> None:
    first, second = ranks2.run(_differs, kind, accumulate)
    assert first == second
    assert "on rank 1 is not what it is on rank 0" in first and "of this rank's own gradients" in first


def test_three_ranks_reduce_them_so(ranks3: RankPool) -> None:
    for hook in ("TopK", "PowerSGD"):
        ranks3.run(_as_in_a_wrapper, hook, "aot_eager", TINY)


class Short(nn.Module):
    """Of four parameters, whose code is soon made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = ((self.last(torch.tanh(self.first(x))).squeeze(1) - y) ** 2).mean()
        return loss


def _in_code(rank: int, hook: str) -> list[str]:
    step = made(Short, comm_hook=HOOKS[hook], backend="inductor", bucket_cap_mb=TINY)
    same = made(Short, comm_hook=HOOKS[hook], bucket_cap_mb=TINY)
    (source, *_) = for_tests.generated_code(lambda: step(*batch(rank, 0)))
    same(*batch(rank, 0))
    for n in range(1, 4):
        torch.testing.assert_close(step(*batch(rank, n)), same(*batch(rank, n)), rtol=1e-4, atol=1e-6)
    for found, expected in zip(step.model.parameters(), same.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    body = source[source.rindex("def call(") :]
    return re.findall(r"_c10d_functional\.(all_reduce_|wait_tensor)\.default\(", body)


@pytest.mark.parametrize("hook", ["PowerSGD", pytest.param("TopK", marks=pytest.mark.slow)])
def test_code_launches_what_it_can_before_it_waits(ranks2: RankPool, hook: str) -> None:
    """Where a bucket's second collective needs the first one's result, the others' first ones are on their way."""
    rounds, buckets = (2 if hook == "PowerSGD" else 1), 4
    at_once = buckets if rounds == 2 else 2 * buckets + 1  # TopK's values and indices, and the riders
    for found in ranks2.run(_in_code, hook):
        assert found[: at_once + 1] == [*["all_reduce_"] * at_once, "wait_tensor"]
        assert found.count("all_reduce_") == found.count("wait_tensor") == 2 * buckets + 1
        if rounds == 2:
            assert found[at_once + 1] == "all_reduce_", "as soon as what it needs is there"
            assert found[-1] == "wait_tensor" and found.count("all_reduce_") == 2 * buckets + 1


def _of_other_dtypes(rank: int, hook: StatefulHook) -> None:
    step = made(Small, comm_hook=hook, clip_grad_norm=5.0)
    torch.manual_seed(0)
    ddp = EagerDDP(Small(), comm_hook=hook)
    optimizer = OPTIMIZERS["momentum"](ddp.parameters())
    for n in range(4):
        step(*batch(rank, n))
        ddp(*batch(rank, n)).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
    for found, expected in zip(step.model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2)
    found, expected = step.comm_hook_state_dict(), ddp.comm_hook_state_dict()
    assert found.keys() == expected.keys()
    for key, tensors in expected.items():
        for one, other in zip(found[key], tensors, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def test_16_bits_and_complex_numbers_are_compressed_too(ranks2: RankPool) -> None:
    for hook in (TopK(0.4), PowerSGD(1)):
        ranks2.run(_of_other_dtypes, hook)


# ---- whatever happens, nothing is lost -------------------------------------------------------------------------------


class Applied:
    """The sum of the true means of a step's gradients, by a loop beside it; and of what the step has applied."""

    def __init__(self, step: Any) -> None:
        self.step, self.model = step, copy.deepcopy(step.model)
        self.true = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        self.begun = {name: p.detach().clone() for name, p in step.model.named_parameters()}

    def take(self, *given: Any) -> None:
        """A step at a learning rate of 1; the loop has its gradients at the step's own parameters."""
        self.model.load_state_dict(self.step.model.state_dict())
        self.step(*given)
        self.model.zero_grad()
        self.model(*given).backward()
        for name, parameter in self.model.named_parameters():
            mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / 2
            dist.all_reduce(mean)
            self.true[name] += mean

    def assert_nothing_is_lost(self) -> None:
        owed = owed_by_all(self.step)
        for name, parameter in self.step.model.named_parameters():
            applied = self.begun[name] - parameter.detach()
            found = applied + owed[name]
            torch.testing.assert_close(found, self.true[name], rtol=1e-4, atol=1e-5, msg=name)


OPTIMIZERS["one"] = lambda p: torch.optim.SGD(p, lr=1.0)


def _loses_nothing(rank: int, hook: StatefulHook) -> None:
    step = made(Gated, "one", comm_hook=hook, bucket_cap_mb=0.0001)
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.mul_(0.1)
    applied = Applied(step)
    for n, is_left in enumerate([True, rank == 0, False, rank == 1, True, True]):
        x, y = batch(rank, n)
        applied.take(x * 0.1, y * 0.1, is_left)
        applied.assert_nothing_is_lost()
    # Frozen and trained again: what is owed to the others goes on with them, into other buckets.
    step.model.left.bias.requires_grad_(False)
    applied.model.left.bias.requires_grad_(False)
    applied.take(*(each * 0.1 for each in batch(rank, 7)), True)
    applied.assert_nothing_is_lost()
    step.model.left.bias.requires_grad_(True)
    applied.model.left.bias.requires_grad_(True)
    for n in (8, 9):
        applied.take(*(each * 0.1 for each in batch(rank, n)), n == 8)
        applied.assert_nothing_is_lost()


@pytest.mark.parametrize("hook", [TopK(0.2), PowerSGD(1)], ids=["TopK", "PowerSGD"])
def test_what_was_applied_and_what_is_owed_are_what_was_to_be_applied(ranks2: RankPool, hook: StatefulHook) -> None:
    ranks2.run(_loses_nothing, hook)


def _breaks(rank: int, hook: str, where: str) -> list[str]:
    """Rank 1 fails once, in its loss or in its graph; then all goes on as if that step had not been."""
    fails = {"now": False}

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if fails["now"] and where == "loss":
            raise ValueError("no labels")
        rows = torch.where(torch.isnan(y), 9, 0).long() if where == "graph" else torch.zeros(5, dtype=torch.long)
        value: Tensor = net(x, y.nan_to_num()) + 0 * torch.arange(5.0)[rows].sum()
        return value

    steps = [made(comm_hook=HOOKS[hook], loss_fn=loss, bucket_cap_mb=0.0) for _ in range(2)]
    told = ""
    for n in range(5):
        for step in steps:
            step(*batch(rank, n))
        if n == 2:
            before = copy.deepcopy(steps[0].comm_hook_state_dict())
            fails["now"] = rank == 1
            x, y = batch(rank, 99)
            steps[0].model.eval()
            try:
                steps[0](x, y * torch.nan if fails["now"] else y)
            except (RuntimeError, ValueError, IndexError) as error:
                told = str(error)
            steps[0].model.train()
            fails["now"] = False
            for key, tensors in steps[0].comm_hook_state_dict().items():
                assert all(torch.equal(one, other) for one, other in zip(tensors, before[key], strict=True)), key
    one, two = (step.model.state_dict() for step in steps)
    for name, value in two.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(one[name], value, rtol=0, atol=0, msg=name)
    return [told]


@pytest.mark.parametrize("hook", ["TopK", "PowerSGD", "by_largest"])
@pytest.mark.parametrize(("where", "why"), [("loss", "no labels"), ("graph", "out of (range|bounds)")])
def test_a_step_that_raises_leaves_what_was_kept(ranks2: RankPool, hook: str, where: str, why: str) -> None:
    for (told,) in ranks2.run(_breaks, hook, where):
        assert re.search(why, told), told


def _skips(rank: int) -> None:
    """A gradient that is not finite on one rank, of one bucket: a GradScaler leaves the update out, of all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    step = made(comm_hook=TopK(0.3), scaler=scaler, bucket_cap_mb=0.0)
    for n in range(2):
        step(*batch(rank, n))
    before, state = copy.deepcopy(step.model.state_dict()), step.comm_hook_state_dict()
    step.model.eval()
    x, y = batch(rank, 5)
    step(x, y * float("inf") if rank == 1 else y)
    step.model.train()
    assert scaler.get_scale() == 2.0
    for name, value in step.model.named_parameters():
        assert torch.equal(value, before[name]), name
    for key, tensors in step.comm_hook_state_dict().items():
        assert all(torch.equal(one, other) for one, other in zip(tensors, state[key], strict=True)), key
    step(*batch(rank, 6))
    assert all(torch.isfinite(p).all() for p in step.model.parameters())


def test_an_update_that_a_scaler_skips_leaves_what_was_kept(ranks2: RankPool) -> None:
    ranks2.run(_skips)


# ---- saved and loaded ------------------------------------------------------------------------------------------------


def _goes_on(rank: int, hook: str) -> None:
    """From a checkpoint as without one, bit for bit; in other buckets with all that is owed; and from a wrapper."""
    step = made(comm_hook=HOOKS[hook], bucket_cap_mb=0.0)
    for n in range(3):
        step(*batch(rank, n))
    saved = copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict(), step.comm_hook_state_dict()))
    for n in range(3, 6):
        step(*batch(rank, n))

    def resumed(**options: Any) -> Any:
        other = made(comm_hook=HOOKS[hook], **options)
        other.model.load_state_dict(saved[0])
        other.optimizer.load_state_dict(saved[1])
        other.load_comm_hook_state_dict(saved[2])
        return other

    other = resumed(bucket_cap_mb=0.0)
    for n in range(3, 6):
        other(*batch(rank, n))
    for name, value in step.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value), name
    other = resumed()
    other(*batch(rank, 3))
    # In the middle, what there was is replaced, here as in a wrapper.
    other.load_comm_hook_state_dict(step.comm_hook_state_dict())
    other.model.load_state_dict(step.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    ddp = EagerDDP(copy.deepcopy(step.model), comm_hook=HOOKS[hook], bucket_cap_mb=25.0)
    ddp.load_comm_hook_state_dict(step.comm_hook_state_dict())
    optimizer = OPTIMIZERS["momentum"](ddp.parameters())
    optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    other(*batch(rank, 7))
    ddp(*batch(rank, 7)).backward()
    optimizer.step()
    for found, expected in zip(other.model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hook", ["TopK", "PowerSGD"])
def test_a_state_is_saved_and_loaded_whatever_the_buckets_are(ranks2: RankPool, hook: str) -> None:
    ranks2.run(_goes_on, hook)


def _refuses_a_state(rank: int) -> None:
    step = made(comm_hook=TopK(0.1))
    step(*batch(rank, 0))
    before = step.comm_hook_state_dict()
    wrong: list[tuple[Any, type[Exception]]] = [
        ({"nothing": [torch.zeros(3)]}, KeyError),
        ({"scale": [torch.zeros(3)]}, ValueError),
        ({"scale": [torch.full((1,), torch.inf)]}, ValueError),
        ("a checkpoint", TypeError),
    ]
    for state, error in wrong:
        with pytest.raises(error):
            step.load_comm_hook_state_dict(state)
    after = step.comm_hook_state_dict()
    assert all(torch.equal(after[key][0], before[key][0]) for key in before)
    plain = made()
    assert plain.comm_hook_state_dict() == {}
    plain.load_comm_hook_state_dict({})
    with pytest.raises(RuntimeError, match="no comm_hook that keeps"):
        plain.load_comm_hook_state_dict(before)


def test_a_state_of_something_else_is_refused(ranks2: RankPool) -> None:
    ranks2.run(_refuses_a_state)


# ---- beside other things ---------------------------------------------------------------------------------------------


def _alone(rank: int) -> None:
    """A rank alone has its hook too: what is small is sent later."""
    group = [dist.new_group([each]) for each in range(2)][rank]
    step = made(Gated, comm_hook=TopK(0.2), process_group=group)
    loop = Sparsified(step.model, 0.2, group=group)
    for n in range(4):
        given = (*batch(rank, n), n % 2 == 0)
        step(*given)
        loop.step([given])
        loop.assert_same(step)


def test_a_rank_alone_compresses_too(ranks2: RankPool) -> None:
    ranks2.run(_alone)


def _outside(rank: int) -> None:
    """An update that no graph has: what a hook keeps goes on all the same."""
    step = made(kind="Adagrad", comm_hook=TopK(0.3))
    torch.manual_seed(0)
    ddp = EagerDDP(Net(), comm_hook=TopK(0.3))
    optimizer = OPTIMIZERS["Adagrad"](ddp.parameters())
    for n in range(4):
        step(*batch(rank, n))
        ddp(*batch(rank, n)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, expected in zip(step.model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_update_outside_goes_with_it(ranks2: RankPool) -> None:
    ranks2.run(_outside)


class _FailsAtFirst(Fails):
    updates = 1


OPTIMIZERS["failing"] = lambda p: _FailsAtFirst(p, lr=0.1)


def _fails_outside(rank: int) -> list[str]:
    step, told = made(kind="failing", comm_hook=TopK(0.3)), []
    for n in range(3):
        try:
            step(*batch(rank, n))
            told.append("")
        except (MemoryError, RuntimeError) as error:
            told.append(str(error))
    return told


def test_a_first_update_outside_that_raises_on_one_rank_is_told_on_all_in_the_next_call(ranks2: RankPool) -> None:
    first, second = ranks2.run(_fails_outside)
    assert first[0] == "" and second[0] == "no memory left"
    assert "has raised in the call before" in first[1] and "has raised in the call before" in second[1]
    assert first[2] == second[2] == ""


def _everything_is_sent(rank: int) -> None:
    """A fraction of 1.0 loses nothing: the step is what the loop does, and so is an evaluation or a loop in between."""
    step = made(comm_hook=TopK(1.0), bucket_cap_mb=0.0001)
    torch.manual_seed(0)
    loop = Loop(Net(), OPTIMIZERS["momentum"])
    for n in range(6):
        step(*batch(rank, n, rows=3 if n == 4 else 5))
        loop.step(*batch(rank, n, rows=3 if n == 4 else 5))
        if n == 2:
            other = Loop.of(step.model, step.optimizer)
            other.step(*batch(rank, 50)), loop.step(*batch(rank, 50))
        assert_same(step, loop)
    assert graphs(step) == 2, "a smaller batch has a graph of its own"


def test_what_sends_everything_is_the_loop(ranks2: RankPool) -> None:
    ranks2.run(_everything_is_sent)


def _is_measured(rank: int) -> list[str]:
    step = made(comm_hook=PowerSGD(2), bucket_cap_mb=0.0001)
    step.profile(steps=3)
    for n in range(3):
        step(*batch(rank, n))
    assert len(step.plan.buckets) == 3
    return [line.split()[0] for line in step.explain().splitlines() if re.match(r"(hook|all-reduce) +\d", line)]


def test_a_profile_has_all_that_a_hook_sends(ranks2: RankPool) -> None:
    """Of each bucket both of PowerSGD's sums, and the riders' one."""
    for found in ranks2.run(_is_measured):
        assert found == ["hook"] * (2 * 3 + 1), found


def _pins(rank: int, folder: str) -> None:
    step = made(comm_hook=TopK(0.3), bucket_cap_mb=0.0001)
    step(*batch(rank, 0))
    path = f"{folder}/plan-{rank}.json"
    step.plan.save(path)
    again = made(comm_hook=TopK(0.3), plan=SavedPlan.load(path))
    again(*batch(rank, 0))
    assert again.plan.buckets == step.plan.buckets and len(step.plan.buckets) > 2
    assert again.comm_hook_state_dict().keys() == step.comm_hook_state_dict().keys()


def test_a_saved_plan_has_its_buckets(ranks2: RankPool, tmp_path: Any) -> None:
    ranks2.run(_pins, str(tmp_path))
