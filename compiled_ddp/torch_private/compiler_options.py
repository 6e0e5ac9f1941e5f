"""Inductor's own options: what torch.compile makes of its arguments."""

from collections.abc import Mapping
from typing import Any

import torch

from compiled_ddp.keywords import suggestion


def modes() -> tuple[str, ...]:
    """The modes that torch.compile takes."""
    import torch._inductor

    return tuple(torch._inductor.list_mode_options())


def inductor_options(mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None) -> dict[str, Any]:
    """Inductor's config patches for torch.compile's `mode` and `options`.

    Raises ValueError for an unknown option.
    """
    import torch._inductor
    from torch._inductor import config

    patches = torch._inductor.list_mode_options(mode, dynamic) if mode and mode != "default" else {}
    patches = {**patches, **{str(key).replace("-", "_"): value for key, value in (options or {}).items()}}
    known = config.get_config_copy() if patches else {}
    unknown = [key for key in patches if key not in known]
    if unknown:
        raise ValueError(
            f"options has {unknown[0]!r}, which Inductor does not know; see torch._inductor.list_options()."
            f"{suggestion(unknown[0], known)}"
        )
    return patches


# Of a graph whose order is that of its nodes. Torch may change it for less memory, and would put first what allocates
# none, as waiting for what is in a graph's inputs.
KEEPS_ORDER: Mapping[str, Any] = {"reorder_for_peak_memory": False}


def uses_cuda_graphs(options: Mapping[str, Any], device: torch.device) -> bool:
    """Whether Inductor, with these config patches, replays what it compiles for `device` as CUDA graphs."""
    from torch._inductor import config

    return device.type == "cuda" and bool(options.get("triton.cudagraphs", config.triton.cudagraphs))
