"""A misspelt argument of every public entry is refused with the one that may have been meant."""

from collections.abc import Callable
from typing import Any

import pytest
from models import Mlp

from compiled_ddp import EagerDDP, comm_hooks, compile_ddp, functional, replace_ddp, verify_parity
from compiled_ddp.compat import apex, bert
from compiled_ddp.integrations.torch import DistributedDataParallel, EagerDistributedDataParallel
from compiled_ddp.keywords import suggestion, suggests_keywords
from ranks import RankPool

OF_A_MODEL: dict[Callable[..., Any], tuple[str, str]] = {
    compile_ddp: ("bucket_cap_mg", "bucket_cap_mb"),
    EagerDDP: ("find_unused_parameter", "find_unused_parameters"),
    DistributedDataParallel: ("gradient_as_bucketview", "gradient_as_bucket_view"),
    EagerDistributedDataParallel: ("proces_group", "process_group"),
    apex.DistributedDataParallel: ("mesage_size", "message_size"),
    bert.DistributedDataParallel: ("gradient_averge", "gradient_average"),
    apex.Reducer: ("proces_group", "process_group"),
}

OTHERS: list[tuple[Callable[..., Any], tuple[Any, ...], str, str]] = [
    (functional.grad, (abs,), "reducton", "reduction"),
    (functional.grad_and_value, (abs,), "reduce_val", "reduce_value"),
    (functional.compile, (abs,), "donat", "donate"),
    (functional.overlap, (None,), "inplace", "in_place"),
    (functional.Communicator, (), "proces_group", "process_group"),
    (comm_hooks.TopK, (), "fracton", "fraction"),
    (comm_hooks.PowerSGD, (), "rnk", "rank"),
    (verify_parity, (Mlp,), "stps", "steps"),
]


def _refuses_of_a_model(rank: int) -> None:
    for entry, (given, meant) in OF_A_MODEL.items():
        message = rf"unexpected keyword argument '{given}'\. Did you mean '{meant}'\?"
        with pytest.raises(TypeError, match=message):
            entry(Mlp(), **{given: None})
    with (
        pytest.raises(TypeError, match=r"replace_ddp got an unexpected .* 'backnd'\. Did you mean 'backend'"),
        replace_ddp(backnd="hooks"),
    ):
        pass
    with pytest.raises(
        ValueError, match=r"'max_autotun', which Inductor does not know.*\. Did you mean 'max_autotune'"
    ):
        compile_ddp(Mlp(), options={"max_autotun": True})


def test_what_wraps_a_model_suggests_an_argument_on_every_rank(ranks2: RankPool) -> None:
    ranks2.run(_refuses_of_a_model)


@pytest.mark.parametrize(("entry", "arguments", "given", "meant"), OTHERS, ids=[given for _, _, given, _ in OTHERS])
def test_what_wraps_none_suggests_an_argument(
    entry: Callable[..., Any], arguments: tuple[Any, ...], given: str, meant: str
) -> None:
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{given}'\. Did you mean '{meant}'\?"):
        entry(*arguments, **{given: None})


def test_nothing_is_suggested_for_what_is_like_nothing() -> None:
    assert suggestion("zzz", ["bucket_cap_mb"]) == ""


def test_known_arguments_arrive_and_the_signature_stays() -> None:
    @suggests_keywords
    def add(first: int, /, second: int = 2, *, third: int = 3) -> int:
        return first + second + third

    assert (add(1), add(1, second=5), add(1, 5, third=7)) == (6, 9, 13)
    with pytest.raises(TypeError, match=r"add got an unexpected keyword argument 'first'\.$"):
        add(first=1)  # type: ignore[call-arg]
    assert comm_hooks.TopK(fraction=0.5) == comm_hooks.TopK(0.5)
