"""What torch's compilers have taken in this process."""

from typing import NamedTuple

from compiled_ddp.torch_private.aot import _ANOTHER_BACKWARD, _BACKWARD_WITHIN_FORWARD


class CompileTimes(NamedTuple):
    """Seconds of the wall clock, and how many graphs Inductor had: each forward and each backward is one."""

    capture_s: float  # Dynamo, and nothing that it calls
    forward_s: float  # AOTAutograd and the compiler, of forwards, and what backwards it compiles at once
    backward_s: float  # the compiler, of backwards that AOTAutograd leaves for later
    inductor_s: float  # of both
    compiled: int
    loaded: int  # from its cache


def compile_times() -> CompileTimes:
    """The times of all that this process has compiled so far."""
    from torch._dynamo.utils import compilation_time_metrics, counters

    def seconds(*phases: str) -> float:
        return float(sum(sum(compilation_time_metrics.get(phase, ())) for phase in phases))

    backends_s, of_inductor = seconds("OutputGraph.call_user_compiler"), counters["inductor"]
    return CompileTimes(
        capture_s=seconds("_compile.compile_inner") - backends_s,
        forward_s=backends_s - seconds(_BACKWARD_WITHIN_FORWARD),
        backward_s=seconds("backward._backward_impl", _ANOTHER_BACKWARD),
        inductor_s=seconds("compile_fx_inner"),
        compiled=of_inductor["fxgraph_cache_miss"] + of_inductor["fxgraph_cache_bypass"],
        loaded=of_inductor["fxgraph_cache_hit"],
    )
