"""A whole step as one graph: equal to the eager one, its collectives in place, traced again where it must be."""

import gc
import re
import resource
import weakref
from typing import Any

import pytest
import torch
from growth import calls_in
from test_grad import assert_same, by_hand, loss, parameters, rows
from torch import Tensor

from compiled_ddp import functional as ddp
from compiled_ddp import torch_private
from compiled_ddp.functional import donations
from ranks import RankPool

LIMITS = {"timeout_seconds": 400, "collective_timeout_seconds": 120}
CAP = 0.0002

Tree = dict[str, Tensor]


def sgd(params: Tree, gradients: Tree, rate: float) -> Tree:
    return {name: value - rate * gradients[name] for name, value in params.items()}


def trained_by_hand(world_size: int, rate: float = 0.1) -> Tree:
    return sgd(parameters(), by_hand(loss, world_size), rate)


def _trains(rank: int, world_size: int, backend: Any) -> None:
    gradient = ddp.grad_and_value(loss, bucket_cap_mb=CAP, reduce_value=True)

    def step(params: Tree, x: Tensor, *, rate: float, note: str) -> Any:
        gradients, value = gradient(params, x)
        return sgd(params, gradients, rate), {"value": value, "note": note, "rows": x.shape[0]}

    compiled = ddp.compile(step, backend=backend)
    expected = by_hand(loss, world_size)
    values = [loss(parameters(), rows(r)) for r in range(world_size)]
    for rate in (0.1, 0.2, 0.1):
        params, rest = compiled(parameters(), rows(rank), rate=rate, note="n")
        assert_same(params, {name: value - rate * expected[name] for name, value in parameters().items()})
        torch.testing.assert_close(rest["value"], sum(values) / world_size)
        assert (rest["note"], rest["rows"]) == ("n", 4)
    if rank == 0:  # alone: other ranks keep their graph
        params, _ = compiled(parameters(), rows(rank)[:3], rate=0.1, note="n")
    else:
        params, _ = compiled(parameters(), rows(rank), rate=0.1, note="n")
    eager, _ = step(parameters(), rows(rank)[: 3 if rank == 0 else 4], rate=0.1, note="n")
    assert_same(params, eager)
    one_is_eager, _ = (step if rank else compiled)(parameters(), rows(rank), rate=0.1, note="n")
    assert_same(one_is_eager, sgd(parameters(), expected, 0.1))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_compiled_step_is_the_eager_one_also_where_ranks_have_other_graphs(ranks2: RankPool, backend: str) -> None:
    ranks2.run(_trains, 2, backend, **LIMITS)


def test_three_ranks_compiled(ranks3: RankPool) -> None:
    ranks3.run(_trains, 3, "aot_eager", **LIMITS)


RATE = 0.1


def _closes_over(rank: int) -> None:
    global RATE
    scale = torch.tensor(1.0)
    gradient = ddp.grad(lambda params, x: scale * loss(params, x))
    compiled = ddp.compile(lambda params, x: sgd(params, gradient(params, x), RATE), backend="aot_eager")
    expected = by_hand(loss, 2)

    def assert_step(factor: float) -> None:
        found = compiled(parameters(), rows(rank))
        assert_same(found, {name: value - factor * expected[name] for name, value in parameters().items()})

    assert_step(0.1)
    RATE = 0.2
    assert_step(0.2)
    scale.fill_(2.0)
    assert_step(0.4)
    scale = torch.tensor(0.5)
    assert_step(0.1)
    RATE = 0.1


def test_what_a_step_closes_over_is_read_again_when_it_is_replaced_or_written_to(ranks2: RankPool) -> None:
    ranks2.run(_closes_over)


@pytest.mark.inductor
def test_a_step_may_begin_with_several_tensors_that_it_closes_over() -> None:
    one, other = torch.ones(3), torch.full((3,), 2.0)
    step = ddp.compile(lambda x: one * other + x)
    assert torch.equal(step(torch.zeros(3)), torch.full((3,), 2.0))


def _donates(rank: int, backend: Any) -> None:
    gradient = ddp.grad(loss)

    def step(params: Tree, x: Tensor) -> Any:
        return sgd(params, gradient(params, x), 0.1), x.sum()

    for donate in ("params", 0, ["params"]) if backend == "aot_eager" else ("params",):
        params = parameters()
        before = {name: value.data_ptr() for name, value in params.items()}
        new, _ = ddp.compile(step, donate=donate, backend=backend)(params, rows(rank))
        assert_same(new, trained_by_hand(2))
        assert {name: value.data_ptr() for name, value in new.items()} == before
    kept = parameters()
    ddp.compile(step, backend=backend)(kept, rows(rank))
    assert_same(kept, parameters())
    with pytest.raises(TypeError, match="donate names 'state', and the step is called with params, x"):
        ddp.compile(step, donate="state", backend=backend)(parameters(), rows(rank))
    tied = torch.ones(8, 3)
    with pytest.raises(ValueError, match="shares memory with params"):
        ddp.compile(step, donate="params", backend=backend)(parameters() | {"head": tied, "again": tied}, rows(rank))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_results_are_written_where_donated_arguments_were(ranks2: RankPool, backend: str) -> None:
    ranks2.run(_donates, backend, **LIMITS)


def _two_gradients(rank: int) -> list[str]:
    """Two functions with a communicator each, and one that both share; run as a graph, and operator by operator."""
    shared = ddp.Communicator()
    for group in (None, shared):
        one = ddp.grad(loss, process_group=group, bucket_cap_mb=CAP)
        other = ddp.grad(lambda params, x: loss(params, x).sin(), process_group=group, bucket_cap_mb=CAP)

        def step(params: Tree, x: Tensor) -> Tree:
            between = sgd(params, one(params, x), 0.1)  # noqa: B023
            return sgd(between, other(between, x), 0.1)  # noqa: B023

        expected = step(parameters(), rows(rank))
        assert_same(ddp.compile(step, backend="aot_eager")(parameters(), rows(rank)), expected)
    return []


def test_a_step_with_several_reductions(ranks2: RankPool) -> None:
    ranks2.run(_two_gradients)


def _refusals(rank: int) -> None:
    with pytest.raises(ValueError, match="backend must be"):
        ddp.compile(loss, backend="eager")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one graph of fixed shapes"):
        ddp.compile(loss, fullgraph=False)
    with pytest.raises(ValueError, match="does not know"):
        ddp.compile(loss, options={"nothing": 1})


def test_arguments_that_a_step_cannot_have_are_refused() -> None:
    _refusals(0)


# ---- the generated code ----------------------------------------------------------------------------------------------


def deep_loss(params: Tree, x: Tensor) -> Tensor:
    for number in range(4):
        x = torch.relu(x @ params[f"weight {number}"])
    return x.square().sum()


def deep_parameters() -> Tree:
    generator = torch.Generator().manual_seed(0)
    return {f"weight {number}": torch.randn(32, 32, generator=generator) for number in range(4)}


def _source(rank: int) -> str:
    gradient = ddp.grad(deep_loss, bucket_cap_mb=0.001)

    def step(params: Tree, moments: Tree, x: Tensor) -> Any:
        gradients = gradient(params, x)
        moments = {name: 0.9 * moments[name] + gradients[name] for name in params}
        return sgd(params, moments, 0.01), moments

    compiled = ddp.compile(step, donate=("params", "moments"))
    moments = {name: torch.ones_like(value) for name, value in deep_parameters().items()}
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
    expected = step(deep_parameters(), moments, x)
    found: list[Any] = []
    (source,) = torch_private.for_tests.generated_code(lambda: found.append(compiled(deep_parameters(), moments, x)))
    for one, other in zip(found[0], expected, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-3)
    return source[source.rindex("def call(") : source.rindex("runner = ")]


@pytest.mark.inductor
def test_generated_step_launches_behind_each_last_gradient_and_copies_nothing(ranks2: RankPool) -> None:
    first, second = ranks2.run(_source, **LIMITS)
    assert first == second
    lines = [line.strip() for line in first.splitlines()]
    aliases = dict(re.findall(r"(buf\d+) = reinterpret_tensor\((buf\d+),.*# alias", first))
    launches = [number for number, line in enumerate(lines) if "_c10d_functional.all_reduce_" in line]
    waits = [number for number, line in enumerate(lines) if "_c10d_functional.wait_tensor" in line]
    assert len(launches) == len(waits) == 4
    assert max(launches) < min(waits)
    for launch in launches:
        (bucket,) = re.findall(r"all_reduce_\.default\((buf\d+)", lines[launch])
        does = [line for line in lines[:launch] if re.match(r"extern_kernels|cpp_fused", line)]
        writers = [line for line in does if bucket in {aliases.get(n, n) for n in re.findall(r"buf\d+", line)}]
        assert writers[-1] == does[-1], f"{bucket} is not launched behind its last gradient"
        assert any(line.startswith("extern_kernels.mm(") for line in writers), f"{bucket} is copied into"
    assert "torch.ops.aten" not in first


# ---- what users do ---------------------------------------------------------------------------------------------------


def _users_ways(rank: int) -> None:
    """Leaves that require gradients, inference mode, a module that is switched, keywords, a result as it was given."""
    expected = by_hand(loss, 2)
    gradient = ddp.grad(loss)
    module = torch.nn.Dropout(0.0)
    compiled = ddp.compile(lambda params, *, batch: (gradient(params, module(batch["x"])), params), backend="aot_eager")
    leaves = {name: value.requires_grad_() for name, value in parameters().items()}
    found, same = compiled(leaves, batch={"x": rows(rank), "unused": None})
    assert_same(found, expected)
    assert not any(value.requires_grad for value in found.values())
    assert_same(same, parameters())
    with torch.inference_mode():
        found, _ = compiled(parameters(), batch={"x": rows(rank), "unused": None})
        assert_same(found, expected)
        assert_same(gradient(parameters(), rows(rank)), expected)
    module.p = 0.5
    module.eval()
    assert_same(compiled(parameters(), batch={"x": rows(rank), "unused": None})[0], expected)


def test_what_users_call_a_compiled_step_with(ranks2: RankPool) -> None:
    ranks2.run(_users_ways)


def _hooked_later(rank: int) -> None:
    """Module hooks of a step's model come and go between its calls."""
    module = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    gradient = ddp.grad(lambda params, x: loss(params, module(x)))
    compiled = ddp.compile(lambda params, x: gradient(params, x), backend="aot_eager")

    def assert_scaled(factor: float) -> None:
        expected = by_hand(lambda params, x: loss(params, factor * x), 2)
        assert_same(compiled(parameters(), rows(rank)), expected)

    assert_scaled(1.0)
    with module[1].register_forward_hook(lambda _, inputs, output: 2.0 * output):
        assert_scaled(2.0)
    assert_scaled(1.0)
    with module[1].register_forward_pre_hook(lambda _, inputs: (3.0 * inputs[0],)):
        assert_scaled(3.0)


def test_a_compiled_step_has_the_hooks_that_its_modules_have(ranks2: RankPool) -> None:
    ranks2.run(_hooked_later)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _kept_memory(rank: int, backend: Any) -> None:
    """Gradients, sums and values that are returned stay what they are in later steps."""
    ways = {"reduction": "sum"}, {"reduction": "mean"}, {"reduction": "sum", "bucket_cap_mb": CAP}
    for options in ways if backend == "aot_eager" else ways[2:]:
        gradient = ddp.grad_and_value(loss, reduce_value=True, **options)
        compiled = ddp.compile(lambda params, x: gradient(params, x), backend=backend)  # noqa: B023
        found = [compiled(parameters(), rows(rank) * factor) for factor in (1.0, 2.0, 3.0)]
        for factor, (gradients, value) in zip((1.0, 2.0, 3.0), found, strict=True):
            expected, total = gradient(parameters(), rows(rank) * factor)
            assert_same(gradients, expected)
            torch.testing.assert_close(value, total)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_results_are_no_part_of_memory_that_is_kept(ranks2: RankPool, backend: str) -> None:
    ranks2.run(_kept_memory, backend, **LIMITS)


# ---- what was donated ------------------------------------------------------------------------------------------------


def _donated_again(rank: int, again: str) -> str:
    """Each rank trains on, and then rank 1 alone, or each of them, takes what it has given up."""
    gradient = ddp.grad(loss)

    def step(params: Tree, x: Tensor) -> Tree:
        return sgd(params, gradient(params, x), 0.1)

    compiled = ddp.compile(step, donate="params", backend="aot_eager")
    old = parameters()
    params = compiled(compiled(old, rows(rank)), rows(rank))
    takes = {
        "the step": lambda: compiled(old, rows(rank)),
        "another step": lambda: ddp.compile(lambda tree: tree, backend="aot_eager")(old),
        "a gradient": lambda: gradient({**old, "first": params["first"]}, rows(rank)),
        "rank 1": lambda: compiled(old if rank else params, rows(rank)),
    }
    with pytest.raises(RuntimeError) as caught:
        takes[again]()
    params = compiled(parameters(), rows(rank))
    assert_same(params, trained_by_hand(2))
    expected = step({name: value.clone() for name, value in params.items()}, rows(rank))
    assert_same(compiled(params, rows(rank)), expected)
    return str(caught.value)


@pytest.mark.parametrize(
    ("again", "what"),
    [
        ("the step", "params['first'] of _donated_again.step"),
        ("another step", "tree['first'] of _donated_again.<lambda>.<lambda>"),
        ("a gradient", "argument 0['bias'] of grad(loss)"),
        ("rank 1", "params['first'] of _donated_again.step"),
    ],
)
def test_what_was_donated_is_refused_by_name_when_it_comes_again(ranks2: RankPool, again: str, what: str) -> None:
    for message in ranks2.run(_donated_again, again, **LIMITS):
        step = "_donated_again.step"
        assert f"{what} was given to donate=... of {step} in a call before" in message, message
        assert f"use the tree that {step} returned" in message


def test_a_loop_with_what_was_returned_costs_no_python_call_for_a_leaf_and_keeps_nothing() -> None:
    compiled = ddp.compile(lambda params: {name: p + 1 for name, p in params.items()}, donate=0, backend="aot_eager")

    def calls(leaves: int) -> int:
        params = {str(n): torch.zeros(2) for n in range(leaves)}
        for _ in range(2):
            params = compiled(params)

        def step() -> None:
            nonlocal params
            params = compiled(params)

        return calls_in(step, below=donations.__file__)

    assert calls(2) == calls(40) > 0
    assert not [tensor for _, given in donations.donations._given for tensor, *_ in given if tensor() is not None]


@pytest.mark.parametrize("how", ["copied", "loaded", "other memory"])
def test_what_somebody_has_written_into_since_is_taken(how: str) -> None:
    """As where the best weights are put back into a module whose parameters were donated."""
    module = torch.nn.Linear(2, 2)
    best = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    step = ddp.compile(lambda params: {name: p + 1 for name, p in params.items()}, donate=0, backend="aot_eager")
    for _ in range(2):
        params = step(dict(module.named_parameters()))
        assert all(torch.equal(params[name], best[name] + 1) for name in best)
        with torch.no_grad():
            if how == "loaded":
                module.load_state_dict(best)
            for name, parameter in module.named_parameters():
                if how == "copied":
                    parameter.copy_(best[name])
                if how == "other memory":
                    parameter.data = best[name].clone()


def test_what_a_step_was_first_called_with_does_not_outlive_it() -> None:
    step = ddp.compile(lambda params, x: params + x.sum(), backend="aot_eager")
    params, x = torch.zeros(3), torch.ones(2)
    references = [weakref.ref(params), weakref.ref(x)]
    params = step(params, x)
    del x
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_what_is_donated_and_returned_as_it_is_keeps_its_values() -> None:
    """Another result was written there, and came back in its place."""
    one, other = torch.zeros(4), torch.full((4,), 5.0)
    step = ddp.compile(lambda a, b: (a.view(2, 2), a + 1, b), donate=("a", "b"), backend="aot_eager")
    for _ in range(2):  # nothing has been written to either
        kept, new, same = step(one, other)
        assert torch.equal(kept, torch.zeros(2, 2)) and torch.equal(new, torch.ones(4))
        assert torch.equal(same, torch.full((4,), 5.0))


def test_what_a_run_that_failed_has_had_is_not_taken_again() -> None:
    def step(params: Tensor, rows: Tensor) -> Tensor:
        return params.index_select(0, rows)

    compiled = ddp.compile(step, donate="params", backend="aot_eager")
    compiled(torch.zeros(2, 2), torch.tensor([1, 0]))
    params = torch.zeros(2, 2)
    with pytest.raises(IndexError, match="out of range"):
        compiled(params, torch.tensor([2, 0]))
    with pytest.raises(RuntimeError, match=r"params of .*step was given to donate"):
        compiled(params, torch.tensor([1, 0]))


def _faults(rank: int) -> int:
    gradient = ddp.grad(lambda params, x: (x @ params["weight"]).square().sum())
    step = ddp.compile(lambda params, x: sgd(params, gradient(params, x), 0.1), donate="params")
    params, x = {"weight": torch.randn(3072, 4096)}, torch.ones(2, 3072)  # a bucket of 48 MiB: mapped by itself
    for _ in range(3):
        params = step(params, x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(params, x)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.inductor
def test_a_step_takes_no_new_memory_for_its_buckets(ranks2: RankPool) -> None:
    pages = 3072 * 4096 * 4 // resource.getpagesize()
    assert all(faults < pages / 4 for faults in ranks2.run(_faults, **LIMITS))
