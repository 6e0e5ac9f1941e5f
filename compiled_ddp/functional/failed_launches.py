"""What has been launched when something fails: it keeps its connections open, and would fail a later wait."""

import contextlib
from collections.abc import Iterator, Sequence
from traceback import walk_tb

from torch import Tensor

from compiled_ddp.passes.ops import wait_tensor


def forget_launches(error: BaseException, memory: Sequence[Tensor] = ()) -> None:
    """Forget collectives on `memory`, and on the tensors of the code that has raised `error`, that nobody has awaited.

    Their groups have been closed on this rank, so that none of them is under way any more. torch.distributed keeps what
    is not awaited, and with it the connections, whose end others may wait for.
    """
    for tensor in (*memory, *_tensors_of_frames(error)):
        with contextlib.suppress(RuntimeError):
            wait_tensor(tensor)


def _tensors_of_frames(error: BaseException) -> Iterator[Tensor]:
    for frame, _ in walk_tb(error.__traceback__):
        for value in [*frame.f_locals.values()]:
            for leaf in value if isinstance(value, list | tuple) else (value,):
                if type(leaf) is Tensor and not leaf.is_meta:
                    yield leaf
