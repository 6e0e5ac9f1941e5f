"""Which programs hypothesis draws."""

from hypothesis import strategies as st

from fuzz.description import WITH_INNER, Model, Op, Program, Step, is_legal

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
    """Without its forwards, skip_step() stands for one of them: docs/limits.md, "Skipped and broken steps"."""
    if step.forwards == 1 or step.skip_after_forward:
        return step
    return Step(**{**vars(step), "skip_after_forward": True})


def programs() -> st.SearchStrategy[Program]:
    return st.builds(Program, models(), st.lists(steps(), min_size=1, max_size=3).map(tuple)).filter(is_legal)
