"""Which programs hypothesis draws."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from fuzz.conversion import CONVERSIONS
from fuzz.description import WITH_INNER, Change, Failure, Join, Model, Op, Other, Program, Setting, Step
from fuzz.kept import WAYS
from fuzz.legality import is_legal, tamed
from fuzz.reducing_hooks import TORCH, TRACED
from fuzz.users_gradients import CHANGES, OF_ALL

KEYS = st.integers(0, 3)
RANKS = st.lists(st.integers(0, 2), unique=True, max_size=2).map(lambda ranks: tuple(sorted(ranks)))


def leaves() -> st.SearchStrategy[Op]:
    with_parameters = st.sampled_from(["linear", "linear", "linear", "scale", "transposed", "select", "in_place"])
    rare = st.sampled_from(["detached", "block", "block", "in_place"])
    return st.one_of(
        st.builds(Op, with_parameters, KEYS),
        st.builds(Op, rare, KEYS),
        st.sampled_from([Op("reshaped"), Op("activation_hook"), Op("break")]),
        st.builds(lambda variant: Op("nonlinear", variant=variant), st.integers(0, 2)),
        st.builds(lambda ranks: Op("break", ranks=ranks), RANKS),
    )


def operations() -> st.SearchStrategy[Op]:
    def nested(inner: st.SearchStrategy[Op]) -> st.SearchStrategy[Op]:
        several = st.lists(inner, min_size=1, max_size=3).map(tuple)
        return st.builds(
            lambda kind, variant, ops: Op(kind, variant=variant, inner=ops),
            st.sampled_from(WITH_INNER),
            st.integers(0, 1),
            several,
        )

    return st.recursive(leaves(), nested, max_leaves=4)


def models() -> st.SearchStrategy[Model]:
    usually_empty = st.one_of(st.just(()), st.just(()), st.lists(KEYS, unique=True, max_size=2).map(tuple))
    dtypes = st.sampled_from(["float32", "float32", "float64", "bfloat16"])
    return st.builds(
        Model,
        ops=st.lists(operations(), min_size=1, max_size=6).map(tuple),
        dtypes=st.one_of(st.just(()), st.lists(dtypes, max_size=4).map(tuple)),
        unused=st.sampled_from([0, 0, 0, 1, 2]),
        frozen=usually_empty,
        hooked=usually_empty,
        hooked_on=RANKS,
    )


def steps() -> st.SearchStrategy[Step]:
    usually_nobody = st.one_of(st.just(()), st.just(()), RANKS)
    return st.builds(
        Step,
        zero=st.sampled_from(["none", "zeros", "keep"]),
        local=st.one_of(st.just((0,)), st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)),
        forwards=st.sampled_from([1, 1, 1, 2]),
        rows=st.one_of(st.just((2,)), st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)),
        eager_on=usually_nobody,
        skipped_on=usually_nobody,
        skip_after_forward=st.booleans(),
        active_on=st.one_of(st.just((0, 1, 2)), RANKS),
    ).map(_countable)


def _countable(step: Step) -> Step:
    """Without its forwards, skip_step() stands for one of them: docs/limits/steps.md."""
    if step.forwards == 1 or step.skip_after_forward:
        return step
    return Step(**{**vars(step), "skip_after_forward": True})


def programs() -> st.SearchStrategy[Program]:
    some_graphs_too_small = st.builds(Setting, smallest_graph_mb=st.sampled_from([0.0, 3e-4, 0.5]))
    some_steps = st.lists(steps(), min_size=1, max_size=3).map(tuple)
    return st.builds(Program, models(), some_steps, setting=some_graphs_too_small).filter(is_legal)


# ---- what disturbs a program: a kind each ----------------------------------------------------------------------------


def _each_step(program: Program, draw: st.DrawFn, change: Callable[[Step], Step]) -> Program:
    """The program with some of its steps changed, the last one for sure; of two steps at least."""
    steps = list(program.steps) if len(program.steps) > 1 else [*program.steps, *program.steps]
    last = len(steps) - 1
    for number, step in enumerate(steps):
        if isinstance(step, Step) and (number == last or draw(st.booleans())):
            steps[number] = change(step)
    return replace(program, steps=tuple(steps))


def _keeps(program: Program, draw: st.DrawFn) -> Program:
    """Before the last step, which must leave what is kept."""
    kept = _each_step(program, draw, lambda step: replace(step, keeps=draw(st.sampled_from(sorted(WAYS)))))
    first = replace(kept.plain_steps[0], keeps=draw(st.sampled_from(sorted(WAYS)))) if kept.plain_steps else Step()
    return replace(kept, steps=(first, *kept.steps[1:]))


def _converts(program: Program, draw: st.DrawFn) -> Program:
    kinds = st.sampled_from(sorted(CONVERSIONS))
    return _each_step(program, draw, lambda step: replace(step, before=(*step.before, Change(draw(kinds)))))


def _changes_gradients(program: Program, draw: st.DrawFn) -> Program:
    changes = st.builds(
        Change, st.sampled_from([*CHANGES, *OF_ALL]), st.integers(1, 3), st.one_of(st.just((0, 1, 2)), RANKS)
    )

    def change(step: Step) -> Step:
        zero = draw(st.sampled_from(["none", "keep", "keep", "zeros"]))
        moment = draw(st.sampled_from(["before", "between", "between"]))
        local = (1,) if moment == "between" and step.local == (0,) else step.local
        return replace(step, zero=zero, local=local, **{moment: (*getattr(step, moment), draw(changes))})

    return _each_step(program, draw, change)


def _has_defaults(program: Program, draw: st.DrawFn) -> Program:
    return replace(
        program,
        setting=replace(
            program.setting,
            default_dtype=draw(st.sampled_from(["float64", "float64", "bfloat16", "float32"])),
            default_device=draw(st.sampled_from(["", "cpu", "meta"])),
        ),
    )


def _has_others(program: Program, draw: st.DrawFn) -> Program:
    others = st.builds(Other, small_models(), st.booleans(), st.booleans())
    return replace(program, others=tuple(draw(st.lists(others, min_size=1, max_size=2))))


def _with_ops(program: Program, draw: st.DrawFn, kind: Callable[[], Op], most: int) -> Program:
    """Further operations at any place of the model, which no other operation has around it."""
    ops = list(program.model.ops)
    for _ in range(draw(st.integers(1, most))):
        ops.insert(draw(st.integers(0, len(ops))), kind())
    return replace(program, model=replace(program.model, ops=tuple(ops)))


def _communicates(program: Program, draw: st.DrawFn) -> Program:
    return _with_ops(program, draw, lambda: Op("all_reduce", variant=draw(st.integers(0, 2))), 2)


FAILURES = ["forward", "backward", "backward", "backward", "loss hook", "weight hook", "accumulate hook", "input hook"]


def _fails(program: Program, draw: st.DrawFn) -> Program:
    program = _with_ops(program, draw, lambda: Op("trap"), 2)
    failures = st.builds(
        Failure,
        st.sampled_from([*FAILURES, "optimizer"]),
        st.integers(0, 2),
        st.sampled_from(["ValueError", "KeyboardInterrupt", "OutOfMemoryError"]),
        st.sampled_from(["abandon", "zero_grad", "evaluate"]),
    )
    return _each_step(program, draw, lambda step: replace(step, failure=draw(failures)))


def _joins(program: Program, draw: st.DrawFn) -> Program:
    joins = st.builds(
        Join,
        batches=st.lists(st.integers(0, 3), min_size=2, max_size=3).map(tuple),
        by_all=st.booleans(),
        throws=st.booleans(),
        zero=st.sampled_from(["none", "none", "zeros", "keep"]),
        weights=WEIGHTS,
    )
    steps: list[Step | Join] = list(program.steps[:2])
    steps.insert(draw(st.integers(0, len(steps))), draw(joins))
    return replace(program, steps=tuple(steps))


WEIGHTS = st.lists(st.sampled_from([1.0, 0.0, 2.0, 3.0, 0.5]), min_size=1, max_size=3).map(tuple)


def _reduces(program: Program, draw: st.DrawFn) -> Program:
    reduction = draw(st.sampled_from(["weighted", "weighted", "sum"]))
    program = replace(program, setting=replace(program.setting, reduction=reduction))
    nobody_or_some = st.one_of(st.just(()), RANKS)
    return _each_step(program, draw, lambda step: replace(step, weights=draw(WEIGHTS), nan_on=draw(nobody_or_some)))


def _has_hook(program: Program, draw: st.DrawFn) -> Program:
    return replace(program, setting=replace(program.setting, hook=draw(st.sampled_from([*TRACED, *TORCH]))))


def _reads_not_all(program: Program, draw: st.DrawFn) -> Program:
    inner = st.lists(leaves(), min_size=1, max_size=2).map(tuple)
    program = _with_ops(program, draw, lambda: Op("aside", inner=draw(inner)), 2)
    of_forwards = st.lists(st.sampled_from(["all", "main", "asides"]), min_size=1, max_size=6).map(tuple)
    return _each_step(program, draw, lambda step: replace(step, reads=draw(of_forwards)))


def _is_compiled_around(program: Program, draw: st.DrawFn) -> Program:
    return _each_step(program, draw, lambda step: replace(step, compiled_around=True))


def _has_options(program: Program, draw: st.DrawFn) -> Program:
    setting = replace(
        program.setting,
        bucket_cap_mb=draw(st.sampled_from([1.0, 5e-5])),
        bucket_view=draw(st.booleans()),
        by_rows=draw(st.booleans()) and not program.setting.hook,
        verify=draw(st.sampled_from(["always", "first", "off"])),
    )
    return replace(program, setting=setting)


KINDS: dict[str, Callable[[Program, st.DrawFn], Program]] = {
    "kept gradients": _keeps,
    "conversions": _converts,
    "changed .grad": _changes_gradients,
    "defaults": _has_defaults,
    "several wrappers": _has_others,
    "collectives": _communicates,
    "exceptions": _fails,
    "joins": _joins,
    "reductions": _reduces,
    "hooks": _has_hook,
    "unused outputs": _reads_not_all,
    "compiled around": _is_compiled_around,
    "options": _has_options,
}


def small_models() -> st.SearchStrategy[Model]:
    return models().map(lambda model: replace(model, ops=model.ops[:3]))


@st.composite
def disturbed(draw: st.DrawFn, *, most_ops: int = 6) -> Program:
    """A program with one to four kinds of disturbances."""
    program = draw(programs())
    program = replace(program, model=replace(program.model, ops=program.model.ops[:most_ops]))
    random = draw(st.randoms(use_true_random=True))  # hypothesis would draw the first kinds most of the time
    for kind in random.sample(list(KINDS), random.randint(1, 4)):
        program = KINDS[kind](program, draw)
    return tamed(program)


def disturbed_programs() -> st.SearchStrategy[Program]:
    return disturbed().filter(is_legal)


def kinds_of(program: Program) -> list[str]:
    """Which kinds of disturbances are in it."""
    steps, setting = program.plain_steps, program.setting
    there = {
        "kept gradients": any(step.keeps for step in steps),
        "conversions": any(change.kind in CONVERSIONS for step in steps for change in step.before),
        "changed .grad": any(c.kind not in CONVERSIONS for step in steps for c in (*step.before, *step.between)),
        "defaults": bool(setting.default_device) or setting.default_dtype != "float32",
        "several wrappers": bool(program.others),
        "collectives": "all_reduce" in repr(program.models),
        "exceptions": any(step.failure for step in steps),
        "joins": len(steps) < len(program.steps),
        "reductions": setting.reduction != "mean",
        "weight 0 with NaN": any(step.nan_on for step in steps),
        "hooks": bool(setting.hook),
        "unused outputs": any({*step.reads} != {"all"} for step in steps) and "aside" in repr(program.models),
        "compiled around": any(step.compiled_around for step in steps),
        "options": (setting.bucket_cap_mb, setting.bucket_view, setting.verify, setting.by_rows)
        != (Setting.bucket_cap_mb, Setting.bucket_view, Setting.verify, Setting.by_rows),
    }
    return [kind for kind, is_there in there.items() if is_there]
