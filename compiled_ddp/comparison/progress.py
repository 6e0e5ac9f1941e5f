"""A progress bar where tqdm is installed; nothing where it is not."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def with_progress(items: Iterable[T], label: str, *, shown: bool) -> Iterable[T]:
    """`items`, one by one, with a bar on stderr if `shown`."""
    if not shown:
        return items
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[T] = tqdm(items, desc=label, leave=False)
    return bar
