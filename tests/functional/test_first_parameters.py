"""Parameters that differ between ranks when a function is first called: told of once, where ranks agree anyway."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_grad import loss, parameters, rows
from torch import Tensor

from compiled_ddp import functional as ddp
from compiled_ddp.functional import first_parameters
from compiled_ddp.functional.first_parameters import FirstParameters
from ranks import RankPool

Tree = dict[str, Tensor]


def told(action: Callable[[], object]) -> list[str]:
    """What is said in `action` of parameters that differ."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in caught if "the parameters differ" in str(each.message)]


def shifted(rank: int, *names: str) -> Tree:
    """Rank 0's, and on others in these leaves something else."""
    return {name: value + rank if name in names else value for name, value in parameters().items()}


def _sgd(gradient: Callable[..., Tree], *, cast: bool = False) -> Callable[..., Tree]:
    def step(params: Tree, x: Tensor) -> Tree:
        taken = {name: value.bfloat16() for name, value in params.items()} if cast else params
        gradients = gradient(taken, x.bfloat16() if cast else x)
        return {name: value - 0.1 * gradients[name] for name, value in params.items()}

    return step


def _differ(rank: int, how: str) -> list[list[str]]:
    """What three steps say, then one with another tree, then one with equal parameters and another function."""
    gradient, x = ddp.grad(loss), rows(rank)
    if how == "closed over":
        closed = shifted(rank, "bias", "head")
        step = ddp.compile(lambda _, x: gradient(closed, x), backend="aot_eager")
    else:
        step = _sgd(gradient, cast=how == "cast")
        step = step if how == "eager" else ddp.compile(step, backend="aot_eager")
    params, found = shifted(rank, "bias", "head"), list[list[str]]()
    for _ in range(3):
        found.append(told(lambda: step(params, x)))
    if how == "eager":
        wider = {name: torch.cat((value, value)) if name == "bias" else value for name, value in params.items()}
        wide = ddp.grad(lambda params, x: loss(params | {"bias": params["bias"].view(2, -1).sum(0)}, x))
        found += [told(lambda: wide(params | {"bias": params["bias"].repeat(2)}, x)), told(lambda: wide(wider, x))]
    found.append(told(lambda: ddp.grad(loss)(parameters(), x)))
    return found


@pytest.mark.parametrize("how", ["eager", "compiled", "cast", "closed over"])
def test_ranks_are_told_once_of_parameters_that_differ_by_name(ranks3: RankPool, how: str) -> None:
    for (message,), *others in ranks3.run(_differ, how):
        assert "argument 0['bias'] of grad(loss) and 1 more on rank 1, 2 is not what it is on rank 0" in message
        assert "params = compiled_ddp.functional.broadcast(params)" in message
        again = [message.replace("grad(loss)", "grad(_differ.<lambda>)")] if how == "eager" else []
        assert others[:2] == [[], []] and others[-1] == []
        if how == "eager":
            assert others[2:4] == [again, []]


def _one_differs(rank: int) -> list[str]:
    """In a group of ranks 1 and 2, of which rank 2 has another head; rank 0 calls nothing."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    gradient = ddp.grad(loss, process_group=group)
    return told(lambda: gradient(shifted(rank - 1, "head"), rows(rank)))


def test_ranks_of_a_group_are_called_by_their_global_numbers(ranks3: RankPool) -> None:
    nothing, first, second = ranks3.run(_one_differs)
    assert nothing == [] and first == second and len(first) == 1
    assert "argument 0['head'] of grad(loss) on rank 2 is not what it is on rank 1" in first[0]


def _only_rank_1_differs(rank: int) -> list[str]:
    return told(lambda: ddp.grad(loss)(shifted(int(rank == 1), "head"), rows(rank)))


def test_a_rank_that_is_as_rank_0_is_not_told(ranks3: RankPool) -> None:
    assert [len(found) for found in ranks3.run(_only_rank_1_differs)] == [1, 1, 0]


KINDS: dict[str, Callable[[], Tensor]] = {
    "bfloat16": lambda: torch.ones(5, dtype=torch.bfloat16),
    "float16": lambda: torch.ones(3, 3, dtype=torch.float16),
    "complex64": lambda: torch.ones(3, dtype=torch.complex64),
    "conjugated": lambda: torch.full((3,), 1j).conj(),
    "not a number": lambda: torch.tensor([float("nan"), 1.0, float("inf")]),
    "no elements": lambda: torch.ones(0, 3),
    "no dimensions": lambda: torch.ones(()),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "of many elements": lambda: torch.ones(70, 70),
    "at an odd place": lambda: torch.ones(5002)[1:],
    "to be trained": lambda: torch.nn.Parameter(torch.ones(3)),
}


def _changed(value: Tensor) -> Tensor:
    """In the bits of its last element alone."""
    copied = value.detach().clone()
    copied.view(-1)[-1] = 7
    return copied


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_parameter_has_a_checksum_of_its_bits_and_stays_as_it_is(kind: str) -> None:
    value = KINDS[kind]()
    version, before = value._version, value.detach().clone()
    checksum = checksum_of(value)
    assert checksum == checksum_of(KINDS[kind]()) == checksum_of(value.detach().clone().contiguous())
    if value.numel():
        assert checksum != checksum_of(_changed(value.contiguous()))
    torch.testing.assert_close(value.detach(), before, equal_nan=True, rtol=0, atol=0)
    assert value._version == version


def checksum_of(value: Tensor) -> int:
    (found,) = FirstParameters([{"p": value}]).checksums({0: "f"}).values()
    return found


class Wrapped(Tensor):
    """A subclass, whose memory may be anything."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(3).as_subclass(Wrapped),
        lambda: None,
    ],
)
def test_what_has_no_plain_values_is_not_compared(make: Callable[[], Any]) -> None:
    assert FirstParameters([{"p": make()}]).checksums({0: "f"}) == {}


def _within_transforms(rank: int) -> list[list[str]]:
    """An ensemble's members, and the parameters of a gradient in a loss; traced by others nothing has values."""
    members = {name: torch.stack((value, 2 * value)) for name, value in shifted(rank, "head").items()}
    gradient = ddp.grad(loss)
    ensemble = told(lambda: torch.func.vmap(gradient, in_dims=(0, None))(members, rows(rank)))

    def norm(params: Tree) -> Tensor:
        return sum(g.square().sum() for g in ddp.grad(loss)(params, rows(rank)).values())

    inner = told(lambda: torch.func.grad(norm)(shifted(rank, "head")))
    traced = told(
        lambda: torch.fx.experimental.proxy_tensor.make_fx(ddp.grad(loss), tracing_mode="fake")(
            shifted(rank, "head"), rows(rank)
        )
    )
    return [ensemble, inner, traced]


def test_transforms_do_not_hide_what_differs(ranks2: RankPool) -> None:
    for ensemble, inner, traced in ranks2.run(_within_transforms):
        assert len(ensemble) == len(inner) == 1 and "argument 0['head'] of grad(loss) on rank 1" in ensemble[0]
        assert traced == []


def _silenced(rank: int) -> int:
    """A filter silences it; one that makes it an error raises behind the reduction, so that no rank waits in vain."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "the parameters differ between ranks")
        ddp.grad(loss)(shifted(rank, "head"), rows(rank))
    gradient = ddp.grad(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="the parameters differ between ranks"):
            gradient(shifted(rank, "head"), rows(rank))
    gradient(shifted(rank, "head"), rows(rank))
    return len(caught)


def test_it_is_silenced_by_a_filter_and_may_be_made_an_error(ranks2: RankPool) -> None:
    assert ranks2.run(_silenced) == [0, 0]


def _work(rank: int, compiled: bool) -> list[int]:
    """How many parameters are looked at in each of three calls, in the last one of another graph."""
    seen, rows_of = list[int](), first_parameters._rows

    def counted(given: Any) -> Any:
        seen[-1] += len(given)
        return rows_of(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_parameters, "_rows", counted)
        step = _sgd(ddp.grad(loss))
        step = ddp.compile(step, backend="aot_eager") if compiled else step
        for number in range(3):
            seen.append(0)
            step(parameters(), rows(rank)[: 3 if number == 2 and rank else 4])
    return seen


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_looked_at_after_the_first_call(ranks2: RankPool, compiled: bool) -> None:
    assert ranks2.run(_work, compiled) == [[4, 0, 0]] * 2


def _twins(rank: int) -> list[str]:
    """One gradient function of two trees, of which the first one differs; and what is made of a batch."""
    gradient, x = ddp.grad(loss), rows(rank)

    def step(first: Tree, second: Tree, x: Tensor) -> tuple[Tree, Tree, Tensor]:
        of_zeros = ddp.grad(lambda zeros, x: (x + zeros).square().sum())(torch.zeros_like(x), x)
        return gradient(first, x), gradient(second, x), of_zeros

    compiled = ddp.compile(step, backend="aot_eager")
    return told(lambda: compiled(shifted(rank, "bias"), parameters(), x))


def test_two_trees_of_one_function_are_told_apart_and_zeros_like_a_batch_are_no_parameters(ranks2: RankPool) -> None:
    for (message,) in ranks2.run(_twins):
        assert "argument 0['bias'] of grad(loss) on rank 1 is not what it is on rank 0" in message
