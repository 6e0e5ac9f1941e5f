"""Activation checkpointing of plain functions."""

from collections.abc import Callable
from typing import Any

from compiled_ddp.functional.session import current_session


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` and keep only its results; the backward recomputes intermediate values.

    Like jax.checkpoint, and like torch.utils.checkpoint, which torch.func refuses. The function may close over tensors
    and draw from explicit generators, which then give the same numbers again; what it draws from the default one, as
    dropout does, is kept, and collectives in it run once. A nested call belongs to the outer one. Inputs of `function`
    that are not arguments of the step are copied once. torch.utils.checkpoint does the same in a compiled step.

    Raises RuntimeError outside of a compiled step.
    """
    session = current_session()
    if session is None:
        raise RuntimeError(
            "compiled_ddp.functional.checkpoint recomputes in a graph: call it within a step of "
            "compiled_ddp.functional.compile(step); eagerly, call the function itself."
        )
    return session.regions.call(function, args, kwargs)
