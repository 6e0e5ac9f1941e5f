"""How one gradient function's trees are reduced: agreed on once for each shape of them, then one operator."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.functional.communicator import Communicator, new_leading
from compiled_ddp.functional.operator import Request, SumOverRanks
from compiled_ddp.functional.session import Leaves, TracedReduction, current_session
from compiled_ddp.plan import FIRST_USED
from compiled_ddp.planning.assignment import MEBIBYTE
from compiled_ddp.users_code import warn_user

Kind = Literal["mean", "sum", "weighted"]
DEFAULT_BUCKET_CAP_MB = 8.0


def leaves_of(named: Sequence[tuple[str, Tensor]]) -> Leaves:
    """What is reduced, in the shapes in which it is: below vmap those of the whole batch."""
    found = []
    for name, leaf in named:
        bare = torch_private.autograd.without_transforms(leaf)
        found.append((name, tuple(bare.shape), bare.dtype, bare.device))
    return tuple(found)


@dataclass(frozen=True)
class Options:
    """The options of a gradient function, as in `grad`."""

    process_group: dist.ProcessGroup | Communicator | None
    reduction: Kind
    bucket_cap_mb: float | None

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Kind):
            raise ValueError(f"reduction must be one of {', '.join(get_args(Kind))}, found {self.reduction!r}.")
        cap = self.bucket_cap_mb
        if cap is not None and not cap >= 0:
            raise ValueError(f"bucket_cap_mb must be a size in MiB, 0 or more, found {cap!r}.")

    @property
    def capacities_bytes(self) -> tuple[float, ...]:
        return ((DEFAULT_BUCKET_CAP_MB if self.bucket_cap_mb is None else self.bucket_cap_mb) * MEBIBYTE,)


class GradientReduction:
    """The reductions of one gradient function."""

    def __init__(self, name: str, options: Options) -> None:
        self.name, self.options = name, options
        self._communicator: Communicator | None = None
        self._agreed: dict[Leaves, int] = {}  # the number of the agreement
        self._orders: dict[Leaves, tuple[int, ...]] = {}
        self._leading: dict[torch.device, Tensor] = {}
        self._is_alone: bool | None = None  # whether there are no other ranks; None until the first call

    @property
    def communicator(self) -> Communicator:
        assert self._communicator is not None, "asked of ranks that are alone"
        return self._communicator

    @property
    def world_size(self) -> int:
        return 1 if self._communicator is None else self._communicator.world_size

    def find_ranks(self) -> None:
        """At the first call: make the communicator, or warn that there is nothing to reduce over."""
        if self._is_alone is not None:
            return
        given = self.options.process_group
        is_there = given is not None or (dist.is_available() and dist.is_initialized())
        if is_there:
            self._communicator = given if isinstance(given, Communicator) else Communicator(given)
        self._is_alone = not is_there or self.communicator.world_size == 1
        if self._is_alone:
            why = "there is one rank" if is_there else "torch.distributed is not initialised"
            warn_user(f"{self.name} returns this process's own gradients, as {why}.")

    @property
    def is_alone(self) -> bool:
        return self._is_alone is True

    def agree(self, leaves: Leaves) -> None:
        """The first time with these leaves: all ranks have them, and the same options, or all raise the same error."""
        if leaves in self._agreed:
            return

        def describe() -> dict[str, list[object]]:
            properties: dict[str, list[object]] = {
                "the function": [self.name],
                "reduction": [self.options.reduction],
                "bucket_cap_mb": [self.options.bucket_cap_mb],
            }
            return properties | {name: [str(dtype), list(shape)] for name, shape, dtype, _ in leaves}

        with torch_private.tracing.outside_of_traces():
            self._agreed[leaves] = self.communicator.agree(describe, self.name)

    def order_of(self, leaves: Leaves) -> tuple[int, ...] | None:
        """That in which the gradients fill their buckets; None before ranks have agreed on it."""
        return self._orders.get(leaves)

    def agree_on_order(self, leaves: Leaves, order: Sequence[int]) -> tuple[int, ...]:
        """`order` on rank 0, and so everywhere, unless one has been agreed on."""
        if leaves not in self._orders:
            number = self._agreed[leaves]
            self._orders[leaves] = self.communicator.agree_on_order(number, order, self.name)
        return self._orders[leaves]

    def sum(self, leaves: Leaves, gradients: Sequence[Tensor], passengers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The sums over ranks of the gradients, then of the passengers."""
        session, device = current_session(), leaves[0][3]
        order = tuple(reversed(range(len(leaves))))
        note: Callable[[Tensor], None]
        if session is not None:
            leading = new_leading(device)
            traced = TracedReduction(self, leaves, leading)
            session.reductions.append(traced)
            note = functools.partial(session.note_run, traced)
        elif torch_private.tracing.is_tracing():
            leading, note = torch.zeros(FIRST_USED, dtype=torch.float32, device=device), _ignore
        else:
            order = self.agree_on_order(leaves, order)
            leading, note = self._begin_call(device), self.check
        return self._apply(order, leading, note, gradients, passengers)

    def break_off(self, leaves: Leaves, error: BaseException, passengers: int) -> None:
        """Send zeros for what could not be computed here, and say so: no rank is left waiting."""
        order = self.agree_on_order(leaves, tuple(reversed(range(len(leaves)))))
        device = leaves[0][3]
        leading = self._begin_call(device, f"{type(error).__name__}: {error}")
        with torch.no_grad():
            zeros = [torch.zeros(shape, dtype=dtype, device=device) for _, shape, dtype, device in leaves]
            none = [torch.zeros((), dtype=torch.float32, device=device) for _ in range(passengers)]
            self._apply(order, leading, self.communicator.note_reduced, zeros, none)

    def _apply(
        self,
        order: tuple[int, ...],
        leading: Tensor,
        note: Callable[[Tensor], None],
        gradients: Sequence[Tensor],
        passengers: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        request = Request(
            order,
            self.options.capacities_bytes,
            self.world_size,
            self.communicator.group_name,
            functools.partial(self.communicator.explaining, self.name),
            note,
        )
        sums: tuple[Tensor, ...] = SumOverRanks.apply(request, len(gradients), leading, *gradients, *passengers)  # type: ignore[no-untyped-call]
        return sums

    def _begin_call(self, device: torch.device, broken: str = "") -> Tensor:
        if device not in self._leading:
            self._leading[device] = new_leading(device)
        self.communicator.begin_call(self._leading[device], self.name, broken=broken)
        return self._leading[device]

    def begin_compiled(self, leading: Tensor) -> None:
        """A graph with this reduction, which reads `leading`, is about to run."""
        self.communicator.begin_call(leading, self.name)

    def check(self, sums: Tensor) -> None:
        """Raise RuntimeError where the leading riders say that what was summed up does not belong together."""
        self.communicator.check(sums, self.name)


def _ignore(_: Tensor) -> None:
    """A graph that somebody else traces has nobody to look at the riders."""
