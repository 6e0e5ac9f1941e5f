"""The flat buffers, one per bucket, kept from step to step, with a view of each gradient's place in them.

[Note: memory that others hold] Nothing that leaves this package is what it keeps: a .grad is an alias, made anew in
each backward, so that whoever points it elsewhere (`.data =`, `set_`, `module.half()`) moves the alias alone. And
before a buffer is filled again it asks whether anyone but the .grad in place still holds its memory; then that memory
is theirs, and the buffer takes other. So it does where torch.multiprocessing has moved it, for another process.
"""

import contextlib
import functools
import operator
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from compiled_ddp import torch_private
from compiled_ddp.plan import Bucket, Section

# ---- the order of what several streams of a GPU do to one tensor; nothing to do on a CPU -----------------------------


def on_stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    """In here `stream` is the current one; nothing changes where there are none."""
    return contextlib.nullcontext() if stream is None else stream


class Writers:
    """The streams on which the parts of a tensor are written, each part by itself, before all of it is read.

    Autograd runs each node on the stream of its forward, and a hook with it, while a collective is ordered behind the
    stream alone that it is launched from. torch's Reducer keeps the AccumulateGrad nodes and so their one stream; here
    users may run parts of a model on streams of their own. Whoever else than its maker uses the tensor is recorded, as
    its memory goes back to its maker's when it is freed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """The current stream has made it."""
        self._tensor, self._device = tensor, tensor.device
        device = tensor.device
        self._maker = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self.have_streams = self._maker is not None
        self._writing = set() if self._maker is None else {self._maker}  # since the tensor was last read
        self._behind_maker = set(self._writing)

    def here(self) -> torch.Stream | None:
        """The current stream, None where there are none."""
        return None if self._maker is None else torch.accelerator.current_stream(self._device)

    def before_write(self) -> None:
        """Note that the current stream writes, behind what has made the tensor."""
        if self._maker is None:
            return
        here = torch.accelerator.current_stream(self._device)
        if here not in self._behind_maker:
            here.wait_stream(self._maker)
            self._record(here)
        self._writing.add(here)

    def before_read(self) -> None:
        """Let the current stream wait for all that has been written."""
        if self._writing:
            here = torch.accelerator.current_stream(self._device)
            for other in self._writing - {here}:
                here.wait_stream(other)
            self._writing.clear()
            self._record(here)

    def after_wait(self) -> None:
        """Where there are streams: the current one has waited for what reduces the tensor, and may read it."""
        self._record(torch.accelerator.current_stream(self._device))

    def _record(self, stream: torch.Stream) -> None:
        """It is behind the maker."""
        if stream not in self._behind_maker:
            self._behind_maker.add(stream)
            self._tensor.record_stream(stream)


# ---- flat buffers ----------------------------------------------------------------------------------------------------


# Gradients up to this size are put into their bucket together, when the last one is there: on a CPU that takes a third
# of the time of one by one. Larger ones at once, so that their memory is free for what follows, as in DDP.
MOST_ELEMENTS_TOGETHER = 2**15
MOST_ELEMENTS_GATHERED = 2**16  # of all that wait for that: their memory comes on top of the bucket's


class FlatBuffer:
    """One bucket's flat buffer."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._take_memory()

    def _take_memory(self) -> None:
        bucket = self.bucket
        self.flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        self.writers = Writers(self.flat)
        self.__dict__.pop("views", None)
        self.riders = None if bucket.riders is None else bucket.riders.view(self.flat)
        self._own_holders = storage_holders(self.flat)
        self._address = self.address

    @functools.cached_property
    def views(self) -> dict[int, torch.Tensor]:
        """Each gradient's place, made when hooks first ask for one: a graph fills the buffer without them."""
        views = {gradient.index: gradient.view(self.flat) for gradient in self.bucket.gradients}
        self._own_holders += len(views)
        return views

    @property
    def address(self) -> int:
        return self.flat.untyped_storage().data_ptr()

    def leave_memory(self) -> None:
        """Take new memory: a collective that nobody can wait for may still write into this."""
        self._take_memory()

    def renew_if_held(self, gradients_in_place: int) -> None:
        """Take new memory if anyone else holds this, or has resized or moved it. [Note: memory that others hold]

        `gradients_in_place` is how many tensors may: each is the .grad of a parameter, and lies in this memory.
        """
        holders = storage_holders(self.flat)
        storage = self.flat.untyped_storage()
        is_as_it_was = storage.data_ptr() == self._address and storage.nbytes() >= self.bucket.nbytes
        if holders > self._own_holders + gradients_in_place or not is_as_it_was:
            self._take_memory()

    def lend(self) -> torch.Tensor:
        """Memory for a graph to pack this bucket into; new memory while anyone else holds a view of it."""
        in_use = storage_holders(self.flat) > self._own_holders
        return torch.empty_like(self.flat) if in_use else self.flat

    def holds(self, index: int, gradient: torch.Tensor | None) -> bool:
        """Whether `gradient` lies just where gradient `index` has its place."""
        view = self.views[index]
        return (
            gradient is not None
            and gradient.layout == torch.strided
            and gradient.data_ptr() == view.data_ptr()
            and gradient.stride() == view.stride()
            and gradient.shape == view.shape
            and gradient.dtype == view.dtype
        )

    def leave_in_place(self, indices: Iterable[int], parameters: Sequence[torch.Tensor]) -> None:
        """Let the .grad of these of `parameters` be where the bucket has it; what is there stays the same object."""
        elsewhere = []
        for index in indices:
            gradient = parameters[index].grad
            if gradient is None or gradient.layout is not torch.strided or not gradient.is_set_to(self.views[index]):
                elsewhere.append(index)
        if elsewhere:
            self.put_in_place(elsewhere, parameters)

    def put_in_place(self, indices: Iterable[int], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As `leave_in_place`, for gradients that are known to be elsewhere; returns what .grad is now.

        Each is a new tensor that shares the memory of the bucket, with a version of its own: what autograd adds to one
        is no sign that it has added to another of the same buffer.
        """
        gradients = []
        for index in indices:
            gradient = parameters[index].grad = self.views[index].data
            gradients.append(gradient)
        return gradients

    @property
    def gradients(self) -> torch.Tensor:
        """The flat buffer without its riders."""
        riders = self.bucket.riders
        return self.flat if riders is None else self.flat.narrow(0, 0, riders.offset_elements)

    def put_all(self, indices: Sequence[int], gradients: list[torch.Tensor], share: float, *, in_place: bool) -> None:
        """Place `share` times each of `gradients`, one or more, which `are_strided`.

        `in_place` tells whether some may be where the buffer has them already.
        """
        if self.writers.have_streams:
            self.writers.before_write()
        views = [*map(self.views.__getitem__, indices)]
        if in_place:
            elsewhere = [pair for pair in zip(views, gradients, strict=True) if not pair[0].is_set_to(pair[1])]
            if elsewhere:
                torch_private.tensors.copy_all([view for view, _ in elsewhere], [gradient for _, gradient in elsewhere])
        else:
            torch_private.tensors.copy_all(views, gradients)
        if share == 1.0:
            return
        if len(views) == len(self.views):
            self.gradients.mul_(share)
        else:
            torch_private.tensors.scale_all(views, share)

    @torch.no_grad()
    def put(self, index: int, gradient: torch.Tensor, share: float) -> None:
        """Place `share` times `gradient`; in place where it is the buffer's own view already."""
        self.writers.before_write()
        view = self.views[index]
        if self.holds(index, gradient):
            if share != 1.0:
                view.mul_(share)
        else:
            torch.mul(gradient, share, out=view)

    @torch.no_grad()
    def put_zeros(self, index: int) -> None:
        self.writers.before_write()
        self.views[index].zero_()


def are_strided(gradients: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all of them are of this dtype, on this device, and neither sparse nor of another layout than strided."""
    return {*map(_layout_of, gradients)} <= {torch.strided} and (
        {*map(_dtype_of, gradients)} <= {dtype} and {*map(_device_of, gradients)} <= {device}
    )


_layout_of, _dtype_of, _device_of = map(operator.attrgetter, ("layout", "dtype", "device"))


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors, and other objects, hold `tensor`'s storage; a number to be compared with an earlier one."""
    storage = tensor.untyped_storage()
    # All of Python shares one object for a storage, which counts once however often it is held.
    holders = torch_private.tensors.storage_holders(torch_private.tensors.address_of_storage(storage))
    return holders + sys.getrefcount(storage)


class SequenceBuffers(dict[int, FlatBuffer]):
    """The flat buffers of a sequence by position, each allocated when asked for, and where each gradient goes."""

    def __init__(self, sections: Sequence[Section], before: "SequenceBuffers | None" = None) -> None:
        """Buckets that are equal to some of `before`'s keep their flat buffers."""
        super().__init__()
        self.sections = sections
        self.buckets = [(place, bucket) for place, section in enumerate(sections) for bucket in section.plan.buckets]
        self.origins = [section.origin for section in sections]
        # The positions of buckets whose gradients are reduced in part elsewhere: see `Section.reduces_again`.
        self.reduced_again = frozenset(p for p, (n, _) in enumerate(self.buckets) if sections[n].reduces_again)
        self.with_riders = [position for position, (_, bucket) in enumerate(self.buckets) if bucket.riders is not None]
        self.rows = [bucket.row for _, bucket in self.buckets]
        self.indices_in = [frozenset(bucket.indices) for _, bucket in self.buckets]
        self.positions_of: dict[int, tuple[int, ...]] = {}  # gradient -> positions in the launch order
        self.positions_in: dict[int, range] = {}  # section -> positions of its buckets
        for position, (section, bucket) in enumerate(self.buckets):
            first = self.positions_in[section].start if section in self.positions_in else position
            self.positions_in[section] = range(first, position + 1)
            alone = (position,)
            for index in bucket.indices:
                self.positions_of[index] = self.positions_of[index] + alone if index in self.positions_of else alone
        self.shared = frozenset(index for index, positions in self.positions_of.items() if len(positions) > 1)
        self.sole_positions = {i: positions[0] for i, positions in self.positions_of.items() if len(positions) == 1}
        kept = {} if before is None else {before.buckets[p][1]: buffer for p, buffer in before.items()}
        for position, (_, bucket) in enumerate(self.buckets):
            if bucket in kept:
                self[position] = kept.pop(bucket)

    def __missing__(self, position: int) -> FlatBuffer:
        buffer = self[position] = FlatBuffer(self.buckets[position][1])
        return buffer

    def renew_held(self, gradients: Iterable[torch.Tensor]) -> None:
        """Before a backward: new memory for the buffers that anyone but `gradients`, each a .grad, holds."""
        in_place = Counter(gradient.untyped_storage().data_ptr() for gradient in gradients if _has_memory(gradient))
        for buffer in self.values():
            buffer.renew_if_held(in_place[buffer.address] if in_place else 0)

    def renew_all_held(self) -> None:
        """As `renew_held`, where there is no .grad."""
        for buffer in self.values():
            buffer.renew_if_held(0)

    def lend(self, positions: Iterable[int], *, are_renewed: bool = False) -> dict[int, torch.Tensor]:
        """Memory for a graph to pack these buckets into.

        `are_renewed` tells that nobody can have come to hold any since `renew_all_held`.
        """
        lent = {}
        for position in positions:
            _, bucket = self.buckets[position]
            if bucket.kept:
                lent[position] = self[position].flat if are_renewed else self[position].lend()
            else:
                lent[position] = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        return lent

    def let_go(self) -> None:
        """Leave all flat buffers to whoever holds views of them; what is filled next gets new ones."""
        self.clear()

    def contain(self, gradient: torch.Tensor) -> bool:
        """Whether `gradient` lies in one of the flat buffers."""
        return _has_memory(gradient) and any(
            buffer.address == gradient.untyped_storage().data_ptr() for buffer in self.values()
        )

    def holds(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether `gradient` is where a reduction by hooks leaves the .grad of parameter `index`."""
        allocated = [p for p in self.positions_of.get(index, ()) if p in self]
        return bool(allocated) and self[allocated[-1]].holds(index, gradient)


def _has_memory(gradient: torch.Tensor) -> bool:
    return gradient.layout == torch.strided
