"""Gradients of plain functions, eager: torch.func's contract, the mean over ranks, and what is refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_ddp import functional as ddp
from compiled_ddp import torch_private
from ranks import RankPool

EPSILON = torch.finfo(torch.float32).eps


def parameters() -> dict[str, Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"first": (5, 8), "bias": (8,), "head": (8, 3), "unused": (2, 2)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def rows(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["first"] + params["bias"]) @ params["head"]).square().sum()


def by_hand(f: Any, world_size: int, *batches: Any, weights: Any = None) -> Any:
    """Plain autograd's gradients of `f` in float64, averaged over what the ranks have."""
    weights = weights or [1.0 / world_size] * world_size
    total: dict[str, Tensor] = {}
    for rank in range(world_size):
        leaves = {name: value.double().requires_grad_() for name, value in parameters().items()}
        f(leaves, rows(rank).double()).backward()
        for name, leaf in leaves.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            total[name] = total.get(name, 0) + weights[rank] * gradient
    return total


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal but for eight roundings to float32 of the largest element, as what cancels out keeps its terms' errors."""
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        distance = (found[name].double() - value.double()).abs().max()
        assert found[name].shape == value.shape, name
        assert distance <= 8 * EPSILON * largest, f"{name} is {float(distance / largest):.1e} of the largest away"


def _means(rank: int, world_size: int, bucket_cap_mb: float | None) -> None:
    expected = by_hand(loss, world_size)
    step = ddp.grad(loss, bucket_cap_mb=bucket_cap_mb)
    for _ in range(2):
        assert_same(step(parameters(), rows(rank)), expected)
    gradients, value = ddp.grad_and_value(loss)(parameters(), x=rows(rank))
    assert_same(gradients, expected)
    torch.testing.assert_close(value, loss(parameters(), rows(rank)))  # this rank's
    sums = ddp.grad(loss, reduction="sum")(parameters(), rows(rank))
    assert_same(sums, {name: mean * world_size for name, mean in expected.items()})
    _, mean = ddp.grad_and_value(loss, reduce_value=True)(parameters(), rows(rank))
    torch.testing.assert_close(mean, sum(loss(parameters(), rows(r)) for r in range(world_size)) / world_size)


@pytest.mark.parametrize("bucket_cap_mb", [None, 0, 0.0001])
def test_every_rank_gets_the_mean_of_plain_autograds_gradients(ranks2: RankPool, bucket_cap_mb: float | None) -> None:
    ranks2.run(_means, 2, bucket_cap_mb)


def test_three_ranks(ranks3: RankPool) -> None:
    ranks3.run(_means, 3, None)


def _weighted(rank: int) -> None:
    weights = [3.0, 1.0]
    expected = by_hand(loss, 2, weights=[0.75, 0.25])
    step = ddp.grad_and_value(loss, reduction="weighted", reduce_value=True)
    gradients, value = step(parameters(), rows(rank), weight=weights[rank])
    assert_same(gradients, expected)
    torch.testing.assert_close(value, 0.75 * loss(parameters(), rows(0)) + 0.25 * loss(parameters(), rows(1)))
    gradients, _ = step(parameters(), rows(rank) * (1 if rank else float("nan")), weight=torch.tensor(float(rank)))
    assert_same(gradients, by_hand(loss, 2, weights=[0.0, 1.0]))
    with pytest.raises(TypeError, match="weight="):
        step(parameters(), rows(rank))


def test_weighted_mean_takes_a_weight_in_each_call_and_leaves_out_a_rank_without(ranks2: RankPool) -> None:
    ranks2.run(_weighted)


def _contract(rank: int) -> None:
    def with_aux(scale: Tensor, tree: Any, x: Tensor, *, power: int) -> Any:
        (first, rest), _ = tree
        aux = {"counts": torch.arange(3), "doubled": [x * 2]}
        return ((scale * (x @ first)).pow(power).mean() + rest["b"].sum()), aux

    scale, tree = (
        torch.tensor(2.0),
        ((torch.randn(5, 2, generator=torch.Generator().manual_seed(1)), {"b": torch.ones(2)}),),
    )
    args = scale, (tree[0], None), rows(rank)

    def call(transform: Any, argnums: Any, has_aux: bool) -> Any:
        f = with_aux if has_aux else lambda *a, **k: with_aux(*a, **k)[0]
        return transform(f, argnums, has_aux)(*args, power=2)

    for argnums in (0, (0,), (2, 0), -1):
        for has_aux in (False, True):
            for name in ("grad", "grad_and_value"):
                expected = call(getattr(torch.func, name), argnums, has_aux)
                found = call(getattr(ddp, name), argnums, has_aux)
                flat, structure = torch_private.trees.flatten(expected)
                found_flat, found_structure = torch_private.trees.flatten(found)
                assert found_structure == structure
                for one, other in zip(found_flat, flat, strict=True):
                    assert type(one) is type(other)
                    assert not isinstance(one, Tensor) or (one.shape, one.dtype) == (other.shape, other.dtype)


def test_results_have_the_structure_of_torch_funcs(ranks2: RankPool) -> None:
    ranks2.run(_contract)


def _kinds(rank: int) -> None:
    tree = {
        "half": torch.ones(3, dtype=torch.float16),
        "double": torch.ones(3, dtype=torch.float64),
        "brain": torch.ones(2, 2, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "none": torch.ones(0),
        "scalar": torch.tensor(1.0),
    }

    def f(tree: dict[str, Tensor]) -> Tensor:
        return sum(((rank + 1) * leaf.abs()).sum().to(torch.float64) for leaf in tree.values())

    for name, gradient in ddp.grad(f)(tree).items():
        assert (gradient.dtype, gradient.shape) == (tree[name].dtype, tree[name].shape)
        torch.testing.assert_close(gradient, torch.full_like(tree[name], 1.5), msg=name)


def test_every_floating_point_dtype_is_reduced_in_its_own(ranks2: RankPool) -> None:
    ranks2.run(_kinds)


def _users_ways(rank: int) -> None:
    """Gradients of leaves that require gradients, tied ones, non-contiguous ones, under no_grad and in place."""
    expected = by_hand(loss, 2)
    step = ddp.grad(loss)
    leaves = {name: value.requires_grad_() for name, value in parameters().items()}
    assert_same({name: value.detach() for name, value in step(leaves, rows(rank)).items()}, expected)
    assert all(leaf.grad is None for leaf in leaves.values())
    with torch.no_grad():
        assert_same(step(parameters(), rows(rank)), expected)
    transposed = parameters()
    transposed["first"] = transposed["first"].t().contiguous().t()
    assert_same(step(transposed, rows(rank)), expected)
    params = parameters()
    for name, gradient in step(params, rows(rank)).items():
        gradient.mul_(0.1)
        params[name].sub_(gradient)
    assert_same(params, {name: value - 0.1 * expected[name] for name, value in parameters().items()})
    tied = torch.ones(3)
    found = ddp.grad(lambda tree: (rank + 1) * (tree["a"] * 2 + tree["b"]).sum())({"a": tied, "b": tied})
    assert (found["a"].tolist(), found["b"].tolist()) == ([3.0] * 3, [1.5] * 3)


def test_what_users_differentiate_with(ranks2: RankPool) -> None:
    ranks2.run(_users_ways)


# ---- ranks that differ -----------------------------------------------------------------------------------------------


def _refuses(rank: int, case: str) -> str:
    params, options = parameters(), {}
    if case == "shape" and rank:
        params["head"] = params["head"][:, :2]
    if case == "dtype" and rank:
        params["unused"] = params["unused"].double()
    if case == "tree" and rank:
        del params["unused"]
    if case == "reduction" and rank:
        options["reduction"] = "sum"
    functions = {"one": lambda p, x: loss(p, x), "other": lambda p, x: loss(p, x)}
    functions["one"].__qualname__, functions["other"].__qualname__ = "one", "other"
    names = ["other", "one"] if case == "order" and rank else ["one", "other"]
    with pytest.raises(RuntimeError) as error:  # noqa: PT012
        for name in names:
            ddp.grad(functions[name], **options)(params, rows(rank))
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("shape", "argument 0['head']"),
        ("dtype", "argument 0['unused'] is torch.float64"),
        ("tree", "argument 0['unused']"),
        ("reduction", "reduction is sum here, mean on rank 0"),
        ("order", "the function is grad(other) here, grad(one) on rank 0"),
    ],
)
def test_ranks_that_differ_are_refused_by_name_on_every_rank(ranks2: RankPool, case: str, named: str) -> None:
    for message in ranks2.run(_refuses, case):
        assert named in message and "reduced nothing" in message


def _raises_on_one(rank: int) -> list[str]:
    expected, messages = by_hand(loss, 3), []

    def fails(params: dict[str, Tensor], x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("no batch")
        return loss(params, x)

    step = ddp.grad(fails)
    for number in range(3):
        x = rows(rank) * (float("nan") if rank == 1 and number < 2 else 1)
        if number < 2:
            with pytest.raises((ValueError, RuntimeError)) as error:
                step(parameters(), x)
            messages.append(f"{error.type.__name__}: {error.value}")
        else:
            assert_same(step(parameters(), x), expected)
    return messages


def test_an_exception_on_one_rank_is_raised_on_every_rank_and_the_next_call_is_right(ranks3: RankPool) -> None:
    for rank, messages in enumerate(ranks3.run(_raises_on_one)):
        for message in messages:
            assert message == "ValueError: no batch" if rank == 1 else "rank 1: ValueError: no batch" in message


def _drops_a_step(rank: int) -> str:
    step, communicator = ddp.grad(loss), ddp.Communicator()
    other = ddp.grad(loss, process_group=communicator), ddp.grad(loss, process_group=communicator)
    step(parameters(), rows(rank))
    for function in other:
        function(parameters(), rows(rank))
    if rank == 1:
        communicator._calls += 1  # as after a call that the others did not make
    with pytest.raises(RuntimeError) as error:
        other[0](parameters(), rows(rank))
    step(parameters(), rows(rank))
    return str(error.value)


def test_gradients_of_different_steps_are_not_summed_up_silently(ranks2: RankPool) -> None:
    for message in ranks2.run(_drops_a_step):
        assert "in different steps" in message and "grad(loss)" in message


def _is_silent(rank: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(RuntimeError) as error:
        ddp.grad(loss)(parameters(), rows(rank))
    return str(error.value)


def test_a_rank_that_stays_silent_is_named_after_the_groups_timeout(ranks2: RankPool) -> None:
    message, _ = ranks2.run(_is_silent, collective_timeout_seconds=3)
    assert "waited 3 s for rank 1 (to compare what grad(loss) is called with)" in message


# ---- one rank, none --------------------------------------------------------------------------------------------------


def test_without_a_process_group_gradients_are_torch_funcs_with_one_warning() -> None:
    step = ddp.grad_and_value(loss, reduce_value=True)
    with pytest.warns(UserWarning, match="torch.distributed is not initialised") as warned:
        gradients, value = step(parameters(), rows(0))
    assert warned[0].filename == __file__
    expected, expected_value = torch.func.grad_and_value(loss)(parameters(), rows(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(parameters(), rows(0))
    assert value.equal(expected_value)
    assert all(gradient.equal(expected[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize(
    ("options", "message"), [({"reduction": "max"}, "reduction must be"), ({"bucket_cap_mb": -1}, "bucket_cap_mb must")]
)
def test_options_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ddp.grad(loss, **options)
