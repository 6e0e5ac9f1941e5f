"""Names, sizes and errors in messages."""

from collections.abc import Callable, Sequence


def format_names(names: Sequence[str], most: int = 5) -> str:
    """At most `most` of these names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def format_function(function: Callable[..., object]) -> str:
    """The name of a function, or an object that is called, with its settings."""
    return str(getattr(function, "__name__", repr(function)))


def format_bytes(nbytes: int) -> str:
    """A size in bytes, kB or MB, of which 1 MB is 1,000,000 bytes."""
    if nbytes < 10_000:
        return f"{nbytes} bytes"
    return f"{nbytes / 1e3:.0f} kB" if nbytes < 1_000_000 else f"{nbytes / 1e6:.1f} MB"


def quoted(error: BaseException | None) -> str:
    """An error, for a message."""
    words = f"{type(error).__name__}: {error}"
    return words if len(words) < 2000 else f"{words[:2000]} ..."
