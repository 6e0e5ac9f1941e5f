"""Programs that random runs found to go wrong, made small; each name says what was wrong."""

import pytest

from fuzz.description import Model, Op, Program, Step
from fuzz.watch import compare
from ranks import RankPool

GRAPHS = ("compile_ddp",)
BREAK_ON_RANK_ONE = Op("break", ranks=(1,))


def test_a_layer_whose_output_is_detached_keeps_its_gradient_none(ranks2: RankPool) -> None:
    """The graph returned zeros for it, where autograd and torch.compile leave None."""
    compare(ranks2, Program(Model((Op("detached"),))), GRAPHS)
    compare(ranks2, Program(Model((Op("detached"), Op("linear", 1)))), GRAPHS)


@pytest.mark.parametrize("steps", [(Step(), Step(local=(1,))), (Step(), Step(), Step())])
def test_an_undefined_gradient_does_not_count_as_use(ranks2: RankPool, steps: tuple[Step, ...]) -> None:
    """Autograd runs a parameter's hooks for an undefined gradient too: .grad became zeros instead of None."""
    compare(ranks2, Program(Model((Op("detached"), Op("linear", 1))), steps), GRAPHS)


TWO_FORWARDS = (Step(zero="zeros", forwards=2),)


def test_a_graph_that_comes_too_late_leaves_its_later_calls_to_hooks_as_well(ranks2: RankPool) -> None:
    """One call of the block had run locally and the next one was reduced in its graph: the local part stayed local."""
    late = Op("checkpoint", inner=(Op("in_place"), BREAK_ON_RANK_ONE))
    compare(ranks2, Program(Model((Op("block", 1), late)), TWO_FORWARDS), GRAPHS)


def test_hooks_between_two_calls_of_a_block_take_both(ranks2: RankPool) -> None:
    """The first call had been reduced in its graph when the second came too late, which was an error."""
    late = Op("checkpoint", inner=(Op("in_place"), BREAK_ON_RANK_ONE))
    compare(ranks2, Program(Model((late, Op("block", 1))), (*TWO_FORWARDS, Step())), GRAPHS)


def test_a_layer_that_is_detached_inside_a_checkpoint_keeps_its_gradient_none(ranks2: RankPool) -> None:
    """A checkpoint in a graph is one node there: its body tells which operands get a gradient."""
    compare(ranks2, Program(Model((Op("checkpoint", inner=(Op("detached", 1), Op("linear"))),))), GRAPHS)


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_skip_step_without_forward_counts_after_a_backward_that_used_no_parameter(
    ranks2: RankPool, wrapper: str
) -> None:
    """It was taken for a torch.autograd.grad, its forward was still awaited, and skip_step() took that one's place."""
    steps = (Step(), Step(skipped_on=(1,), skip_after_forward=False))
    unused = Op("sometimes", variant=1, inner=(Op("in_place"),))
    compare(ranks2, Program(Model((unused,)), steps), (wrapper,))


def test_the_second_of_two_forwards_does_not_wait_for_a_part_that_the_step_skips(ranks2: RankPool) -> None:
    """Its graph stood behind hooks that waited for the skipped part, and could not go by hooks: an error."""
    skipped = Op("sometimes", variant=1, inner=(Op("checkpoint", inner=(Op("block", 3),)),))
    steps = (Step(forwards=2, active_on=(1,)), Step(forwards=2))
    compare(ranks2, Program(Model((Op("block", 1), Op("linear", 2), skipped)), steps), GRAPHS)


def test_a_parameter_of_both_kinds_is_reduced_where_rank_zero_skips_the_first_step(ranks2: RankPool) -> None:
    """Rank 0 alone told what is used both in a graph and outside of it, and had run nothing: an error."""
    both = Model((Op("eager", inner=(Op("linear", 1),)), Op("linear", 1)))
    compare(ranks2, Program(both, (Step(skipped_on=(0,)), Step(), Step())), GRAPHS)


def test_a_variant_of_a_graph_with_two_names_for_one_size_takes_what_its_forward_saved(ranks2: RankPool) -> None:
    """Compiled again, its forward saved this size twice: "generator raised StopIteration" from torch on both ranks."""
    ops = (
        Op("branch", inner=(Op("break"),)),
        Op("branch", inner=(Op("eager", inner=(Op("reshaped"),)),)),
        Op("in_place", 1),
        Op("sometimes", variant=1, inner=(Op("block", 3),)),
        Op("branch", inner=(Op("nonlinear"), Op("break"), Op("sometimes", variant=1, inner=(Op("reshaped"),)))),
    )
    steps = (Step(zero="keep", rows=(1,), skipped_on=(0, 2), active_on=()), Step(local=(2,), rows=(1, 1, 3)), Step())
    compare(ranks2, Program(Model(ops), steps), GRAPHS)
