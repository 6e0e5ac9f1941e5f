"""Models that give parameters and buffers by methods of their own, as those that keep some in plain lists."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_equal_on_all_ranks, row_batch, wrappers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp.model.managed import ManagedState
from compiled_ddp.model.watch import ModelWatch
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


class Scaled(nn.Module):
    """Keeps scales in a plain list, beside what it has registered."""

    def __init__(self, features: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 5)
        self.hidden = [nn.Parameter(torch.rand(5)) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.hidden[0] + self.hidden[1])


class GivesNames(Scaled):
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        for number, parameter in enumerate(self.hidden):
            yield f"{prefix}.hidden{number}".removeprefix("."), parameter


class GivesAllAtOnce(Scaled):
    """It takes no `recurse`, gives some twice, and calls two parameters the same."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
        for name, parameter in self.linear.named_parameters():
            yield f"linear.{name}", parameter
        for parameter in (*self.hidden, *self.hidden):
            yield "hidden", parameter


class GivesNoNames(Scaled):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from super().parameters(recurse)
        yield from self.hidden


class GivesGroups(Scaled):
    """What some optimizer takes for groups, beside parameters."""

    def parameters(self) -> Iterator[Any]:  # type: ignore[override]
        yield {"params": [*super().parameters()], "lr": 0.1}
        yield from self.hidden


class Holder(nn.Module):
    """A module that gives by methods of its own, as a part of a larger one."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.head = nn.Linear(5, 5), part, nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(self.first(x))).square().sum()


KINDS = GivesNames, GivesAllAtOnce, GivesNoNames, GivesGroups


def _trained_apart(rank: int, wrapper: str, kind: type[Scaled], whole: bool) -> None:
    torch.manual_seed(rank)
    part = kind()
    model = part if whole else Holder(part)
    ddp = wrappers([wrapper])[wrapper](model)
    trained = (part.linear.weight, part.linear.bias, *part.hidden)
    assert_equal_on_all_ranks([parameter.tolist() for parameter in trained])
    for step in range(3):
        x = row_batch(rank, step)
        local = _local_gradients(model, x)
        for gradient in local:
            dist.all_reduce(gradient)
        for parameter in trained:
            parameter.grad = None
        ddp(x).square().sum().backward()
        for parameter, total in zip(trained, local, strict=True):
            torch.testing.assert_close(parameter.grad, total / 2)
    assert {section.origin for section in ddp.plan.sections} == {"graph" if wrapper == "compile_ddp" else "hooks"}


def _local_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of the part that gives by methods of its own, on a copy: a backward of the model may be the wrapper's."""
    alone = copy.deepcopy(model)
    part = alone.part if isinstance(alone, Holder) else alone
    alone(x).square().sum().backward()
    return [parameter.grad for parameter in (part.linear.weight, part.linear.bias, *part.hidden)]


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "part"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_methods_of_their_own_give_is_broadcast_and_reduced(
    ranks2: RankPool, kind: type[Scaled], whole: bool, wrapper: str
) -> None:
    ranks2.run(_trained_apart, wrapper, kind, whole)


class Hides(Holder):
    """It leaves out what DDP reduces all the same, and a scale that DDP does not."""

    def __init__(self) -> None:
        super().__init__(nn.Tanh())
        self.scale = nn.Parameter(torch.rand(1))

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from (
            (name, p)
            for name, p in super().named_parameters(*args, **options)
            if name.partition(".")[0] not in ("first", "scale")
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def _hidden_gradients(rank: int, wrapper: str) -> None:
    torch.manual_seed(rank)
    model = Hides()
    ddp = wrappers([wrapper])[wrapper](model)
    ddp(row_batch(rank)).backward()
    for parameter in (model.first.weight, model.scale):
        assert_equal_on_all_ranks([parameter.tolist(), parameter.grad.tolist()])


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_they_leave_out_is_reduced_all_the_same(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_hidden_gradients, wrapper)


class GivesBuffers(Holder):
    """Gives a buffer that is not registered, another one in each forward, and leaves out one that is."""

    def __init__(self, rank: int) -> None:
        super().__init__(nn.Tanh())
        self.plain = [torch.full((2,), float(rank))]
        self.register_buffer("own", torch.full((2,), float(rank)))
        self.register_buffer("shared", torch.full((2,), float(rank)))

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, buffer) for name, buffer in super().named_buffers(*args, **options) if name != "own")
        yield "plain", self.plain[0]


def _buffers(rank: int, wrapper: str) -> list[list[float]]:
    model = GivesBuffers(rank)
    ddp = DistributedDataParallel(model) if wrapper == "DDP" else wrappers([wrapper])[wrapper](model)
    found = [[model.plain[0][0].item(), model.own[0].item(), model.shared[0].item()]]
    for value in (4.0, 6.0):
        model.plain = [torch.full((2,), value + rank)]
        ddp(row_batch(rank)).backward()
        found.append([model.plain[0][0].item(), model.own[0].item(), model.shared[0].item()])
    return found


@pytest.mark.parametrize("wrapper", ["DDP", *BOTH])
def test_buffers_are_those_that_the_models_own_method_gives(ranks2: RankPool, wrapper: str) -> None:
    for rank, found in enumerate(ranks2.run(_buffers, wrapper)):
        assert found == [[0, rank, 0], [4, rank, 0], [6, rank, 0]]


# ---- on plain modules ------------------------------------------------------------------------------------------------


def test_each_is_there_once_under_a_name_of_its_own() -> None:
    assert [*ManagedState(GivesAllAtOnce()).trained()] == ["linear.weight", "linear.bias", "hidden", "hidden (2)"]
    names = [name for name in ManagedState(Holder(GivesAllAtOnce())).trained() if name.startswith("part")]
    assert names == ["part.linear.weight", "part.linear.bias", "part.hidden", "part.hidden (2)"]
    names = [name for name in ManagedState(Holder(GivesNoNames())).trained() if "()" in name]
    assert names == ["part.parameters()[0]", "part.parameters()[1]"]


def test_those_to_ignore_are_left_alone() -> None:
    model = Holder(GivesNames())
    model._ddp_params_and_buffers_to_ignore = ["part.hidden0", "part.linear.bias"]
    state = ManagedState(model)
    assert "part.hidden1" in state.trained()
    assert [*state.left_alone()] == ["part.linear.bias", "part.hidden0"]


def test_those_of_a_wrapper_inside_are_its_own_also_where_the_model_gives_them() -> None:
    class GivesInner(Holder):
        def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
            yield from super().named_parameters()
            yield from self.part.module.named_parameters()

    inner = GivesNames()
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = inner
    names = {*ManagedState(GivesInner(wrapper)).parameters()}
    assert names == {"first.weight", "first.bias", "head.weight", "head.bias"}


def test_a_module_that_holds_nothing_but_such_parameters_is_missed_where_it_was_replaced() -> None:
    part = GivesNames()
    part.linear.requires_grad_(False)
    model = Holder(part)
    watch = ModelWatch(ManagedState(model))
    model.part = copy.deepcopy(part)
    with pytest.raises(RuntimeError, match=r"^part was replaced or removed"):
        watch.look()
