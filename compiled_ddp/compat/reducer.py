"""apex's Reducer: averaging gradients when the user says so, beside or without a wrapper."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.keywords import suggests_keywords
from compiled_ddp.plan import BucketPlan, GradientSpec, Section
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.ranks.agreement import Description, agree_on_description
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.step.buffers import SequenceBuffers
from compiled_ddp.users_code import warn_user


class Reducer:
    """Averages gradients over ranks in each `reduce()`, in place.

        reducer = Reducer(model)  # or Reducer(list_of_gradients)
        loss.backward()
        reducer.reduce()  # every rank
        optimizer.step()

    Args:
        module_or_grads_list: a model, whose parameters are overwritten by rank 0's here, and whose .grad are averaged;
            or tensors to average, in lists and tuples of any depth: these tensors, and not the ones that a backward
            puts in their place after zero_grad().
        process_group: the ranks to average over; None is all of them.

    Raises:
        ValueError: there is no tensor, as in [p.grad for p in model.parameters()] before the first backward.
        RuntimeError: torch.distributed is not initialised, or ranks differ in what there is to average.
    """

    @suggests_keywords
    def __init__(
        self, module_or_grads_list: nn.Module | Iterable[object], *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads: list[torch.Tensor] = [] if self.module is not None else list(_tensors_in(module_or_grads_list))
        parameters = {} if self.module is None else dict(self.module.named_parameters())
        described: dict[str, torch.Tensor] = {f"tensor {place}": tensor for place, tensor in enumerate(self.grads)}
        described.update(parameters)
        ranks = RankGroup(process_group)
        failure = "there is no Reducer"
        agree_on_description(ranks, lambda: self._check_and_describe(described), failure=failure)
        self._communicator = Communicator(ranks)
        self._calls = 0
        self._reduced_versions: list[int] | None = None  # of `grads`, after the latest reduce()
        self._has_warned = False
        with torch.no_grad():
            self._communicator.broadcast([parameter.detach() for parameter in parameters.values()])

    @torch_private.dynamo.untraced
    @torch.no_grad()
    def reduce(self) -> None:
        """Average over ranks. A collective: every rank calls it equally often.

        A parameter without a .grad is skipped, and must lack it on every rank.

        Warns once where none of a list's tensors has changed since the last call: they are not the gradients any more.

        Raises RuntimeError, on every rank and before anything is averaged, where ranks differ in which parameters have
        a gradient, or in the shape or dtype of one; and where one is sparse.
        """
        self._calls += 1
        self._warn_if_stale()
        gradients = self._gradients()
        self._agree(gradients)
        for name, gradient in gradients.items():
            if gradient.layout != torch.strided:
                raise RuntimeError(f"the gradient of {name} is {gradient.layout}: only dense ones can be averaged.")
        specs = [_contiguous(index, gradient) for index, gradient in enumerate(gradients.values())]
        plan = assign_buckets(specs, capacities_bytes=[math.inf], world_size=self._communicator.world_size)
        self._average(plan, list(gradients.values()))
        self._reduced_versions = self._versions()

    def _check_and_describe(self, described: Mapping[str, torch.Tensor]) -> Description:
        if self.module is None and not self.grads:
            raise ValueError(
                "Reducer got no tensor to average, as where .grad is None before the first backward: pass the model, "
                "Reducer(model), whose gradients are looked up in each reduce(), or tensors that exist by now."
            )
        return {"reducer": ["Reducer"], **_describe(described)}

    def _versions(self) -> list[int]:
        """Of `grads`: each grows where the tensor is written to."""
        return [torch_private.tensors.version_if_any(tensor) for tensor in self.grads]

    def _warn_if_stale(self) -> None:
        versions = self._versions()
        counted = bool(versions) and -1 not in versions  # a tensor of inference mode counts no changes
        if self._has_warned or not counted or versions != self._reduced_versions:
            return
        self._has_warned = True
        warn_user(
            f"none of the {len(versions)} tensors that the Reducer was given has been written to since the last "
            "reduce(), which averages them once more: zero_grad() sets .grad to None, and backward puts other tensors "
            "there. Pass the model, Reducer(model), or zero_grad(set_to_none=False). (What is written through .data "
            "is not noticed here.)"
        )

    def _average(self, plan: BucketPlan, gradients: list[torch.Tensor]) -> None:
        buffers = SequenceBuffers([Section(plan, "hooks")])
        filled = [(buffers[position], bucket) for position, (_, bucket) in enumerate(buffers.buckets)]
        works = []
        for buffer, bucket in filled:
            if bucket.gradients:
                own = [gradients[index] for index in bucket.indices]
                buffer.put_all(bucket.indices, own, plan.share, in_place=False)
                works.append(self._communicator.all_reduce(buffer.flat))
        with self._communicator.explaining("Reducer.reduce() failed"):
            for work in works:
                work.wait()
        for buffer, bucket in filled:
            for index in bucket.indices:
                gradients[index].copy_(buffer.views[index])

    def _gradients(self) -> dict[str, torch.Tensor]:
        """What there is to average now on this rank, by name."""
        if self.module is None:
            return {f"tensor {place}": tensor for place, tensor in enumerate(self.grads)}
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def _agree(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Raise RuntimeError on every rank, with what differs, unless `gradients` are of the same kind on all.

        One small all-reduce; the store, which is slower, is asked only where they are not.
        """
        description: Description = {f"the gradient of {name}": found for name, found in _describe(gradients).items()}
        text = json.dumps(description).encode()
        fingerprint = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
        device = next((tensor.device for tensor in gradients.values()), self._device)
        shared = torch.tensor([fingerprint, ~fingerprint], dtype=torch.int64, device=device)
        self._communicator.maximum(shared)
        most, most_inverted = shared.tolist()
        if most != ~most_inverted:
            agree_on_description(
                self._communicator.ranks,
                lambda: description,
                occasion=f"reduce/{self._calls}",
                purpose="to compare the gradients of all ranks",
                failure=(
                    "the ranks have different gradients, and nothing was averaged (a rank that did not use a parameter "
                    "may set its .grad to zeros)"
                ),
            )

    @property
    def _device(self) -> torch.device:
        parameters = () if self.module is None else self.module.parameters()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    def close(self) -> None:
        """Release the communicator. A collective; `reduce()` cannot be called afterwards."""
        self._communicator.close()


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for part in value:
            yield from _tensors_in(part)


def _contiguous(index: int, gradient: torch.Tensor) -> GradientSpec:
    """Its place in a flat buffer; ranks may hold it in other strides."""
    stride = torch.empty(gradient.shape, dtype=gradient.dtype, device="meta").stride()
    return GradientSpec(index, tuple(gradient.shape), stride, gradient.dtype, gradient.device)


def _describe(tensors: Mapping[str, torch.Tensor]) -> Description:
    return {
        name: [f"shape {tuple(tensor.shape)}", f"dtype {tensor.dtype}", f"layout {tensor.layout}"]
        for name, tensor in tensors.items()
    }
