"""How the sequence that all ranks keep is proposed, refined after the first backward, and sent to other ranks."""

import pytest
import torch
from torch import nn

from compiled_ddp.options import NAIVE, Options
from compiled_ddp.plan import BucketPlan, GradientSpec, ReductionSequence
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.planning.planners import MEBIBYTE
from compiled_ddp.planning.sequence import ADMITTED, MIXED, NOT_CAPTURED, TOO_SMALL, Observations, SequencePlanner
from compiled_ddp.planning.trained_parameters import TrainedParameters

# (origin, reason, the parameters of each bucket) of each section
Description = list[tuple[str, str, list[tuple[int, ...]]]]


def parameters(count: int = 6, dtypes: dict[int, torch.dtype] | None = None) -> TrainedParameters:
    """Parameters of two elements each, float32 where `dtypes` says nothing else."""
    tensors = [nn.Parameter(torch.empty(2, dtype=(dtypes or {}).get(index, torch.float32))) for index in range(count)]
    return TrainedParameters(tuple(f"p{index}" for index in range(count)), tuple(tensors))


def planner_of(trained: TrainedParameters, *, cap_bytes: int = 16, naive: bool = False) -> SequencePlanner:
    """A planner whose buckets hold two of these parameters."""
    size = cap_bytes / MEBIBYTE
    options = Options(bucket_cap_mb=size, first_bucket_mb=size, options={NAIVE: True} if naive else None)
    return SequencePlanner(trained, options.bucket_policy(world_size=2))


@pytest.fixture
def planner() -> SequencePlanner:
    return planner_of(parameters())


def segment(*indices: int, dtype: torch.dtype = torch.float32) -> BucketPlan:
    """A captured segment's plan over these parameters, two to a bucket."""
    specs = [GradientSpec.of(index, torch.empty(2, dtype=dtype)) for index in indices]
    return assign_buckets(specs, capacities_bytes=(16, 16), world_size=2)


def describe(sequence: ReductionSequence) -> Description:
    return [
        (section.origin, section.reason, [bucket.indices for bucket in section.plan.buckets])
        for section in sequence.sections
    ]


# ---- unused parameters -----------------------------------------------------------------------------------------------


def test_unused_parameters_of_hooks_are_set_apart_behind_everything_else(planner: SequencePlanner) -> None:
    sequence = planner.propose([segment(4, 2)])
    refined = planner.refine(sequence, Observations([("graph", 0), ("hook", 5), ("hook", 1)]), {0, 3})
    assert describe(refined) == [
        ("graph", "", [(4, 2)]),
        ("hooks", NOT_CAPTURED, [(5, 1)]),
        ("unused", "", [(3, 0)]),
    ]
    assert [bucket.indices for bucket in refined.buckets] == [(4, 2), (5, 1)]
    assert describe(planner.decode(planner.encode(refined))) == describe(refined)


def test_nothing_is_set_apart_where_nothing_was_used(planner: SequencePlanner) -> None:
    sequence = planner.propose([], reason="why")
    assert describe(planner.refine(sequence, Observations(), set(range(6)))) == describe(sequence)


def test_admitted_parameters_share_the_buckets_of_one_section(planner: SequencePlanner) -> None:
    sequence = planner.refine(planner.propose([segment(4, 2)]), Observations([("graph", 0)]), {5, 3, 1, 0})
    once = planner.admit(sequence, {3})
    assert describe(once) == [
        ("graph", "", [(4, 2)]),
        ("hooks", ADMITTED, [(3,)]),
        ("unused", "", [(5, 1), (0,)]),
    ]
    twice = planner.admit(once, {0})
    assert describe(twice)[1:] == [("hooks", ADMITTED, [(3, 0)]), ("unused", "", [(5, 1)])]
    assert describe(planner.admit(twice, {5, 1}))[1:] == [("hooks", ADMITTED, [(3, 0), (5, 1)])]


# ---- propose ---------------------------------------------------------------------------------------------------------


def test_proposal_without_graphs_is_the_reverse_registration_order_by_hooks(planner: SequencePlanner) -> None:
    sequence = planner.propose([], reason="why")
    assert describe(sequence) == [("hooks", "why", [(5, 4), (3, 2), (1, 0)])]
    assert sequence.parameter_names == ("p0", "p1", "p2", "p3", "p4", "p5")


def test_proposal_keeps_the_segments_in_order_and_gives_the_hooks_the_rest(planner: SequencePlanner) -> None:
    sequence = planner.propose([segment(4, 2), segment(0)])
    assert describe(sequence) == [
        ("graph", "", [(4, 2)]),
        ("graph", "", [(0,)]),
        ("hooks", NOT_CAPTURED, [(5, 3), (1,)]),
    ]


def test_proposal_has_no_section_for_hooks_where_graphs_hold_every_parameter(planner: SequencePlanner) -> None:
    assert describe(planner.propose([segment(5, 4, 3, 2, 1, 0)])) == [("graph", "", [(5, 4), (3, 2), (1, 0)])]


def test_proposal_keeps_a_parameter_that_two_segments_use_in_both(planner: SequencePlanner) -> None:
    sequence = planner.propose([segment(5, 4, 3), segment(3, 2, 1, 0)])
    assert [section.plan.indices for section in sequence.sections] == [(5, 4, 3), (3, 2, 1, 0)]


# ---- refine ----------------------------------------------------------------------------------------------------------


def test_hooks_are_ordered_by_their_arrival(planner: SequencePlanner) -> None:
    sequence = planner.propose([], reason="why")
    arrivals = [("hook", index) for index in (1, 5, 0, 3, 2, 4)]
    assert describe(planner.refine(sequence, Observations(dict.fromkeys(arrivals)))) == [
        ("hooks", "why", [(1, 5), (0, 3), (2, 4)])
    ]


def test_hooks_stand_between_the_graph_sections_that_they_arrived_between(planner: SequencePlanner) -> None:
    sequence = planner.propose([segment(5), segment(3)])
    arrivals = [("hook", 0), ("graph", 0), ("hook", 2), ("hook", 4), ("graph", 1), ("hook", 1)]
    assert describe(planner.refine(sequence, Observations(dict.fromkeys(arrivals)))) == [
        ("hooks", NOT_CAPTURED, [(0,)]),
        ("graph", "", [(5,)]),
        ("hooks", NOT_CAPTURED, [(2, 4)]),
        ("graph", "", [(3,)]),
        ("hooks", NOT_CAPTURED, [(1,)]),
    ]


def test_graph_sections_take_the_order_in_which_they_ran(planner: SequencePlanner) -> None:
    sequence = planner.propose([segment(5, 4), segment(3, 2, 1, 0)])
    refined = planner.refine(sequence, Observations([("graph", 1), ("graph", 0)]))
    assert [section.plan.indices for section in refined.sections] == [(3, 2, 1, 0), (5, 4)]


def test_parameters_that_did_not_arrive_are_kept_at_the_end(planner: SequencePlanner) -> None:
    sequence = planner.propose([], reason="why")
    refined = planner.refine(sequence, Observations([("hook", 2), ("hook", 1)]))
    assert [index for section in refined.sections for index in section.plan.indices] == [2, 1, 5, 4, 3, 0]


def test_parameters_that_did_not_arrive_follow_the_last_graph_section(planner: SequencePlanner) -> None:
    sequence = planner.propose([segment(5)])
    refined = planner.refine(sequence, Observations([("hook", 2), ("graph", 0)]))
    assert describe(refined) == [
        ("hooks", NOT_CAPTURED, [(2,)]),
        ("graph", "", [(5,)]),
        ("hooks", NOT_CAPTURED, [(4, 3), (1, 0)]),
    ]


def test_graph_section_that_did_not_run_is_kept_after_what_did(planner: SequencePlanner) -> None:
    sequence = planner.propose([segment(5, 4), segment(3)])
    arrivals = [("hook", 5), ("hook", 4), ("graph", 1), ("hook", 0)]
    assert describe(planner.refine(sequence, Observations(dict.fromkeys(arrivals)))) == [
        ("graph", "", [(3,)]),
        ("hooks", NOT_CAPTURED, [(0,)]),
        ("graph", "", [(5, 4)]),
        ("hooks", NOT_CAPTURED, [(2, 1)]),
    ]


def test_parameters_used_inside_and_outside_of_a_graph_get_a_section_of_their_own_at_the_end(
    planner: SequencePlanner,
) -> None:
    sequence = planner.propose([segment(5, 4, 3, 2, 1, 0)])
    refined = planner.refine(sequence, Observations([("graph", 0)], graph_and_eager={4, 1}))
    assert describe(refined) == [("graph", "", [(5, 4), (3, 2), (1, 0)]), ("hooks", MIXED, [(1, 4)])]


def test_sequence_in_which_everything_arrived_as_proposed_stays_as_it_is(planner: SequencePlanner) -> None:
    sequence = planner.propose([segment(5, 4), segment(3)])
    arrivals = [("graph", 0), ("graph", 1), ("hook", 2), ("hook", 1), ("hook", 0)]
    assert planner.refine(sequence, Observations(dict.fromkeys(arrivals))) == sequence


def test_small_graphs_share_a_section_behind_all_graphs_apart_from_what_was_not_captured(
    planner: SequencePlanner,
) -> None:
    proposal = planner.propose([segment(3)], dict.fromkeys((0, 1, 5), TOO_SMALL))
    assert describe(proposal) == [
        ("graph", "", [(3,)]),
        ("hooks", TOO_SMALL, [(5, 1), (0,)]),
        ("hooks", NOT_CAPTURED, [(4, 2)]),
    ]
    arrivals = [("hook", 4), ("hook", 0), ("graph", 0), ("hook", 5), ("hook", 2), ("hook", 1)]
    assert describe(planner.refine(proposal, Observations(dict.fromkeys(arrivals)))) == [
        ("hooks", NOT_CAPTURED, [(4,)]),
        ("graph", "", [(3,)]),
        ("hooks", TOO_SMALL, [(0, 5), (1,)]),
        ("hooks", NOT_CAPTURED, [(2,)]),
    ]


# A parameter gets several gradients in a backward with static_graph.


def observed(arrivals: list[tuple[str, int]]) -> Observations:
    observations = Observations()
    for kind, number in arrivals:
        observations.note_arrival(kind, number)
    return observations


def test_parameter_that_arrives_twice_is_placed_by_its_last_arrival(planner: SequencePlanner) -> None:
    arrivals = [("hook", index) for index in (5, 4, 3, 5, 2, 1, 0)]
    refined = planner.refine(planner.propose([], reason="why"), observed(arrivals))
    assert describe(refined) == [("hooks", "why", [(4, 3), (5, 2), (1, 0)])]


@pytest.mark.parametrize(
    ("arrivals", "place"),
    [
        pytest.param([("hook", 5), ("hook", 5), ("graph", 0)], 0, id="before one graph"),
        pytest.param([("hook", 5), ("graph", 0), ("hook", 5), ("graph", 1)], 1, id="before two graphs"),
    ],
)
def test_parameter_that_arrives_twice_stands_before_the_graph_that_follows_its_last_arrival(
    planner: SequencePlanner, arrivals: list[tuple[str, int]], place: int
) -> None:
    refined = planner.refine(planner.propose([segment(4), segment(3)]), observed(arrivals))
    assert refined.sections[place].plan.indices == (5,)
    assert [index for section in refined.sections for index in section.plan.indices].count(5) == 1


# ---- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("naive", [False, True], ids=["buckets", "naive"])
@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param({}, id="float32"),
        pytest.param({0: torch.float16}, id="last bucket float16"),
        pytest.param({5: torch.float64, 2: torch.float64, 1: torch.float16}, id="mixed"),
    ],
)
def test_every_rank_decodes_an_equal_sequence(dtypes: dict[int, torch.dtype], naive: bool) -> None:
    rank0 = planner_of(parameters(dtypes=dtypes), naive=naive)
    rank1 = planner_of(parameters(dtypes=dtypes), naive=naive)
    sequence = rank0.propose([segment(4, 3)])
    arrivals = [("hook", 5), ("graph", 0), ("hook", 1), ("hook", 0), ("hook", 2)]
    refined = rank0.refine(sequence, Observations(dict.fromkeys(arrivals), graph_and_eager={3}))
    for agreed in (sequence, refined):
        decoded = rank1.decode(rank0.encode(agreed))
        assert decoded == agreed
        assert decoded.fingerprint == agreed.fingerprint


def test_decoded_gradients_have_the_strides_of_the_parameters() -> None:
    tensors = (
        nn.Parameter(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.empty(2, 3).t()),
    )
    planner = planner_of(TrainedParameters(("a", "b"), tensors), cap_bytes=MEBIBYTE)
    sequence = planner.propose([])
    decoded = planner.decode(planner.encode(sequence))
    assert decoded == sequence
    assert [gradient.stride for gradient in decoded.buckets[0].gradients] == [(1, 3), (60, 1, 15, 3)]


def test_riders_of_a_naive_graph_stay_apart_on_every_rank() -> None:
    planner = planner_of(parameters(2), naive=True)
    specs = [GradientSpec.of(index, torch.empty(2)) for index in (1, 0)]
    naive = assign_buckets(specs, capacities_bytes=(0, 0), world_size=2)
    sequence = planner.propose([naive])
    assert describe(planner.decode(planner.encode(sequence))) == [("graph", "", [(1,), (0,), ()])]
    assert planner.decode(planner.encode(sequence)) == sequence
