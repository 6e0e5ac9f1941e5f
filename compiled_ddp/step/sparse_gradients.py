"""Sparse gradients of nn.Embedding and nn.EmbeddingBag: averaged at the end of each synchronised backward.

They have no place in a flat buffer, as their sizes differ between ranks and steps. Each is all-reduced as a sparse
tensor, as by c10d's Reducer (torch/csrc/distributed/c10d/reducer.cpp, `mark_variable_ready_sparse`). Before that the
ranks tell each other, in one small collective, which have been used, and which are not sparse: then all raise.

[Note: one sparse sum at a time] Where two sparse all-reduces of a gloo group are under way at once, a process ends now
and then with a corrupted heap ("malloc(): unaligned tcache chunk detected", torch 2.13, also on torch's own groups:
benchmarks/sparse_sums.py). So each is awaited before the next is launched.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from compiled_ddp import torch_private
from compiled_ddp.plan import gradient_dtype
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.step.hooks import GradientHooks


class SparseListener(Protocol):
    """Who is told of these gradients."""

    def gradient_comes(self) -> None:
        """Autograd has accumulated a gradient: begin the synchronised backward that it belongs to, if it has not."""

    def synchronises(self) -> bool:
        """Whether what has just been accumulated is still to be averaged."""


class SparseGradients:
    """The parameters whose gradients are sparse, and which of them this rank has used."""

    def __init__(self, parameters: TrainedParameters, communicator: Communicator, listener: SparseListener) -> None:
        self._parameters, self._communicator, self._listener = parameters, communicator, listener
        self.names, self.tensors = parameters.names, parameters.tensors
        self._used: set[int] = set()  # since the last synchronised backward
        self._averaged = list[int]()  # in the backward that ends, until `run_users`
        self._hooks = GradientHooks(parameters.tensors, self)
        self._hooks.install()

    def gradient_accumulated(self, index: int) -> None:
        self._listener.gradient_comes()
        if self._parameters.tensors[index].grad is not None:  # hooks run for an undefined gradient too
            self._used.add(index)

    def users_hook_comes(self, index: int) -> None:
        self._listener.gradient_comes()

    def synchronises(self) -> bool:
        return self._listener.synchronises()

    def defer_users(self) -> None:
        """Let the users' hooks wait for the averaged gradient."""
        self._hooks.defer_users()

    def refuse_returned(self) -> None:
        """Raise RuntimeError if the running backward is a torch.autograd.grad of one of the parameters."""
        fates = map(torch_private.autograd.fate_of_gradient, self._parameters.tensors)
        returned = [index for index, fate in enumerate(fates) if fate == "returned"]
        if returned:
            named = self._parameters.named(returned)
            raise RuntimeError(
                f"torch.autograd.grad would return this rank's own sparse gradient of {named}. "
                "Use loss.backward() and .grad, or call the forward under no_sync() and average the gradients by hand."
            )

    @torch.no_grad()
    def average(
        self, share: Callable[[], float], *, contributes: bool = True, aborted: bool = False
    ) -> RuntimeError | None:
        """Leave the mean over ranks in .grad of what any rank has used: a collective at the end of every backward.

        `share`, asked for if need be, is the factor of this rank's gradients: the mean is the sum over ranks of these.
        Without `contributes` this rank sends nothing and keeps its .grad. Returns the error that every rank is to
        raise where a rank has a gradient that is not sparse, or its backward was `aborted`; then nothing has been
        averaged.
        """
        tensors = self._parameters.tensors
        if not tensors:
            return None
        used, self._used = (self._used, set()) if contributes else (set(), self._used)
        contributes = contributes and not aborted
        gradients = [parameter.grad if contributes else None for parameter in tensors]
        dense = [gradient is not None and gradient.layout != torch.sparse_coo for gradient in gradients]
        flags = [[index in used for index in range(len(tensors))], dense, [aborted] * len(tensors)]
        shared = torch.tensor(flags, dtype=torch.int32, device="cpu")
        self._communicator.maximum(shared)
        used_anywhere, dense_anywhere, aborted_anywhere = (row.nonzero().flatten().tolist() for row in shared)
        if aborted_anywhere:
            return RuntimeError(
                f"rank {self._communicator.global_rank}: the backward broke off on a rank before its sparse gradients "
                "were averaged. Drop this step on every rank (zero_grad), and look for the exception on the other "
                "ranks."
            )
        if dense_anywhere:
            return RuntimeError(
                f"parameter {self._parameters.named(dense_anywhere)} has sparse=True in its nn.Embedding or "
                "nn.EmbeddingBag, and a gradient that is not sparse on some rank: it is used elsewhere too, or its "
                ".grad was assigned. Pass sparse=False; it was not averaged in this step, on any rank."
            )
        factor = share()
        sums = [_ready_to_send(tensors[index], gradients[index], factor) for index in used_anywhere]
        with self._communicator.explaining("sparse gradients could not be averaged"):
            for total in sums:
                self._communicator.all_reduce(total).wait()  # [Note: one sparse sum at a time]
        if contributes:
            for index, total in zip(used_anywhere, sums, strict=True):
                self._write(tensors[index], total)
            self._averaged = used_anywhere
        return None

    def run_users(self) -> None:
        """The users' hooks on what has been averaged, when everything of the backward has been."""
        averaged, self._averaged = self._averaged, []
        self._hooks.run_users(averaged)

    def _write(self, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = mean
        else:
            parameter.grad.copy_(mean)

    def forget_use(self) -> None:
        self._used = set()

    @property
    def any_used(self) -> bool:
        """Whether this rank has used one of the parameters since the last synchronised backward."""
        return bool(self._used)

    def close(self) -> None:
        self._hooks.remove()


def _ready_to_send(parameter: torch.Tensor, gradient: torch.Tensor | None, factor: float) -> torch.Tensor:
    """`factor` times `gradient`, in new memory, in the form that gloo reduces; an empty tensor for None and for 0."""
    if gradient is not None and factor != 0.0:
        return (gradient * factor).coalesce()
    indices = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
    dtype = gradient_dtype(parameter)
    values = parameter.new_zeros(0, *parameter.shape[1:], dtype=dtype)
    return torch.sparse_coo_tensor(
        indices,
        values,
        parameter.shape,
        dtype=dtype,
        device=parameter.device,
        is_coalesced=True,
        check_invariants=False,
    )
