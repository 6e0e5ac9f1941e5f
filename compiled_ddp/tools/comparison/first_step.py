"""Why a first step is slow: where its seconds went, in a sentence."""

from compiled_ddp.tools.comparison.result import Comparison, FirstStep, VariantResult

SLOWER_TIMES, SLOWER_S = 2, 1.0  # than the shortest first step, both: what takes less is not explained


def why_slow(comparison: Comparison) -> list[str]:
    """A sentence for each variant whose first step, with an empty cache, is much slower than the shortest one."""
    measured = [result for result in comparison.variants if result.first_step_cold_s is not None]
    shortest = min((result.first_step_cold_s or 0.0 for result in measured), default=0.0)
    slow = [result for result in measured if _is_slow(result.first_step_cold_s or 0.0, shortest)]
    return [_sentence(result, result.first_step_parts) for result in slow if result.first_step_parts is not None]


def _is_slow(seconds: float, shortest: float) -> bool:
    return seconds > SLOWER_TIMES * shortest and seconds > shortest + SLOWER_S


def _sentence(result: VariantResult, parts: FirstStep) -> str:
    graphs = f" (Inductor: {parts.compiled} graphs in {parts.inductor_s:.1f} s, {parts.loaded} from its cache)"
    return (
        f"first step of {result.name}, {parts.seconds:.1f} s: {parts.capture_s:.1f} s capture by Dynamo, "
        f"{parts.forward_s:.1f} s compiling forwards, {parts.backward_s:.1f} s compiling backwards"
        f"{graphs if parts.compiled or parts.loaded else ''}, {parts.wrapping_s:.1f} s building and wrapping, "
        f"{parts.rest_s:.1f} s running, agreement and checks"
    )
