"""A wrapper in the place of torch's DistributedDataParallel, for code that constructs that by itself."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchsOwn

from compiled_ddp.integrations.torch import DistributedDataParallel, EagerDistributedDataParallel
from compiled_ddp.options import CompilerKeywords, OptionKeywords, part_options
from compiled_ddp.wrapping.ddp_arguments import refuse_unknown


def check_replacement(taker: str, backend: str, options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for an option that `replace_ddp` does not have with this backend."""
    keywords: type[OptionKeywords] = OptionKeywords
    if backend != "hooks":
        options, keywords = {"backend": backend, **options}, CompilerKeywords
    known, others = part_options(options, keywords)
    known.check()
    refuse_unknown(others, taker)


@contextlib.contextmanager
def replace_ddp(*, backend: str = "inductor", **options: Any) -> Iterator[None]:
    """Context in which constructing torch's DistributedDataParallel makes a wrapper of this package instead.

    Under whatever name that class has been imported, and in every thread. What was made stays what it is; torch's class
    is as before when the context ends, with an error too. Subclasses of others are left alone.

    Args:
        backend: that of `compile_ddp`, or "hooks" for `EagerDDP`, which compiles nothing.
        options: others of `compile_ddp` or `EagerDDP`. Where the code that constructs gives the same, it has its way.

    Raises TypeError or ValueError for what is no option of these.
    """
    check_replacement("replace_ddp", backend, options)
    replacement: Any = EagerDistributedDataParallel
    if backend != "hooks":
        replacement, options = DistributedDataParallel, {"backend": backend, **options}
    torchs: Any = TorchsOwn
    before = torchs.__init__

    # By its constructor and not by its name: others have imported the name long before.
    def construct(ddp: Any, *args: Any, **kwargs: Any) -> None:
        if type(ddp) is not torchs:
            before(ddp, *args, **kwargs)
            return
        ddp.__class__ = replacement
        replacement.__init__(ddp, *args, **{**options, **kwargs})

    torchs.__init__ = construct
    try:
        yield
    finally:
        torchs.__init__ = before
