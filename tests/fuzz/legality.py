"""Which programs stay clear of what docs/limits.md and docs/limits/ list as refused or as not detected."""

from dataclasses import replace

import torch

from fuzz.conversion import CONVERSIONS
from fuzz.description import OTHER_WRAPPER, Join, Model, Op, Program, Reads, Step, parameters_of, walk


def permitted(program: Program, wrapper: str) -> Program:
    """The program without what this torch or this wrapper cannot do, as docs/limits.md tells."""
    return _without_unread_outputs(_of_one_size(program), wrapper)


def _of_one_size(program: Program) -> Program:
    """Without dynamic shapes where Dynamo fails on them in Functions: docs/limits.md, "Versions of torch"."""
    functions = ("nonlinear", "activation_hook")  # Dynamo makes one of a hook too
    if torch.__version__ >= (2, 13) or not any(_has(model, kind) for model in program.models for kind in functions):
        return program
    steps = (replace(step, rows=(2,)) if isinstance(step, Step) else step for step in program.steps)
    return replace(program, steps=tuple(steps))


def _without_unread_outputs(program: Program, wrapper: str) -> Program:
    """Graphs have zeros for some of them: docs/limits/works.md, "Unused parameters"."""
    wrappers = {wrapper, *(OTHER_WRAPPER[wrapper] for other in program.others if other.swapped)}
    kinds = {op.kind for model in program.models for op, _ in walk(model.ops)}
    if wrappers == {"EagerDDP"} or kinds.isdisjoint(("in_place", "nonlinear")):
        return program
    steps = (replace(step, reads=("all",)) if isinstance(step, Step) else step for step in program.steps)
    return replace(program, steps=tuple(steps))


# ---- what does not go together ---------------------------------------------------------------------------------------


def tamed(program: Program) -> Program:
    """The program without what docs/limits/refused.md has beside the rest of it, or nobody could average by hand."""
    setting = program.setting
    if setting.hook:
        setting = replace(setting, reduction="mean")
    steps = tuple(_tamed_join(s, setting.hook) if isinstance(s, Join) else s for s in program.steps)
    if program.others:  # ddp.join() is for one wrapper; an error of one wrapper keeps another from its end
        steps = tuple(replace(s, failure=None) if isinstance(s, Step) else Step() for s in steps)
    if any(_has(model, "all_reduce") for model in program.models):
        steps = tuple(map(_alike_on_all_ranks, steps))
    if any(_has(model, "detached") for model in program.models):
        steps = tuple(map(_without_changes_to_local_gradients, steps))
    if setting.reduction != "weighted":
        steps = tuple(replace(s, nan_on=()) if isinstance(s, Step) else s for s in steps)
    return replace(program, setting=setting, steps=tuple(map(_tamed_step, steps)))


def _has(model: Model, kind: str) -> bool:
    return any(op.kind == kind for op, _ in walk(model.ops))


def _tamed_join(join: Join, hook: str) -> Join:
    """A communication hook divides as it does."""
    return replace(join, by_all=True) if hook else join


def _alike_on_all_ranks(step: Step | Join) -> Step | Join:
    """Every rank runs the model's collectives equally often, and what one of them makes of NaN is everyone's.

    A captured graph's backward runs all of its collectives for any of its outputs, and ranks may break it elsewhere.
    """
    if isinstance(step, Join):
        return replace(step, throws=True)
    reads: tuple[Reads, ...] = tuple("main" if read == "asides" else read for read in step.reads)
    return replace(step, local=step.local[:1], reads=reads, skipped_on=(), nan_on=(), failure=None)


def _without_changes_to_local_gradients(step: Step | Join) -> Step | Join:
    """A .grad that a local backward leaves as it is counts as used: docs/limits/works.md, "Unused parameters"."""
    if isinstance(step, Join) or not any(step.local):
        return step
    return replace(step, between=(), before=tuple(change for change in step.before if change.kind in CONVERSIONS))


def _tamed_step(step: Step | Join) -> Step | Join:
    if isinstance(step, Join):
        return step
    if step.failure is not None:
        step = replace(step, skipped_on=(), nan_on=())
    if step.nan_on:
        step = replace(step, skipped_on=())
    return step


# ---- programs that are not drawn at all ------------------------------------------------------------------------------

Place = tuple[str, ...]  # of a reader of parameters: the kinds of the operations that it stands in


def is_legal(program: Program) -> bool:
    return bool(program.steps) and all(_model_is_legal(model, program) for model in program.models)


def _model_is_legal(model: Model, program: Program) -> bool:
    two_forwards = any(step.forwards > 1 for step in program.plain_steps)
    some_read_asides_alone = any("asides" in step.reads for step in program.plain_steps) and _has(model, "aside")
    uses: dict[tuple[str, int], list[Place]] = {}
    for op, within in walk(model.ops):
        if op.kind == "checkpoint" and op.variant == 1 and two_forwards:
            return False  # a second gradient after its bucket has gone out
        read = parameters_of(op)
        if read is None:
            continue
        place: Place = tuple(outer.kind for outer in within)
        if some_read_asides_alone and "aside" not in place:
            place = ("sometimes read", *place)
        if _is_used_in_some_steps_only(place) and _is_reentrant(within):
            return False  # a first gradient from inside a reentrant checkpoint
        uses.setdefault(read, []).append(place)
    trained = [read for read in uses if read[0] != "linear" or read[1] not in model.frozen]
    breaks = _has(model, "break")
    return bool(trained) and all(_may_be_shared(places, breaks=breaks) for places in uses.values())


def _is_reentrant(within: tuple[Op, ...]) -> bool:
    return any(op.kind == "checkpoint" and op.variant == 1 for op in within)


def _is_used_in_some_steps_only(place: Place) -> bool:
    return not {"sometimes", "sometimes read"}.isdisjoint(place)


def _may_be_shared(places: list[Place], *, breaks: bool) -> bool:
    """`places` holds one of each reader of a parameter.

    What follows on a graph break runs as eager code for ever if it had no operators when Dynamo first came to it.
    """
    if len(places) == 1:
        return True
    if breaks and any("sometimes" in place for place in places):
        return False
    in_eager_code = [place for place in places if "eager" in place]
    if any("checkpoint" in place for place in places):
        return False  # a second gradient after its bucket has gone out
    if not in_eager_code or len(in_eager_code) == len(places):
        return True
    return not any(map(_is_used_in_some_steps_only, places))
