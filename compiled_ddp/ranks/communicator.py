"""The wrapper's own communicator: one process group, one store, one timeout."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.comm_hooks import Ranks
from compiled_ddp.ranks import group_name
from compiled_ddp.ranks.progress import RankProgress, frames_of_error
from compiled_ddp.ranks.rank_group import RankGroup

# The groups of communicators that were collected as garbage. A group ends when what it has launched has ended on other
# ranks too, which a destructor must not wait for: the next communicator to be made does.
_abandoned: "list[weakref.ref[dist.ProcessGroup]]" = []


class Communicator:
    """[Note: one communicator per wrapper]

    The order of collectives on it depends on nothing but its wrapper: neither on other wrappers, nor on collectives
    of the model or the user. On a shared group, two ranks that swap two all-reduces of equal size both get wrong
    sums and no error.
    """

    def __init__(
        self,
        ranks: RankGroup,
        *,
        occasion: str = "",
        is_models: bool = False,
        remedy: str = "unwrap() and wrap again on every rank",
    ) -> None:
        """`occasion` is another one for each that these ranks make. With `is_models` it is for the model's collectives.

        These count as those of the model itself, wherever a wrapper asks whether its model communicates. `remedy` is
        what helps in this process once a wait has failed.
        """
        _destroy_abandoned()
        self.ranks = ranks
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.closed, self._remedy = False, remedy
        world = dist.group.WORLD
        assert world is not None
        group, self.group_name = ranks.new_process_group(occasion, is_models=is_models)
        # torch.distributed owns the groups: held here, their threads would live on after they are destroyed.
        self._group = weakref.ref(group)
        self._at_end = weakref.finalize(self, _abandoned.append, self._group)
        self._at_end.atexit = False
        self.progress = RankProgress(group)
        self._hangs = ranks.hang_reporter(group, self.progress, occasion)
        self.explain_waits_of(ranks)

    def explain_waits_of(self, ranks: RankGroup) -> None:
        """Waits of these ranks through the store are explained as those of collectives are."""
        ranks.explain_waits(self.progress.note_wait, self.failure, lambda: self._hangs.knows_why)

    @property
    def global_rank(self) -> int:
        return self.ranks.global_rank

    @property
    def group(self) -> dist.ProcessGroup:
        """Raises RuntimeError once it has been destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError(
                f"the process group of {self.ranks.name} has been destroyed: make the wrapper anew after "
                "torch.distributed.init_process_group()."
            )
        return group

    def for_hooks(self) -> Ranks:
        """The ranks as a communication hook sees them."""
        return Ranks(self.world_size, self.group_name, self.rank if torch_private.groups.is_gloo(self.group) else None)

    def all_reduce(self, flat_buffer: torch.Tensor) -> dist.Work:
        """Launch the sum over ranks of `flat_buffer`, in place."""
        return torch_private.groups.start_sum(self.group, flat_buffer)

    def maximum(self, values: torch.Tensor) -> None:
        """Overwrite `values` with their maximum over ranks."""
        self.refuse_if_failed()
        with self.explaining("a maximum over ranks failed"):
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)

    def broadcast(self, tensors: Sequence[torch.Tensor], *, source: int = 0) -> None:
        """Overwrite `tensors` with those of the group's rank `source`."""
        if tensors and self.world_size > 1:
            self.refuse_if_failed()
            self.progress.broadcast_began(f"the parameters and buffers of {self._format_rank(source)}")
            try:  # `explaining` takes six calls, in each step of a model with buffers
                torch_private.groups.broadcast_coalesced(self.group, list(tensors), source=source)
            except RuntimeError as error:
                raise self._explained(error, "the broadcast of parameters and buffers failed") from error
            self.progress.note_wait("")

    def _format_rank(self, rank: int) -> str:
        return f"rank {self.ranks.ranks[rank]}" if rank else "the group's first rank"

    def failure(self, error: Exception, what: str | None = None) -> RuntimeError:
        """`error`, of a wait or a launch, in the words of `what`, with a report of where every rank stands."""
        report = self._hangs.report(frames_of_error(error))
        if report.is_reason:
            return RuntimeError(f"rank {self.global_rank}: {report.text}")
        message = f"{what}: {error}" if what else str(error)
        return RuntimeError(f"{message}\n{report.text}")

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Raise a RuntimeError in here, of a collective, again as `failure`."""
        try:
            yield
        except RuntimeError as error:
            raise self._explained(error, what) from error

    def _explained(self, error: RuntimeError, what: str) -> RuntimeError:
        return self.failure(error, f"rank {self.global_rank}: {what}")

    @property
    def waits_for_this_rank(self) -> bool:
        """Whether some rank has launched more here than this one has. A question to all, that takes a second or two.

        True as well where launches cannot be counted.
        """
        return not self.progress.counts_launches or self._hangs.most_launches() > self.progress.launches

    def give_up(self, why: str) -> RuntimeError:
        """Launch nothing from here on, as other ranks may launch what this one does not; returns an error to raise."""
        self._hangs.note_failure(why)
        return self._refusal()

    @property
    def has_failed(self) -> bool:
        """Whether a wait has."""
        return bool(self._hangs.failed_before)

    def refuse_if_failed(self) -> None:
        """Raise RuntimeError once a wait has failed: what other ranks have sent for it may meet a later collective."""
        if self._hangs.failed_before:
            raise self._refusal()

    def _refusal(self) -> RuntimeError:
        return RuntimeError(
            f"rank {self.global_rank}: {self._hangs.failed_before} What was sent for it may still arrive, "
            f"and be taken for a later step's: load a checkpoint in new processes, or {self._remedy}."
        )

    def close(self) -> None:
        """Destroy the communicator; a no-op the second time, and once torch.distributed has been shut down."""
        self._hangs.close()
        self._at_end.detach()
        _end(self._group())
        self.closed = True

    def abandon(self) -> None:
        """Leave the communicator to be destroyed when the next one is made: other ranks need not end it at once."""
        self._hangs.close()
        self._at_end()
        self.closed = True


def _end(group: dist.ProcessGroup | None, *, only_gloo: bool = False) -> None:
    if group is None:
        return
    group_name.forget(group)
    is_open = dist.is_initialized() and torch_private.groups.is_registered(group)
    if is_open and (not only_gloo or torch_private.groups.is_gloo(group)):
        dist.destroy_process_group(group)


def _destroy_abandoned() -> None:
    while _abandoned:
        _end(_abandoned.pop()(), only_gloo=True)  # elsewhere it may be a collective
