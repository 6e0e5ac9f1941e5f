"""A wrapper in the place of torch's DistributedDataParallel, for code that constructs that by itself."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchsOwn

from compiled_ddp.integrations.torch import DistributedDataParallel, EagerDistributedDataParallel
from compiled_ddp.options import CompilerKeywords, OptionKeywords, part_options
from compiled_ddp.wrapping.ddp_arguments import refuse_unknown


@contextlib.contextmanager
def replace_ddp(*, backend: str = "inductor", **options: Any) -> Iterator[None]:
    """While it is open, what constructs torch's DistributedDataParallel gets one of this package.

    Under whatever name that class has been imported, and in every thread. What was made stays what it is; torch's class
    is as before when the context ends, with an error too. Subclasses of others are left alone.

    Args:
        backend: that of `compile_ddp`, or "hooks" for `EagerDDP`, which compiles nothing.
        options: others of `compile_ddp` or `EagerDDP`. Where the code that constructs gives the same, it has its way.

    Raises TypeError or ValueError for what is no option of these.
    """
    replacement: Any = EagerDistributedDataParallel
    keywords: type[OptionKeywords] = OptionKeywords
    if backend != "hooks":
        replacement, options, keywords = DistributedDataParallel, {"backend": backend, **options}, CompilerKeywords
    known, others = part_options(options, keywords)
    known.check()
    refuse_unknown(others, "replace_ddp")
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
