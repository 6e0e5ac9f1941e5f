"""The options of both wrappers: their defaults, and what makes them valid."""

import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

MEBIBYTE = 1024 * 1024

# Measured: docs/benchmarks.md, "Bucket size".
DEFAULT_BUCKET_CAP_MB = 4.0

Mode = Literal["graph", "hooks"]


@dataclass(frozen=True)
class Options:
    """What a wrapper was asked for. Sizes are in MiB, as DDP's."""

    bucket_cap_mb: float | None = None
    first_bucket_mb: float = 1.0
    broadcast_buffers: bool = True
    init_sync: bool = True
    gradient_as_bucket_view: bool = True
    strict: bool = False
    backend: str = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str | None = None
    options: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise ValueError, with what is allowed, for a value that is not."""
        for name in ("bucket_cap_mb", "first_bucket_mb"):
            size = getattr(self, name)
            if size is not None and not size > 0:
                raise ValueError(f"{name} must be a positive number of MiB, found {size!r}.")
        if self.backend not in ("inductor", "aot_eager"):
            raise ValueError(f"backend must be 'inductor' or 'aot_eager', found {self.backend!r}.")
        if self.mode is not None and self.options is not None:
            raise ValueError("mode and options are alternatives, as in torch.compile: pass one of them.")

    @property
    def first_bucket_bytes(self) -> float:
        return min(self.first_bucket_mb * MEBIBYTE, self.bucket_cap_bytes)

    @property
    def bucket_cap_bytes(self) -> float:
        if self.naive:
            return 0
        return (DEFAULT_BUCKET_CAP_MB if self.bucket_cap_mb is None else self.bucket_cap_mb) * MEBIBYTE

    @property
    def naive(self) -> bool:
        """Whether graphs keep the reference program, one all-reduce per gradient: `options={NAIVE: True}`."""
        return bool((self.options or {}).get(NAIVE))

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """`options` without our own keys: Inductor's."""
        return self.options and {key: value for key, value in self.options.items() if key != NAIVE}

    def shared(self) -> dict[str, object]:
        """The options that must be equal on every rank, in a form that can be compared."""
        return {name: repr(value) for name, value in asdict(self).items()}


NAIVE = "compiled_ddp.naive"


def mode_from_environment() -> Mode:
    """`COMPILED_DDP_MODE`: "graph" (the default) or "hooks", which switches the passes off without a code change.

    Raises ValueError for anything else.
    """
    mode = os.environ.get("COMPILED_DDP_MODE", "graph")
    if mode not in ("graph", "hooks"):
        raise ValueError(f"COMPILED_DDP_MODE must be 'graph' or 'hooks', found {mode!r}.")
    return mode  # type: ignore[return-value]

