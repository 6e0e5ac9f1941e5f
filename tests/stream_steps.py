"""Steps on the device of `second_device.py`, and what they must bring: plain autograd averaged by hand, on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import second_device
import torch
import torch.distributed as dist
from models import row_batch, wrappers
from torch import Tensor, nn

BOTH = ("compile_ddp", "EagerDDP")
DEVICE = "twins:0"
LATE = {"share": 0.2, "longest_us": 4000}
PROVEN_AFTER = 2  # steps, in which the host reads checksums


class Branches(nn.Module):
    """Two branches, each on a stream of its own where there are any and `own_streams` says so."""

    def __init__(self, own_streams: bool = False) -> None:
        super().__init__()
        self.own_streams = own_streams
        self.stem = nn.Linear(5, 8)
        self.left, self.right = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        if x.is_cpu or not self.own_streams:
            return self.head(self.left(x) + self.right(x))
        here, parts = current_stream(), []
        for stream, branch in zip(streams(2), (self.left, self.right), strict=True):
            stream.wait_stream(here)
            x.record_stream(stream)
            with stream:
                parts.append(branch(x))
            here.wait_stream(stream)
            parts[-1].record_stream(here)
        return self.head(parts[0] + parts[1])


def current_stream() -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(DEVICE))


_streams: list[torch.Stream] = []


def streams(number: int) -> list[torch.Stream]:
    """The same ones in every test of a process."""
    while len(_streams) < number:
        _streams.append(torch.Stream(torch.device(DEVICE)))
    return _streams[:number]


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def wrapped(library: Path, wrapper: str, model: Callable[[], nn.Module] = Branches, **options: Any) -> Any:
    """On all ranks the same model, with several buckets."""
    second_device.register(library)
    torch.manual_seed(0)
    options = {"bucket_cap_mb": 0.0002, **options}
    return wrappers([wrapper])[wrapper](model().to(DEVICE), process_group=second_device.group(), **options)


def with_streams() -> nn.Module:
    return Branches(own_streams=True)


def on_cpu(ddp: Any, model: Callable[[], nn.Module] = Branches) -> nn.Module:
    """The same module there, with the values of now."""
    bare = model()
    bare.load_state_dict({name: value.cpu() for name, value in ddp.module.state_dict().items()})
    return bare


def on_all_ranks(right: bool) -> bool:
    number = torch.tensor(float(right))
    dist.all_reduce(number)
    return number.item() == dist.get_world_size()


def are_right(found: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float = 1e-4, atol: float = 1e-5) -> bool:
    """On all ranks; a rank that differs does not leave the other one in a collective."""
    return on_all_ranks(
        all(torch.allclose(found[name].double(), expected[name], rtol=rtol, atol=atol) for name in expected)
    )


def gradients(ddp: Any) -> dict[str, Tensor]:
    """Read on the current stream, as a user would."""
    return {name: parameter.grad.cpu() for name, parameter in ddp.module.named_parameters()}


# ---- steps -----------------------------------------------------------------------------------------------------------
# Each runs one on this rank, and returns the loss whose mean over ranks it has reduced.

Loss = Callable[[nn.Module], Tensor]


def one(rank: int, ddp: Any, step: int) -> Loss:
    x = row_batch(rank, step)
    loss_of(ddp, x.to(DEVICE, non_blocking=True)).backward()
    return lambda module: loss_of(module, x)


def accumulating(rank: int, ddp: Any, step: int) -> Loss:
    first, second = row_batch(rank, 2 * step), row_batch(rank, 2 * step + 1)
    with ddp.no_sync():
        loss_of(ddp, first.to(DEVICE)).backward()
    loss_of(ddp, second.to(DEVICE)).backward()
    return lambda module: loss_of(module, first) + loss_of(module, second)


def on_a_stream(rank: int, ddp: Any, step: int) -> Loss:
    here, stream = current_stream(), streams(3)[2]
    stream.wait_stream(here)
    with stream:
        loss = one(rank, ddp, step)
    here.wait_stream(stream)
    return loss


def skipping(rank: int, ddp: Any, step: int) -> Loss:
    if rank == step % 2:
        ddp.skip_step()
        return lambda module: 0.0 * loss_of(module, row_batch(rank, step))
    return one(rank, ddp, step)


KINDS = {"one": one, "accumulating": accumulating, "on a stream": on_a_stream, "skipping": skipping}
