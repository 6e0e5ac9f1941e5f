"""A wrapper in the place of torch's DistributedDataParallel, for code that constructs that by itself."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.nn import parallel

from compiled_ddp.integrations.torch import DistributedDataParallel, EagerDistributedDataParallel
from compiled_ddp.options import CompilerKeywords, OptionKeywords, part_options
from compiled_ddp.wrapping.ddp_arguments import refuse_unknown

_TorchsOwn: Any = parallel.DistributedDataParallel


def check_replacement(taker: str, backend: str, options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for an option that `replace_ddp` does not have with this backend."""
    keywords: type[OptionKeywords] = OptionKeywords
    if backend != "hooks":
        options, keywords = {"backend": backend, **options}, CompilerKeywords
    known, others = part_options(options, keywords)
    known.check()
    refuse_unknown(others, taker)


class _Constructor:
    """The constructor of torch's class, while there are replacements. One for the process, as that class is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replacements: list[_Replacement] = []  # the latest last
        self._torchs: Any = None  # the constructor that the first of them has found

    def begin(self, replacement: "_Replacement") -> None:
        with self._lock:
            if not self._replacements:
                self._torchs = _TorchsOwn.__init__
                _TorchsOwn.__init__ = self._in_its_place(self._torchs)
            self._replacements.append(replacement)

    def end(self, replacement: "_Replacement") -> None:
        """In any order: contexts of several threads need not be nested."""
        with self._lock:
            self._replacements.remove(replacement)
            if not self._replacements:
                _TorchsOwn.__init__ = self._torchs

    def _in_its_place(self, torchs: Callable[..., None]) -> Callable[..., None]:
        # By its constructor and not by its name: others have imported the name long before.
        def construct(ddp: Any, *args: Any, **kwargs: Any) -> None:
            with self._lock:  # while it constructs, others may begin and end
                latest = self._replacements[-1] if self._replacements else None
            if latest is None or type(ddp) is not _TorchsOwn:
                torchs(ddp, *args, **kwargs)
            else:
                latest.construct(ddp, *args, **kwargs)

        return construct


_constructor = _Constructor()


class _Replacement:
    """What one context constructs."""

    def __init__(self, backend: str, options: Mapping[str, Any]) -> None:
        self._wrapper: Any = EagerDistributedDataParallel
        self._options = options
        if backend != "hooks":
            self._wrapper, self._options = DistributedDataParallel, {"backend": backend, **options}

    def construct(self, ddp: Any, *args: Any, **kwargs: Any) -> None:
        ddp.__class__ = self._wrapper
        self._wrapper.__init__(ddp, *args, **{**self._options, **kwargs})


@contextlib.contextmanager
def replace_ddp(*, backend: str = "inductor", **options: Any) -> Iterator[None]:
    """Context in which constructing torch's DistributedDataParallel makes a wrapper of this package instead.

    Under whatever name that class has been imported, and in every thread: of several such contexts, the one that began
    last and has not ended counts, and they may end in any order. What was made stays what it is; torch's class is as
    before when the last context has ended, with an error too. Subclasses of others are left alone.

    Args:
        backend: that of `compile_ddp`, or "hooks" for `EagerDDP`, which compiles nothing.
        options: others of `compile_ddp` or `EagerDDP`. Where the code that constructs gives the same, it has its way.

    Raises TypeError or ValueError for what is no option of these.
    """
    check_replacement("replace_ddp", backend, options)
    replacement = _Replacement(backend, options)
    _constructor.begin(replacement)
    try:
        yield
    finally:
        _constructor.end(replacement)
