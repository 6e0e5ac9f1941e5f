"""The hook-based runtime, alone and as the fallback of compiled graphs."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import (
    Mlp,
    TokenModel,
    assert_equal_on_all_ranks,
    assert_gradients,
    expected_mean,
    local_gradients,
    mean_over_ranks,
    row_batch,
    token_batch,
    wrappers,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compiled_ddp import EagerDDP, compile_ddp
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


# ---- a loss that reaches no graph ------------------------------------------------------------------------------------


def _past_the_graphs(rank: int, wrapper: str, on_ranks: tuple[int, ...]) -> None:
    """From the third step on, the loss of these ranks is of the module alone."""
    ddp, seen = wrappers([wrapper])[wrapper](Mlp()), []
    for step in range(6):
        past = rank in on_ranks and step in (2, 3, 5)
        rows = row_batch(rank, step)
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(rows).square().sum())  # noqa: B023
        ddp.zero_grad()
        output = ddp(row_batch(rank, step + 10) if past else rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what goes by hooks
            (ddp.module(rows) if past else output).square().sum().backward()
        assert_gradients(ddp.module, expected)
        if step == 1:
            ddp.module.norm.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.grad.clone()))
        elif step > 1:
            torch.testing.assert_close(seen.pop().double(), expected["norm.bias"], rtol=1e-5, atol=1e-6)
    assert not seen, "the user's hook was called twice in a step"


@pytest.mark.parametrize("on_ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_loss_of_the_module_alone_is_averaged_where_its_forward_was_synchronised(
    ranks2: RankPool, wrapper: str, on_ranks: tuple[int, ...]
) -> None:
    ranks2.run(_past_the_graphs, wrapper, on_ranks)


def _only_between_forward_and_backward(rank: int, wrapper: str) -> None:
    """What comes after the backward of a forward, or after a forward under no_sync, stays local."""
    ddp = wrappers([wrapper])[wrapper](Mlp())
    loss = lambda module, step: module(row_batch(rank, step)).square().sum()  # noqa: E731
    for step in range(3):
        ddp.zero_grad()
        loss(ddp, step).backward()
    for forward_before in (False, True):
        if forward_before:
            with ddp.no_sync():
                ddp(row_batch(rank))
        expected = local_gradients(copy.deepcopy(ddp.module), lambda module: loss(module, 3))
        ddp.zero_grad()
        loss(ddp.module, 3).backward()
        assert_gradients(ddp.module, {name: gradient.double() for name, gradient in expected.items()})


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_loss_of_the_module_alone_is_local_where_no_synchronised_forward_waits(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_only_between_forward_and_backward, wrapper)


def _between_torch_autograd_grad_and_backward(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Mlp())
    for step in range(4):
        rows = row_batch(rank, step)
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(rows).square().sum())  # noqa: B023
        ddp.zero_grad()
        output = ddp(row_batch(rank, step + 10))
        if step < 2:
            output = ddp(rows)
        else:
            torch.autograd.grad(output.sum(), list(ddp.module.parameters()))
            output = ddp.module(rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output.square().sum().backward()
        assert_gradients(ddp.module, expected)


def test_a_loss_of_the_module_alone_is_averaged_behind_a_torch_autograd_grad(ranks2: RankPool) -> None:
    ranks2.run(_between_torch_autograd_grad_and_backward)


# ---- the order of buckets --------------------------------------------------------------------------------------------


class UsedInReverse(nn.Module):
    """Registered in the order opposite to the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.third, self.second, self.first = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))).square().sum()


def _orders(rank: int) -> list[list[str]]:
    ddp = EagerDDP(UsedInReverse(), bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    orders = []
    for step in range(3):
        before = [ddp.plan.parameter_names[index] for bucket in ddp.plan.buckets for index in bucket.indices]
        orders.append(before)
        expected = expected_mean(ddp.module, lambda module: module(row_batch(rank, step)))  # noqa: B023
        ddp.zero_grad()
        ddp(row_batch(rank, step)).backward()
        assert_gradients(ddp.module, expected)
    return orders


def test_first_backward_is_in_reverse_registration_order_and_later_ones_in_order_of_arrival(ranks2: RankPool) -> None:
    first, second = ranks2.run(_orders)
    assert first == second
    assert first[0] == ["first.bias", "first.weight", "second.bias", "second.weight", "third.bias", "third.weight"]
    assert [name.split(".")[0] for name in first[1]] == ["third", "third", "second", "second", "first", "first"]
    assert first[2] == first[1]


class OtherOrderOnRankOne(nn.Module):
    """Two branches that finish backward in an order which depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            return (self.a(x) + self.b(x)).square().sum()
        return (self.b(x) + self.a(x)).square().sum()


def _train(rank: int, model_class: type[nn.Module], wrapper: str, steps: int = 3) -> None:
    ddp = wrappers([wrapper])[wrapper](model_class(), bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    for step in range(steps):
        expected = expected_mean(ddp.module, lambda module: module(row_batch(rank, step)))  # noqa: B023
        ddp.zero_grad()
        ddp(row_batch(rank, step)).backward()
        assert_gradients(ddp.module, expected)
    assert_equal_on_all_ranks(ddp.plan.fingerprint)


@pytest.mark.parametrize("wrapper", BOTH)
def test_ranks_keep_rank_zeros_order_whatever_theirs_is(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_train, OtherOrderOnRankOne, wrapper)


# ---- unused parameters -----------------------------------------------------------------------------------------------


class SkipsBranch(nn.Module):
    """`sometimes` is used by rank 0 alone, `never` by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        if dist.get_rank() == 0:
            x = self.sometimes(x)
        return x.square().sum()


def _unused(rank: int, wrapper: str, as_view: bool) -> None:
    options = {"gradient_as_bucket_view": as_view}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = wrappers([wrapper])[wrapper](SkipsBranch(), **options)
        for step in range(3):
            expected = expected_mean(ddp.module, lambda module: module(row_batch(rank, step)))  # noqa: B023
            ddp.zero_grad()
            ddp(row_batch(rank, step)).backward()
            for name, parameter in ddp.module.named_parameters():
                if name.startswith("never"):
                    assert parameter.grad is None, name
                else:
                    torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_parameter_unused_on_one_rank_counts_as_zero_and_one_unused_everywhere_is_untouched(
    ranks2: RankPool, wrapper: str, as_view: bool
) -> None:
    ranks2.run(_unused, wrapper, as_view)


# ---- the outermost backward ------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.before, self.inside, self.after = nn.Linear(5, 5), Mlp(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = checkpoint(self.inside, x, use_reentrant=self.reentrant)
        return self.after(x).square().sum()


class CheckpointedReentrantly(Checkpointed):
    def __init__(self) -> None:
        super().__init__(reentrant=True)


class CheckpointedWhole(nn.Module):
    """The whole module is recomputed in an inner backward: every hook fires in there."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x.requires_grad_(), use_reentrant=True).square().sum()


@pytest.mark.parametrize("model_class", [CheckpointedReentrantly, CheckpointedWhole])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_reentrant_checkpoints_inner_backward_does_not_end_the_outer_one(
    ranks2: RankPool, wrapper: str, model_class: type[nn.Module]
) -> None:
    ranks2.run(_train, model_class, wrapper)


def _wrapper_inside_checkpoint(rank: int) -> None:
    ddp = EagerDDP(Mlp())
    for step in range(2):
        expected = expected_mean(ddp.module, lambda module: module(row_batch(rank, step)).square().sum())  # noqa: B023
        ddp.zero_grad()
        checkpoint(ddp, row_batch(rank, step).requires_grad_(), use_reentrant=True).square().sum().backward()
        assert_gradients(ddp.module, expected)


def test_the_wrapper_itself_may_be_checkpointed(ranks2: RankPool) -> None:
    ranks2.run(_wrapper_inside_checkpoint)


def _two_backwards(rank: int, wrapper: str) -> None:
    """Two backward calls for one forward, and two forwards for one backward."""
    ddp = wrappers([wrapper])[wrapper](Mlp())
    x = row_batch(rank)
    expected = expected_mean(ddp.module, lambda module: 2 * module(x).square().sum())
    if wrapper == "EagerDDP":
        loss = ddp(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert_gradients(ddp.module, expected)
        ddp.zero_grad()
    (ddp(x).square().sum() + ddp(x).square().sum()).backward()
    assert_gradients(ddp.module, expected)
    ddp.zero_grad()
    ddp(x).square().sum().backward()
    assert_gradients(ddp.module, {name: mean / 2 for name, mean in expected.items()})


@pytest.mark.parametrize("wrapper", BOTH)
def test_two_backwards_of_a_forward_and_two_forwards_of_a_backward(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_two_backwards, wrapper)


def _one_then_two_forwards(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    x = row_batch(rank)
    expected = expected_mean(ddp.module, lambda module: module(x).square().sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for forwards in (1, 2, 1):
            ddp.zero_grad()
            sum(ddp(x).square().sum() for _ in range(forwards)).backward()
            assert_gradients(ddp.module, {name: mean * forwards for name, mean in expected.items()})


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_later_backward_may_run_more_forwards_than_the_first(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_one_then_two_forwards, wrapper)


# ---- exceptions ------------------------------------------------------------------------------------------------------


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: bool) -> Tensor:
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.armed:
            raise ValueError("planted")
        return gradient, None


class BreaksOff(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        return self.second(RaisesInBackward.apply(self.first(x), self.armed)).square().sum()


def _step(ddp: nn.Module, rank: int, step: int) -> None:
    expected = expected_mean(ddp.module, lambda module: module(row_batch(rank, step)))
    ddp.zero_grad()
    ddp(row_batch(rank, step)).backward()
    assert_gradients(ddp.module, expected)


def _break_off(rank: int, on_ranks: tuple[int, ...]) -> str:
    ddp = EagerDDP(BreaksOff(), bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    _step(ddp, rank, 0)
    ddp.zero_grad()
    ddp.module.armed = rank in on_ranks
    message = ""
    if rank in on_ranks:
        with pytest.raises(ValueError, match="planted"):
            ddp(row_batch(rank, 1)).backward()
    else:
        try:
            ddp(row_batch(rank, 1)).backward()
        except RuntimeError as error:
            message = str(error)
    ddp.module.armed = False
    ddp.zero_grad()
    if rank in on_ranks:
        ddp.abandon_backward()
    for step in (2, 3):
        _step(ddp, rank, step)
    return message


def test_after_an_exception_on_every_rank_the_next_step_is_right(ranks2: RankPool) -> None:
    assert ranks2.run(_break_off, (0, 1)) == ["", ""]


def test_after_an_exception_on_one_rank_the_others_raise_and_the_next_step_is_right(ranks2: RankPool) -> None:
    broken, other = ranks2.run(_break_off, (0,))
    assert broken == ""
    assert "broke off on 1" in other
    assert "zero_grad" in other


class BreaksOffAtTheEnd(BreaksOff):
    """Everything has been launched when the exception comes: other ranks are told in the next backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = RaisesInBackward.apply(x.requires_grad_(), self.armed)
        return self.second(self.first(x)).square().sum()


def _break_off_in_first_backward(rank: int, model_class: type[BreaksOff]) -> str:
    ddp = EagerDDP(model_class(), bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    ddp.module.armed = rank == 0
    message = ""
    try:
        ddp(row_batch(rank, 0)).backward()
    except (RuntimeError, ValueError) as error:
        message = str(error)
    ddp.module.armed = False
    ddp.abandon_backward()  # rank 1 waits for it, and rank 0 for rank 1 in the averaging by hand
    if model_class is BreaksOffAtTheEnd:
        with pytest.raises(RuntimeError, match="when all of it had been sent"):
            ddp(row_batch(rank, 4)).backward()
    for step in (1, 2, 3):
        _step(ddp, rank, step)
    assert_equal_on_all_ranks(ddp.plan.fingerprint)
    return message


@pytest.mark.parametrize("model_class", [BreaksOff, BreaksOffAtTheEnd])
def test_an_exception_in_the_first_backward_leaves_one_sequence(ranks2: RankPool, model_class: type[BreaksOff]) -> None:
    broken, other = ranks2.run(_break_off_in_first_backward, model_class)
    assert broken == "planted"
    assert ("broke off on 1" in other) == (model_class is BreaksOff)


def _errors_of(*calls: Callable[[], object]) -> list[str]:
    """What each call raises in turn, "" for one that does not."""
    messages = []
    for call in calls:
        try:
            call()
            messages.append("")
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    return messages


def _both_break_off(rank: int) -> list[str]:
    """Rank 0 after its last launch, rank 1 before, in the first backward, whose end agrees on the sequence."""
    ddp = EagerDDP((BreaksOffAtTheEnd if rank == 0 else BreaksOff)(), bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    ddp.module.armed = True
    messages = _errors_of(lambda: ddp(row_batch(rank, 0)).backward(), ddp.abandon_backward)
    ddp.module.armed = False
    for step in (1, 2, 3):
        _step(ddp, rank, step)
    return messages


def test_ranks_that_break_off_at_different_places_all_drop_the_step(ranks2: RankPool) -> None:
    assert ranks2.run(_both_break_off) == [["planted", ""]] * 2


def _break_off_with_another_count(rank: int) -> list[str]:
    ddp = EagerDDP(BreaksOffAtTheEnd(), bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    _step(ddp, rank, 0)
    dropped = ddp(row_batch(rank, 1)) if rank == 0 else None
    ddp.module.armed = rank == 0
    messages = _errors_of(lambda: ddp(row_batch(rank, 2)).backward(), ddp.abandon_backward)
    del dropped
    return messages


def test_a_rank_that_breaks_off_at_the_end_of_a_backward_of_another_step_says_so_as_the_others_do(
    ranks2: RankPool,
) -> None:
    (planted, broken), (other, nothing) = ranks2.run(_break_off_with_another_count)
    assert (planted, nothing) == ("planted", "")
    for message in (broken, other):
        assert "averaged gradients of different steps. " in message
        assert "rank 0: 3, rank 1: 2." in message


# ---- what hooks refuse -----------------------------------------------------------------------------------------------


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.token.weight, sparse=True).square().sum()


def _sparse(rank: int) -> None:
    ddp = EagerDDP(SparseEmbedding())
    with pytest.raises(RuntimeError, match=r"parameter token\.weight got a torch\.sparse_coo gradient.*sparse=False"):
        ddp(torch.tensor([1, 2])).backward()


def test_a_sparse_gradient_is_refused_by_name(ranks2: RankPool) -> None:
    ranks2.run(_sparse)


# ---- hooks as the graph's fallback -----------------------------------------------------------------------------------


class PartlyEager(nn.Module):
    """One layer runs outside of any graph, one parameter inside and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.captured, self.eager, self.both = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.both(torch.tanh(self.captured(x)))
        return self.run_eagerly(x).square().sum()

    @torch.compiler.disable
    def run_eagerly(self, x: Tensor) -> Tensor:
        return self.eager(x) + self.both(x)


def _partly_eager(rank: int) -> tuple[list[tuple[str, list[str], str]], list[str]]:
    model = PartlyEager()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = compile_ddp(model, backend="aot_eager", smallest_graph_mb=0)
        for step in range(4):
            expected = expected_mean(model, lambda module: module(row_batch(rank, step)))  # noqa: B023
            ddp.zero_grad()
            ddp(row_batch(rank, step)).backward()
            assert_gradients(model, expected)
    said = [str(warning.message) for warning in caught if "reduced by hooks" in str(warning.message)]
    names = ddp.plan.parameter_names
    return [(s.origin, [names[index] for index in s.plan.indices], s.reason) for s in ddp.plan.sections], said


def test_eager_parts_go_by_hooks_and_parameters_of_both_kinds_are_reduced_once_in_effect(ranks2: RankPool) -> None:
    (first, said), (second, _) = ranks2.run(_partly_eager)
    assert first == second
    assert len(said) == len(set(said)) == 2, said
    by_reason = {(origin, reason.split(":")[0]): sorted(names) for origin, names, reason in first}
    assert by_reason["hooks", "not in a captured graph"] == ["eager.bias", "eager.weight"]
    assert by_reason["hooks", "used both inside a captured graph and outside of it"] == ["both.bias", "both.weight"]
    assert {name for (origin, _), names in by_reason.items() if origin == "graph" for name in names} == {
        "captured.bias",
        "captured.weight",
        "both.bias",
        "both.weight",
    }


def _parameter_hook(rank: int) -> None:
    model = Mlp()
    seen = []
    ddp = compile_ddp(model, backend="aot_eager", smallest_graph_mb=0)
    x = row_batch(rank)
    loss = lambda module: module(x).square().sum()  # noqa: E731
    plain = local_gradients(model, loss)
    loss(ddp).backward()
    ddp.zero_grad()

    def clamp(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient.clamp(-0.01, 0.01)

    handle = model.head.weight.register_hook(clamp)
    expected = expected_mean(model, loss)
    seen.clear()
    with pytest.warns(UserWarning, match="tensor hook on the parameter"):
        loss(ddp).backward()
    assert_gradients(model, expected)
    torch.testing.assert_close(seen[0], plain["head.weight"])
    handle.remove()
    ddp.zero_grad()
    expected = expected_mean(model, loss)
    loss(ddp).backward()
    assert_gradients(model, expected)


def test_a_tensor_hook_on_a_parameter_sees_the_local_gradient(ranks2: RankPool) -> None:
    ranks2.run(_parameter_hook)


def _falls_to_eager(rank: int) -> None:
    """Rank 1 stops compiling in mid-training; its buckets go by hooks, in the same order."""
    ddp = wrappers(["compile_ddp"])["compile_ddp"](TokenModel())
    for step in range(4):
        x, y = token_batch(10 * step + rank)
        expected = expected_mean(ddp.module, lambda module: module(x, y))  # noqa: B023
        ddp.zero_grad()
        stance = "force_eager" if rank == 1 and step >= 2 else "default"
        with torch.compiler.set_stance(stance), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ddp(x, y).backward()
        assert_gradients(ddp.module, expected)


def test_a_rank_that_runs_eagerly_reduces_the_same_buckets_by_hooks(ranks2: RankPool) -> None:
    ranks2.run(_falls_to_eager)


class SharedByTwoGraphs(nn.Module):
    """One parameter in two captured graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(x))
        torch._dynamo.graph_break()
        return self.own(self.shared(x)).square().sum()


def _eager_on_rank_one(rank: int, model_class: type[nn.Module]) -> None:
    """Rank 1 leaves its graphs in some steps, in which parameters stand in several sections."""
    ddp = compile_ddp(model_class(), backend="aot_eager", bucket_cap_mb=1e-6, first_bucket_mb=1e-6, smallest_graph_mb=0)
    for step in range(6):
        expected = expected_mean(ddp.module, lambda module: module(row_batch(rank, step)))  # noqa: B023
        ddp.zero_grad()
        stance = "force_eager" if rank == 1 and step in (2, 3, 5) else "default"
        with torch.compiler.set_stance(stance), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ddp(row_batch(rank, step)).backward()
        assert_gradients(ddp.module, expected)


@pytest.mark.parametrize("model_class", [SharedByTwoGraphs, PartlyEager])
def test_a_parameter_of_several_sections_is_right_when_one_rank_runs_eagerly(
    ranks2: RankPool, model_class: type[nn.Module]
) -> None:
    ranks2.run(_eager_on_rank_one, model_class)


def _freezes_in_turns(rank: int) -> None:
    """Gradual unfreezing: in each step another part is frozen, which changes the captured graph."""
    ddp = compile_ddp(UsedInReverse(), backend="aot_eager", smallest_graph_mb=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, frozen in enumerate((None, "first", "third", None)):
            for name, part in ddp.module.named_children():
                part.requires_grad_(name != frozen)
            expected = expected_mean(ddp.module, lambda module: module(row_batch(rank, step)))  # noqa: B023
            ddp.zero_grad()
            ddp(row_batch(rank, step)).backward()
            for name, parameter in ddp.module.named_parameters():
                if parameter.requires_grad:
                    torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6)
                else:
                    assert parameter.grad is None, name


def test_parts_may_be_frozen_in_turns(ranks2: RankPool) -> None:
    ranks2.run(_freezes_in_turns)


def _gradient_penalty(rank: int) -> None:
    ddp = EagerDDP(Mlp())
    for step in range(2):
        x = row_batch(rank, step).requires_grad_()

        def penalty(module: nn.Module) -> Tensor:
            (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)  # noqa: B023
            return gradient.square().sum()

        local = local_gradients(ddp.module, penalty)
        expected = mean_over_ranks(local, ddp.module)
        ddp.zero_grad()
        penalty(ddp).backward()
        for name, parameter in ddp.module.named_parameters():
            if local[name] is not None:
                torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_a_gradient_penalty_is_reduced_in_the_backward_that_accumulates(ranks2: RankPool) -> None:
    ranks2.run(_gradient_penalty)


def _pending_after_a_broken_backward(rank: int) -> None:
    """What was accumulated under no_sync before a broken backward does not come back after zero_grad()."""
    ddp = compile_ddp(TwoPartsBreakingOff(), backend="aot_eager", smallest_graph_mb=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp(row_batch(rank)).backward()
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(row_batch(rank, 1)).backward()
        ddp.module.armed = True
        with pytest.raises(ValueError, match="planted"):
            ddp(row_batch(rank, 2)).backward()
        ddp.module.armed = False
        ddp.abandon_backward()
        ddp.zero_grad()
        expected = expected_mean(ddp.module, lambda module: module(row_batch(rank, 3)))
        ddp(row_batch(rank, 3)).backward()
    assert_gradients(ddp.module, expected)


class TwoPartsBreakingOff(BreaksOff):
    def forward(self, x: Tensor) -> Tensor:
        x = self.break_off(self.first(x))
        return self.second(x).square().sum()

    @torch.compiler.disable
    def break_off(self, x: Tensor) -> Tensor:
        return RaisesInBackward.apply(x, self.armed)


def test_gradients_cleared_after_a_broken_backward_stay_cleared(ranks2: RankPool) -> None:
    ranks2.run(_pending_after_a_broken_backward)


def _another_weight(model: Mlp) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def _no_bias(model: Mlp) -> None:
    model.first.bias = None


def _another_module(model: Mlp) -> None:
    model.head = nn.Linear(8, 3)


def _replace(rank: int, wrapper: str, change: Callable[[Mlp], None], named: str) -> None:
    ddp = wrappers(BOTH)[wrapper](Mlp())
    ddp(row_batch(rank)).square().sum().backward()
    change(ddp.module)
    with pytest.raises(RuntimeError, match=rf"^{named} was replaced or removed .* unwrap\(\)"):
        ddp(row_batch(rank))
    again = wrappers(BOTH)[wrapper](ddp.unwrap())
    expected = expected_mean(again.module, lambda module: module(row_batch(rank)).square().sum())
    again.zero_grad()
    again(row_batch(rank)).square().sum().backward()
    assert_gradients(again.module, expected)


@pytest.mark.parametrize(
    ("change", "named"), [(_another_weight, "head.weight"), (_no_bias, "first.bias"), (_another_module, "head")]
)
@pytest.mark.parametrize("wrapper", BOTH)
def test_what_was_replaced_or_removed_after_wrapping_is_refused(
    ranks2: RankPool, wrapper: str, change: Callable[[Mlp], None], named: str
) -> None:
    ranks2.run(_replace, wrapper, change, named)


def _another_shape_on_one_rank(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](TokenModel())
    for step in range(4):
        x, y = token_batch(10 * step + rank, batch=3 + (rank == 1 and step == 2))
        expected = expected_mean(ddp.module, lambda module: module(x, y))  # noqa: B023
        ddp.zero_grad()
        ddp(x, y).backward()
        assert_gradients(ddp.module, expected)


def test_a_rank_that_compiles_for_another_shape_keeps_the_sequence(ranks2: RankPool) -> None:
    ranks2.run(_another_shape_on_one_rank)


def _mixed_dtypes(rank: int) -> None:
    for name in BOTH:
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3).double(), nn.Linear(3, 2).bfloat16())

        class Mixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = model  # noqa: B023

            def forward(self, x: Tensor) -> Tensor:
                x = self.layers[1](self.layers[0](x).double())
                return self.layers[2](x.bfloat16()).float().sum()

        ddp = wrappers([name])[name](Mixed())
        for step in range(2):
            local = local_gradients(ddp.module, lambda module: module(row_batch(rank, step)))  # noqa: B023
            expected = mean_over_ranks(local, ddp.module)
            ddp.zero_grad()
            ddp(row_batch(rank, step)).backward()
            assert_gradients(ddp.module, expected, rtol=2e-2, atol=1e-3)
            assert all(p.grad.dtype == p.dtype for p in ddp.module.parameters())
        assert ddp.plan.buckets[-1].dtype == torch.float32


def test_buckets_of_several_dtypes(ranks2: RankPool) -> None:
    ranks2.run(_mixed_dtypes)
