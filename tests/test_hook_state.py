"""`BucketHook`: where a communication hook's state goes when buckets change, backwards end, or it is saved."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from compiled_ddp.comm_hooks import Ranks, StatefulHook
from compiled_ddp.plan import GradientSpec, ReductionSequence, Section
from compiled_ddp.planning.assignment import place_buckets
from compiled_ddp.reducers.traced_hook import BucketHook, TracedHook

NAMES = ("a", "b", "c")
NO_COMMUNICATOR: Any = None  # only riders would need one


@dataclasses.dataclass(frozen=True)
class Half(StatefulHook):
    """Sends half of what is wanted, owes the other one, and counts; no collective, as of ranks with equal gradients."""

    owed: ClassVar[tuple[int, ...]] = (1,)

    def initial_state(self, gradients: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros(1, dtype=gradients.dtype), torch.zeros_like(gradients)

    def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> tuple[Tensor, ...]:
        count, error = state
        wanted = gradients + error
        return wanted / 2, count + 1, wanted / 2


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(2, dtype=dtype), torch.zeros(2, 3, dtype=dtype), torch.zeros(4, dtype=dtype)]


def section(
    *buckets: Sequence[int], of: Sequence[Tensor] | None = None, origin: str = "graph", reason: str = ""
) -> Section:
    tensors = parameters() if of is None else of
    specs = [[GradientSpec.of(index, tensors[index]) for index in bucket] for bucket in buckets]
    return Section(place_buckets(specs, 2, reduction="hook"), origin, reason)  # type: ignore[arg-type]


def sequence(*sections: Section) -> ReductionSequence:
    return ReductionSequence(sections, NAMES)


def adopt(hook: BucketHook, agreed: ReductionSequence, *, lasting: bool) -> None:
    hook.adopt(agreed.sections, agreed.parameter_names, lasting=lasting)


def hook_with(*sections: Section, lasting: bool = True) -> tuple[BucketHook, ReductionSequence]:
    hook, agreed = BucketHook(Half(), Ranks(2, "nobody")), sequence(*sections)
    adopt(hook, agreed, lasting=lasting)
    return hook, agreed


def by_hooks(
    hook: BucketHook, sections: Sequence[Section], *values: float, unused: set[int] = frozenset()
) -> list[Tensor]:  # type: ignore[assignment]
    """Reduce buckets filled with these values, one for each that has gradients; returns the means."""
    backward = TracedHook(NO_COMMUNICATOR, hook, sections)
    buckets = [bucket for one in sections for bucket in one.plan.buckets]
    positions = [position for position in range(len(buckets)) if backward.runs_users_code(position)]
    flats = [
        torch.full((buckets[p].numel,), value, dtype=buckets[p].dtype)
        for p, value in zip(positions, values, strict=True)
    ]
    works = [
        backward.start(p, flat, lambda bucket=buckets[p]: unused & set(bucket.indices))
        for p, flat in zip(positions, flats, strict=True)
    ]
    for work in works:
        work.wait()
        work.wait()
    backward.settle(lambda: unused)
    return flats


def owed(hook: BucketHook) -> dict[str, Tensor]:
    """What is owed to each parameter, in all places, in the order of its elements."""
    sizes = {"a": 2, "b": 6, "c": 4}
    total: dict[str, Tensor] = {}
    for key, (_, error) in hook.state_dict(NAMES).items():
        names = key.partition("#")[0].split(",")
        for name, part in zip(names, error.split([sizes[name] for name in names]), strict=True):
            total[name] = total.get(name, 0) + part
    return total


def assert_owed(hook: BucketHook, **expected: float) -> None:
    found = {name: part.tolist() for name, part in owed(hook).items() if part.any()}
    assert found == {name: [value] * len(found[name]) for name, value in expected.items()}, found


def counts(hook: BucketHook) -> dict[str, float]:
    return {key: state[0].item() for key, state in hook.state_dict(NAMES).items()}


# ---- one state for each place ----------------------------------------------------------------------------------------


def test_two_buckets_of_equal_parameters_have_states_of_their_own() -> None:
    """Both are launched before either has come back."""
    hook, agreed = hook_with(section([0, 1]), section([0, 1]), section([2], origin="hooks"))
    means = by_hooks(hook, agreed.sections, 8.0, 16.0, 0.0)
    assert [mean.unique().tolist() for mean in means] == [[4.0], [8.0], [0.0]]
    assert [error.unique().tolist() for _, error in hook.state_dict(NAMES).values()] == [[4.0], [8.0], [0.0]]
    assert list(hook.state_dict(NAMES)) == ["a,b", "a,b#2", "c"]
    means = by_hooks(hook, agreed.sections, 0.0, 0.0, 0.0)
    assert [mean.unique().tolist() for mean in means] == [[2.0], [4.0], [0.0]]


def test_a_graph_and_hooks_in_turns_use_one_state() -> None:
    hook, agreed = hook_with(section([0], [1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 8.0, 8.0)
    backward = TracedHook(NO_COMMUNICATOR, hook, agreed.sections)
    state = backward.state(range(2))
    assert [tensor.unique().tolist() for tensor in state] == [[1.0], [4.0], [1.0], [4.0]]
    backward.keep(range(2), [tensor + 1 for tensor in state], frozenset())
    backward.settle(frozenset)
    assert_owed(hook, a=5.0, b=5.0, c=4.0)
    assert counts(hook) == {"a": 2.0, "b": 2.0, "c": 1.0}


def test_a_bucket_without_elements_is_left_to_an_all_reduce() -> None:
    nothing = [torch.zeros(0), *parameters()[1:]]
    hook, agreed = hook_with(section([0], [1], of=nothing), section([2]))
    backward = TracedHook(NO_COMMUNICATOR, hook, agreed.sections)
    assert [backward.runs_users_code(position) for position in range(5)] == [False, True, False, True, False]
    assert backward.state(range(1)) == []


# ---- what a backward changes -----------------------------------------------------------------------------------------


def test_a_backward_that_does_not_end_changes_nothing() -> None:
    hook, agreed = hook_with(section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 8.0)
    backward = TracedHook(NO_COMMUNICATOR, hook, agreed.sections)
    backward.start(0, torch.ones(8), frozenset).wait()
    state = backward.state(range(2, 3))
    backward.keep(range(2, 3), [tensor + 1 for tensor in state], frozenset())
    assert_owed(hook, a=4.0, b=4.0, c=4.0)
    assert counts(hook) == {"a,b": 1.0, "c": 1.0}


def test_what_no_rank_uses_is_owed_what_it_was() -> None:
    hook, agreed = hook_with(section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 8.0)
    by_hooks(hook, agreed.sections, 8.0, 0.0, unused={0, 2})
    assert_owed(hook, a=4.0, b=6.0, c=4.0)
    assert counts(hook) == {"a,b": 2.0, "c": 1.0}, "of a bucket that no rank uses all is as it was"


def test_what_this_rank_does_not_use_is_held_back_while_others_send() -> None:
    hook, agreed = hook_with(section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 8.0)
    backward = TracedHook(NO_COMMUNICATOR, hook, agreed.sections)
    flat = torch.zeros(8)
    work = backward.start(0, flat, lambda: {0})
    work.wait()
    assert flat.tolist() == [0.0] * 2 + [2.0] * 6
    backward.settle(frozenset)  # another rank uses it
    assert_owed(hook, a=4.0, b=2.0, c=4.0)


def test_what_a_graph_computes_for_nobody_changes_nothing() -> None:
    hook, agreed = hook_with(section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 8.0)
    backward = TracedHook(NO_COMMUNICATOR, hook, agreed.sections)
    state = backward.state(range(1))
    backward.keep(range(1), [tensor + 1 for tensor in state], {1})
    backward.settle(lambda: {0})  # by hooks, which this bucket was not
    assert_owed(hook, a=5.0, b=4.0, c=4.0)


# ---- when the sequence changes ---------------------------------------------------------------------------------------


def test_what_is_owed_moves_to_where_gradients_go() -> None:
    hook, agreed = hook_with(section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 4.0)
    adopt(hook, sequence(section([2]), section([0], [1])), lasting=True)
    assert_owed(hook, a=4.0, b=4.0, c=2.0)
    assert counts(hook) == {"c": 1.0, "a": 0.0, "b": 0.0}, "a bucket that stays keeps all of its state"


def test_what_is_owed_in_two_places_is_added_up_and_in_one_of_two_stays_one() -> None:
    hook, agreed = hook_with(section([0, 1]), section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 16.0, 2.0)
    adopt(hook, sequence(section([1, 0]), section([2])), lasting=True)
    assert_owed(hook, a=12.0, b=12.0, c=1.0)
    adopt(hook, sequence(section([0, 1]), section([0, 1]), section([2])), lasting=True)
    assert_owed(hook, a=12.0, b=12.0, c=1.0)


def test_what_is_owed_to_a_place_that_stays_is_added_to() -> None:
    hook, agreed = hook_with(section([0, 1]), section([0]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 16.0, 2.0)
    adopt(hook, sequence(section([0, 1]), section([2])), lasting=True)
    assert_owed(hook, a=12.0, b=4.0, c=1.0)
    assert counts(hook) == {"a,b": 1.0, "c": 1.0}


def test_what_is_owed_waits_in_an_unused_section() -> None:
    hook, agreed = hook_with(section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 4.0)
    agreed = sequence(section([0, 1]), section([2], origin="unused"))
    adopt(hook, agreed, lasting=True)
    by_hooks(hook, agreed.launched, 0.0)
    assert_owed(hook, a=2.0, b=2.0, c=2.0)
    by_hooks(hook, agreed.unused, 0.0)
    assert_owed(hook, a=2.0, b=2.0, c=1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_state_is_converted_with_the_parameters(dtype: torch.dtype) -> None:
    hook, agreed = hook_with(section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 4.0)
    converted = [*parameters(dtype)[:2], parameters()[2]]
    agreed = sequence(section([0, 1], of=converted), section([2]))
    adopt(hook, agreed, lasting=True)
    count, error = TracedHook(NO_COMMUNICATOR, hook, agreed.sections).state(range(1))
    real = torch.float32 if dtype.is_complex else dtype
    assert count.dtype == error.dtype == real and count.item() == 1.0
    assert error.tolist() == ([4.0, 0.0] * 8 if dtype.is_complex else [4.0] * 8)
    adopt(hook, sequence(section([0, 1]), section([2])), lasting=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of an imaginary part that is dropped
        assert_owed(hook, a=4.0, b=4.0, c=2.0)


def test_what_is_owed_follows_the_memory_format() -> None:
    hook, agreed = hook_with(section([1]), section([0], [2]))
    (flat, *_) = (torch.arange(6.0), None)
    backward = TracedHook(NO_COMMUNICATOR, hook, agreed.sections)
    backward.start(0, flat, frozenset).wait()
    backward.settle(frozenset)
    transposed = [torch.zeros(2), torch.zeros(3, 2).t(), torch.zeros(4)]
    agreed = sequence(section([1], of=transposed), section([0], [2]))
    adopt(hook, agreed, lasting=True)
    _, error = TracedHook(NO_COMMUNICATOR, hook, agreed.sections).state(range(1))
    assert (2 * error).tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert (2 * owed(hook)["b"]).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_parameter_of_another_shape_is_named() -> None:
    hook, agreed = hook_with(section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 4.0)
    with pytest.warns(UserWarning, match=r"parameter a had the shape \(2,\) and has \(7,\) now"):
        adopt(hook, sequence(section([0, 1], of=[torch.zeros(7), *parameters()[1:]]), section([2])), lasting=True)
    (_, error), (_, other) = hook.state_dict(NAMES).values()
    assert error.tolist() == [0.0] * 7 + [4.0] * 6 and other.tolist() == [2.0] * 4


# ---- as a state dict -------------------------------------------------------------------------------------------------


def load(hook: BucketHook, state: dict[str, list[Tensor]]) -> None:
    hook.load_state_dict(state, NAMES, parameters())


def saved() -> dict[str, list[Tensor]]:
    hook, agreed = hook_with(section([0, 1]), section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 16.0, 4.0)
    return hook.state_dict(NAMES)


def test_a_saved_state_does_not_change_and_may_be_changed() -> None:
    hook, agreed = hook_with(section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 8.0)
    state = hook.state_dict(NAMES)
    before = {key: [tensor.clone() for tensor in tensors] for key, tensors in state.items()}
    by_hooks(hook, agreed.sections, 8.0, 8.0)
    adopt(hook, sequence(section([0], [1]), section([2])), lasting=True)
    for key, tensors in state.items():
        for one, other in zip(tensors, before[key], strict=True):
            assert torch.equal(one, other)
            one.zero_()
    assert_owed(hook, a=6.0, b=6.0, c=6.0)
    load(hook, before)
    before["c"][1].zero_()
    assert_owed(hook, a=4.0, b=4.0, c=4.0)


@pytest.mark.parametrize("first", [True, False])
def test_equal_buckets_get_what_they_had(first: bool) -> None:
    """Whether the sequence is there when the state is loaded or not."""
    state, hook = saved(), BucketHook(Half(), Ranks(2, "nobody"))
    agreed = sequence(section([0, 1]), section([0, 1]), section([2]))
    if first:
        load(hook, state)
        assert hook.state_dict(NAMES).keys() == state.keys()
    adopt(hook, agreed, lasting=True)
    if not first:
        load(hook, state)
    for key, tensors in hook.state_dict(NAMES).items():
        for one, other in zip(tensors, state[key], strict=True):
            assert torch.equal(one, other)


def test_other_buckets_get_what_is_owed_to_their_parameters() -> None:
    hook, _ = hook_with(section([0], [1]), section([2]))
    load(hook, saved())
    assert_owed(hook, a=12.0, b=12.0, c=2.0)
    assert counts(hook) == {"a": 0.0, "b": 0.0, "c": 1.0}


def test_what_belongs_to_a_bucket_waits_for_it_over_the_first_backward() -> None:
    hook, _ = hook_with(section([0], [1]), section([2]), lasting=False)
    load(hook, saved())
    adopt(hook, sequence(section([2]), section([0, 1])), lasting=True)
    assert_owed(hook, a=12.0, b=12.0, c=2.0)
    assert counts(hook) == {"c": 1.0, "a,b": 1.0}


def test_loading_replaces_everything_also_under_other_dtypes() -> None:
    hook, agreed = hook_with(section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 8.0)
    load(hook, {"c": [torch.ones(1, dtype=torch.int64), torch.ones(4, dtype=torch.float64)]})
    assert_owed(hook, c=1.0)
    assert {tensor.dtype for tensors in hook.state_dict(NAMES).values() for tensor in tensors} == {torch.float32}
    load(hook, {})
    assert hook.state_dict(NAMES) == {}


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"a,z": []}, KeyError, "z"),
        ({"a,,b": []}, KeyError, "a,,b"),
        ({"a#": []}, KeyError, "a#"),
        ({"a,b": [torch.zeros(8)]}, ValueError, r"for the parameters a,b; found \[\(8,\)\]"),
        ({"a,b": [torch.zeros(1), torch.zeros(9)]}, ValueError, r"\[\(1,\), \(8,\)\] for the parameters a,b; found"),
        ({"a": [torch.zeros(1), 3]}, ValueError, "for the parameters a; found"),
        ({"c": [torch.zeros(1), torch.full((4,), torch.nan)]}, ValueError, "owes the parameters c is not finite"),
    ],
)
def test_what_is_no_state_of_these_parameters_is_refused_and_changes_nothing(
    state: dict[str, list[Tensor]], error: type, message: str
) -> None:
    hook, agreed = hook_with(section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 8.0)
    with pytest.raises(error, match=message):
        load(hook, {"c": saved()["c"], **state})
    assert_owed(hook, a=4.0, b=4.0, c=4.0)


def test_names_may_hold_the_characters_of_keys() -> None:
    hook, agreed = hook_with(section([0, 1]), section([0, 1]), section([2]))
    by_hooks(hook, agreed.sections, 8.0, 16.0, 4.0)
    names = ("a,b", "c#2", "d\\")
    state = hook.state_dict(names)
    assert len(state) == 3
    other, _ = hook_with(section([0, 1]), section([0, 1]), section([2]))
    other.load_state_dict(state, names, parameters())
    assert_owed(other, a=12.0, b=12.0, c=2.0)


def test_a_backward_knows_its_sections_among_equal_ones() -> None:
    first, second = section([0, 1]), section([0, 1])
    assert first == second
    hook, _ = hook_with(first, second, section([2]))
    backward: TracedHook = TracedHook(NO_COMMUNICATOR, hook, [second])
    backward.start(0, torch.ones(8), frozenset).wait()
    backward.settle(frozenset)
    assert [state[0].item() for state in hook.state_dict(NAMES).values()] == [1.0]
    assert TracedHook(NO_COMMUNICATOR, hook, [first]).state(range(1))[0].item() == 0.0
