"""A training step as functions of tensors, which `compile_step` compiles: an update, and a micro-batch before one.

What a graph has fixed is `Layout`: which parameters are trained, their groups and the groups' switches.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compiled_ddp import torch_private
from compiled_ddp.functional.reduction import Options
from compiled_ddp.functional.session import current_session
from compiled_ddp.functional.transforms import GradientFunction
from compiled_ddp.functional.updates import Kind, Vector, rule_of, why_outside

Loss = Callable[..., Any]
Tensors = dict[str, Tensor]

USED = "which parameters are used"  # a row among the gradients, with a number for each; see `StepGraph._summed`


@dataclass(frozen=True)
class Layout:
    """The names of the trained parameters, each with its group, and the kinds of the groups.

    `outside` says why the update is the optimizer's own step(), outside of the graph; it is empty, and there are
    `kinds`, where the graph has the update.
    """

    names: tuple[str, ...]
    groups: tuple[int, ...]
    kinds: tuple[Kind, ...]
    outside: str

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> "Layout":
        """Of the model's `parameters` as they are now. Raises ValueError where the optimizer has others."""
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        names, groups = list[str](), list[int]()
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if not parameter.requires_grad:
                    continue
                if id(parameter) not in name_of:
                    raise ValueError(
                        f"parameter {place} of group {number} of the optimizer, of shape {tuple(parameter.shape)}, is "
                        "none of the model's: make the module that it belongs to a part of the model."
                    )
                names.append(name_of[id(parameter)])
                groups.append(number)
        if not names:
            raise ValueError("the optimizer has no parameter that is trained: check requires_grad.")
        outside = why_outside(optimizer)
        kinds = () if outside else tuple(map(rule_of(optimizer).kind, optimizer.param_groups))
        return cls(tuple(names), tuple(groups), kinds, outside)

    def trained(self, parameters: Mapping[str, nn.Parameter]) -> list[tuple[str, int, nn.Parameter]]:
        """Name, group and parameter of each."""
        return [(name, group, parameters[name]) for name, group in zip(self.names, self.groups, strict=True)]


class WithLoss(nn.Module):
    """The model and its loss as one module, whose tensors `functional_call` replaces."""

    def __init__(self, model: nn.Module, loss_fn: Loss | None, *, has_aux: bool) -> None:
        super().__init__()
        self.model, self.loss_fn, self.has_aux = model, loss_fn or _call, has_aux

    def forward(self, *batch: Any, **named: Any) -> Any:
        return self.loss_fn(self.model, *batch, **named)


def _call(model: nn.Module, *batch: Any, **named: Any) -> Any:
    return model(*batch, **named)


class Outcome(NamedTuple):
    """What comes of an update besides new tensors."""

    value: Tensor  # this rank's loss
    aux: Any
    unused: tuple[str, ...]  # parameters that this rank's loss does not come to
    used: Tensor  # for each parameter above 0 where some rank's loss comes to it
    finite: Tensor | None  # whether all gradients are; None without a scale
    gradients: Tensors  # reduced, unscaled and clipped, for an update outside
    is_sound: Tensor | None = None  # whether ranks have reduced what they meant to, for that; None for one rank

    def applies(self) -> Tensor | None:
        """For each parameter whether it is to change; None where all are."""
        if self.finite is None:
            return self.used > 0 if self.unused else None
        return (self.used > 0) & self.finite

    def updated(self, layout: Layout) -> set[str]:
        """The parameters that are to change."""
        applies = self.applies()
        if applies is None:
            return {*layout.names}
        return {name for name, is_updated in zip(layout.names, applies.tolist(), strict=True) if is_updated}


class StepGraph:
    """The functions that are compiled, for a layout.

    Arguments of theirs: `held` are sums of the gradients of earlier micro-batches, none where each batch is an update;
    `used` zeros, one for each trained parameter, and `mark` this rank's number, from 1 on; `share` what a micro-batch
    counts in the mean of all of them, and `scale` that of a GradScaler, either None without one.
    """

    def __init__(
        self,
        whole: WithLoss,
        optimizer: torch.optim.Optimizer,
        process_group: dist.ProcessGroup | None,
        clip_grad_norm: float | None,
        bucket_cap_mb: float | None,
    ) -> None:
        self.has_aux, self._optimizer, self._clip_grad_norm = whole.has_aux, optimizer, clip_grad_norm
        options = Options(process_group, "mean", bucket_cap_mb)
        self._gradient = GradientFunction(_loss_of(whole), 0, True, options, "grad_and_value", before_sum=_summed)

    def add_of(self, layout: Layout) -> Callable[..., Any]:
        """A function that adds a micro-batch's gradients to those that are held, on this rank alone."""
        gradient = self._gradient

        def add(
            params: Tensors,
            buffers: Tensors,
            held: Tensors,
            others: Tensors,
            used: Tensor,
            mark: Tensor,
            scale: Tensor | None,
            batch: Any,
            named: Any,
        ) -> Any:
            given = {**params, USED: used}, others, buffers, held, mark, None, scale, batch, named
            held, (value, aux, buffers, _) = gradient.on_this_rank(*given)
            return buffers, held, value, aux

        return add

    def reduce_of(self, layout: Layout) -> Callable[..., Any]:
        """A function that returns reduced gradients, for an update outside."""
        reduced_of = self._reduced_of()

        def reduce(params: Tensors, buffers: Tensors, held: Tensors, *given: Any) -> Any:
            outcome, buffers = reduced_of(params, buffers, held, *given)
            session = current_session()
            is_sound = None if session is None else session.are_sound()
            return buffers, _zeros(held), outcome._replace(is_sound=is_sound)

        return reduce

    def update_of(self, layout: Layout) -> Callable[..., Any]:
        """A function that returns what becomes of the first five that it is given, in their order."""
        rule, reduced_of = rule_of(self._optimizer), self._reduced_of()

        def update(
            params: Tensors,
            buffers: Tensors,
            state: dict[str, Tensors],
            held: Tensors,
            steps: Tensor,
            numbers: Sequence[Tensor],
            *given: Any,
        ) -> Any:
            outcome, buffers = reduced_of(params, buffers, held, *given)
            applies = outcome.applies()
            new, new_state = dict[str, Tensor](), dict[str, Tensors]()
            for place, (name, group) in enumerate(zip(layout.names, layout.groups, strict=True)):
                kind = layout.kinds[group]
                of_group = Vector(kind, numbers[group])
                # In 16 bits a learning rate or a beta would be another number.
                own = {each: _widened(value) for each, value in state[name].items()}
                tensors = _widened(params[name]), _widened(outcome.gradients[name]), own
                new[name], new_state[name] = rule.update(*tensors, of_group, kind, steps[place] + 1)
                if applies is not None:
                    new[name] = torch.where(applies[place], new[name], params[name])
                    new_state[name] = {
                        each: torch.where(applies[place], value, own[each]) for each, value in new_state[name].items()
                    }
            counted = steps + (1 if applies is None else applies.to(steps))
            return new, buffers, new_state, _zeros(held), counted, outcome._replace(gradients={})

        return update

    def _reduced_of(self) -> Callable[..., tuple[Outcome, Tensors]]:
        gradient, most = self._gradient, self._clip_grad_norm

        def reduced(
            params: Tensors,
            buffers: Tensors,
            held: Tensors,
            others: Tensors,
            used: Tensor,
            mark: Tensor,
            share: Tensor | None,
            scale: Tensor | None,
            batch: Any,
            named: Any,
        ) -> tuple[Outcome, Tensors]:
            given = {**params, USED: used}, others, buffers, held, mark, share, scale, batch, named
            gradients, (_, (value, aux, buffers, unused)) = gradient(*given)
            used, finite = gradients.pop(USED), None
            if scale is not None:
                finite = torch.stack([each.isfinite().all().to(used.device) for each in gradients.values()]).all()
                inverse = scale.double().reciprocal()
                gradients = {name: each * inverse.to(each.device, each.dtype) for name, each in gradients.items()}
            if most is not None:
                gradients = _clipped(gradients, most)
            return Outcome(value, aux, unused, used, finite, gradients), buffers

        return reduced


def _loss_of(whole: WithLoss) -> Loss:
    """The loss as a function of tensors, with all that comes of a batch besides it."""
    users_loss = whole.loss_fn  # so that what it closes over is followed, as of any function of a compiled step

    def loss(
        params: Tensors,
        others: Tensors,
        buffers: Tensors,
        held: Tensors,
        mark: Tensor,
        share: Tensor | None,
        scale: Tensor | None,
        batch: Any,
        named: Any,
    ) -> Any:
        own = {name: each for name, each in params.items() if name != USED}
        if batch is None:  # what is held is all there is
            nothing = params[USED].sum()
            return nothing, (nothing, None, buffers, tuple(own))
        # A gradient function may not write into what it is given.
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        tensors = {f"model.{name}": each for name, each in {**own, **others, **copies}.items()}
        result = torch.func.functional_call(whole, tensors, batch, named)
        value, aux = result if whole.has_aux else (result, None)
        assert users_loss is whole.loss_fn
        is_loss = isinstance(value, Tensor)  # torch.func refuses anything else
        unused = tuple(torch_private.autograd.not_reached(value, own)) if is_loss else ()
        # Those that forward has written into, or replaced by others: `functional_call` puts these into `tensors`.
        written = {name: tensors[f"model.{name}"].detach() for name in buffers}
        return value if scale is None else value * scale, (value, aux, written, unused)

    loss.__qualname__ = f"loss of {type(whole.model).__name__}"
    return loss


def _summed(
    gradients: Tensors,
    found: tuple[Tensor, Any, Tensors, tuple[str, ...]],
    params: Tensors,
    others: Tensors,
    buffers: Tensors,
    held: Tensors,
    mark: Tensor,
    share: Tensor | None,
    *_: Any,
) -> Tensors:
    """The gradients of all micro-batches of an update so far, and which parameters have one.

    A parameter without a gradient on any rank is left as it is, as by torch.optim. So each rank sends its mark for
    those that it has used: other numbers than other ranks, as the proof asks for.
    """
    unused = found[-1]
    uses = {name: name not in unused for name in gradients if name != USED}
    runs = [(used, len([*run])) for used, run in itertools.groupby(uses.values())]
    gradients[USED] = torch.cat([mark.expand(length) if used else mark.new_zeros(length) for used, length in runs])
    if held:
        latest = torch.maximum(held[USED], gradients.pop(USED))
        gradients = {name: held[name] + gradient for name, gradient in gradients.items()} | {USED: latest}
    if share is not None:
        gradients = {
            name: gradient if name == USED else gradient * share.to(gradient.device, gradient.dtype)
            for name, gradient in gradients.items()
        }
    return gradients


def _zeros(held: Tensors) -> Tensors:
    return {name: torch.zeros_like(each) for name, each in held.items()}


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _clipped(gradients: Tensors, most: float) -> Tensors:
    """As torch.nn.utils.clip_grad_norm_ leaves them."""
    norms = [torch.linalg.vector_norm(_widened(each)) for each in gradients.values()]
    norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device, torch.float64) for each in norms]))
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    return {name: each * factor.to(each.device, each.dtype) for name, each in gradients.items()}
