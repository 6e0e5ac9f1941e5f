"""Comparing a wrapper's gradients with plain autograd averaged by hand, on the user's own model and batches."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.compiled import compile_ddp
from compiled_ddp.keywords import suggests_keywords
from compiled_ddp.model.managed import ManagedState, is_wrapper
from compiled_ddp.plan import gradient_dtype
from compiled_ddp.ranks.agreement import Description, agree_on_description
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.tools.command_line.batches import fresh_copy
from compiled_ddp.users_model import call_model, loss_in
from compiled_ddp.wrapper import DataParallelWrapper

# A gradient that is zero except for rounding (of a bias in front of a normalisation) is compared with this part of the
# model's largest gradient, not with its own noise.
SMALLEST_SCALE = 1e-3

# What is right to rounding: in float32, and in units of the precision of gradients that have less.
TOLERANCE, TOLERATED_ROUNDINGS = 1e-4, 4

NOT_SEEN = "All ranks had the same gradients: that they are averaged was not seen; give each rank its own batch."

Loss = Callable[[Any, Any], torch.Tensor]  # (output, inputs) -> loss


@dataclass(frozen=True)
class ParameterDifference:
    """The largest difference between one parameter's gradient and plain autograd's mean, over all ranks and steps."""

    name: str
    shape: tuple[int, ...]
    absolute: float  # inf where one of the two had no gradient, nan where one of them was not finite
    relative: float  # to the largest element of the mean by hand, or `SMALLEST_SCALE` of the model's largest
    step: int  # counted from 0, in which it was
    tolerance: float = TOLERANCE  # of `relative`, by the gradient's dtype
    ranks_differed: bool = True  # whether some rank's own gradient was beyond it, in any step


@dataclass(frozen=True)
class ParityReport:
    """The differences that `verify_parity` found, the same on every rank. `print` it for a table."""

    differences: tuple[ParameterDifference, ...]  # in the order of the model's parameters
    steps: int
    world_size: int

    @property
    def largest(self) -> float:
        """The largest relative difference; nan if a gradient was not finite."""
        relative = [difference.relative for difference in self.differences]
        return math.nan if any(map(math.isnan, relative)) else max(relative)

    @property
    def saw_averaging(self) -> bool:
        """Whether a wrapper that averages nothing would have shown: no where every rank had the same batch."""
        return self.world_size == 1 or any(difference.ranks_differed for difference in self.differences)

    def within(self, tolerance: float | None = None) -> bool:
        """True if every relative difference is at most `tolerance`: what a test asserts.

        None is 1e-4, or 4 times the precision of a gradient's dtype where that is more: 0.03 in bfloat16.
        """
        if tolerance is None:
            return all(difference.relative <= difference.tolerance for difference in self.differences)
        return self.largest <= tolerance

    def __str__(self) -> str:
        headers = ("parameter", "shape", "largest absolute", "relative", "in step")
        rows = [(d.name, list(d.shape), f"{d.absolute:.2e}", f"{d.relative:.2e}", d.step) for d in self.differences]
        table = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True, colalign=("left",) * 4)
        over = f"steps: {self.steps}, ranks: {self.world_size}"
        not_seen = "" if self.saw_averaging else f"\n{NOT_SEEN}"
        return f"{table}\nLargest relative difference {self.largest:.2e} ({over}).{not_seen}"


@suggests_keywords
@torch_private.dynamo.untraced
def verify_parity(
    model: nn.Module,
    batch: Any,
    steps: int = 3,
    *,
    loss: Loss | None = None,
    wrap: Callable[[nn.Module], DataParallelWrapper] = compile_ddp,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> ParityReport:
    """Train a copy of `model` under a wrapper and compare its gradients with plain autograd, averaged over ranks.

    Both start every step from the same parameters, buffers and random state, with a copy of the batch each; by hand
    means a backward of another copy on every rank, and one all-reduce in float64 for each parameter over the wrapper's
    `process_group`. A collective: every rank of the default process group calls it. `model` itself is left as it is.
    Ranks need batches of their own: equal gradients do not show whether they were averaged, and the report says so.

    Dropout under Inductor draws other random numbers than eager code: verify in `eval()`, or pass
    `wrap=functools.partial(compile_ddp, options={"fallback_random": True})`.

    Args:
        model: the model; the parameters and buffers of rank 0 are used on every rank.
        batch: this rank's inputs, or a function of the step (from 0) that returns them. A tuple or list is passed as
            positional arguments, a mapping as named ones, anything else as the only argument.
        steps: how many steps to compare.
        loss: makes the loss of the model's output and the inputs. None takes the output where it is a tensor of one
            element, or its `loss` (an attribute or a key).
        wrap: makes the wrapper; for example `EagerDDP`, or `functools.partial(compile_ddp, backend="aot_eager")`.
        optimizer: makes the optimizer that moves the parameters between steps; None is SGD with lr=1e-3.

    Returns:
        The largest difference of each parameter's gradient over all ranks and steps.

    Raises:
        RuntimeError: torch.distributed is not initialised; what happened on another rank; what wrapper and backward
            raise.
        TypeError: an argument is none of these, or there is no loss; the message says what to pass.
        ValueError: `steps` is not positive, or a wrapper is inside the model. As all of these that are about an
            argument, a batch or the model: on one rank it is an error on every rank.
    """
    ranks = RankGroup(None)
    model = _agree_on_arguments(ranks, model, steps, loss, wrap, optimizer)
    wrapper = wrap(model)
    try:
        return _compare(ranks, wrapper, batch, steps, loss or _loss_in, optimizer)
    finally:
        if isinstance(wrapper, DataParallelWrapper):
            wrapper.unwrap()


_PURPOSE, _FAILURE = "to verify parity with it", "parity was not verified"


def _agree_on_arguments(ranks: RankGroup, model: nn.Module, steps: int, *functions: object) -> nn.Module:
    """A copy of the model, if no rank refuses what it was given: `loss`, `wrap` and `optimizer` come last."""
    copied: nn.Module

    def check() -> Description:
        nonlocal copied
        _check_arguments(model, steps, *functions)
        copied = _copy_of(model)
        return {"steps": [steps]}

    agree_on_description(ranks, check, occasion="arguments", purpose=_PURPOSE, failure=_FAILURE)
    return copied


def _copy_of(model: nn.Module) -> nn.Module:
    """With the grad_dtype of each parameter, which a deepcopy leaves out."""
    copied = copy.deepcopy(model)
    for parameter, of_model in zip(copied.parameters(), model.parameters(), strict=True):
        parameter.grad_dtype = of_model.grad_dtype
    return copied


def _check_arguments(model: object, steps: object, loss: object, wrap: object, optimizer: object) -> None:
    """Raise TypeError or ValueError, with what to pass, for what `verify_parity` cannot take."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"verify_parity takes a torch.nn.Module, found {type(model).__name__}.")
    wrapped = next((name for name, part in model.named_modules() if is_wrapper(part)), None)
    if wrapped is not None:
        where = f"has a wrapper inside, {wrapped}" if wrapped else f"is wrapped, by {type(model).__name__}"
        raise ValueError(f"the model {where}: verify models, or parts of them, before wrapping them.")
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps must be a number of steps, found {steps!r}.")
    if steps < 1:
        raise ValueError(f"steps must be positive, found {steps}.")
    takes = {"loss": "(output, inputs)", "wrap": "(model)", "optimizer": "(parameters)"}
    for name, given in (("loss", loss), ("wrap", wrap), ("optimizer", optimizer)):
        if not callable(given) and (given is not None or name == "wrap"):
            raise TypeError(f"{name} must be a function of {takes[name]}, found {given!r}.")


def _compare(
    ranks: RankGroup,
    wrapper: DataParallelWrapper,
    batch: Any,
    steps: int,
    loss: Loss,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
) -> ParityReport:
    reference: nn.Module
    mover: torch.optim.Optimizer
    for_wrapper: Any = None

    def set_up() -> Description:
        nonlocal reference, mover
        given: object = wrapper
        if not isinstance(given, DataParallelWrapper):
            raise TypeError(
                f"wrap must return a wrapper, as compile_ddp and EagerDDP do, found {type(given).__name__}."
            )
        reference = _copy_of(wrapper.module)
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
        mover = make(parameter for parameter in wrapper.parameters() if parameter.requires_grad)
        if not callable(getattr(mover, "step", None)):
            raise TypeError(f"optimizer must return one with a step(), found {type(mover).__name__}.")
        return {}

    def backward_of_reference() -> Description:
        """What a batch or a model may make fail on one rank alone: before the others wait in a collective."""
        nonlocal for_wrapper
        given = batch(step) if callable(batch) else batch
        inputs, for_wrapper = fresh_copy(given), fresh_copy(given)
        reference.zero_grad(set_to_none=True)
        with torch.random.fork_rng():  # so that the wrapper draws the same numbers
            loss(call_model(reference, inputs), inputs).backward()
        return {}

    agree_on_description(ranks, set_up, occasion="set-up", purpose=_PURPOSE, failure=_FAILURE)
    found = []
    for step in range(steps):
        _synchronise(reference, wrapper)
        agree_on_description(ranks, backward_of_reference, occasion=f"step {step}", purpose=_PURPOSE, failure=_FAILURE)
        expected = _reduced_by_hand(reference, wrapper)
        wrapper.zero_grad()
        loss(call_model(wrapper, for_wrapper), for_wrapper).backward()
        found.append(_differences(wrapper.module, expected, step))
        mover.step()
    differences = [_largest(of_parameter) for of_parameter in zip(*found, strict=True)]
    return ParityReport(tuple(differences), steps, dist.get_world_size())


def _loss_in(output: Any, _: Any) -> torch.Tensor:
    """The loss that a model returns."""
    try:
        return loss_in(output)
    except TypeError as error:
        raise TypeError(f"{error}: pass loss=, a function of the output and the inputs.") from None


@torch.no_grad()
def _synchronise(reference: nn.Module, wrapper: DataParallelWrapper) -> None:
    """Give `reference` the state that the wrapper's next forward will have: rank 0's buffers where that sends them."""
    reference.load_state_dict(wrapper.module.state_dict())
    for buffer, own in zip(reference.buffers(), wrapper.module.buffers(), strict=True):
        buffer.copy_(own)  # also those that are not part of the state
    for buffer in ManagedState(reference).buffers().values() if wrapper.broadcast_buffers else ():
        dist.broadcast(buffer, group=wrapper.process_group, group_src=0)


@dataclass(frozen=True)
class _ByHand:
    """What is to be found of one parameter."""

    reduced: torch.Tensor | None  # the mean or sum over ranks, in float64; None where no rank has a gradient
    size: float  # its largest element
    own_is_apart: float  # by the largest element, were this rank's own gradient taken for that of all


def _reduced_by_hand(reference: nn.Module, wrapper: DataParallelWrapper) -> dict[str, _ByHand]:
    """Each parameter's .grad averaged or summed over the wrapper's ranks."""
    group, reduced = wrapper.process_group, {}
    world_size = dist.get_world_size(group)
    own_counts, divisor = (world_size, 1) if wrapper.reduction == "sum" else (1, world_size)  # all weights are 1
    for name, parameter in ManagedState(reference).trained().items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else _strided(parameter.grad)
        ranks_with_one = torch.tensor(parameter.grad is not None, dtype=torch.int64, device=parameter.device)
        total = gradient.to(_wide(parameter), memory_format=torch.contiguous_format, copy=True)
        dist.all_reduce(ranks_with_one, group=group)
        dist.all_reduce(total, group=group)
        total /= divisor
        apart = _largest_element(own_counts * gradient.to(total.dtype) - total)
        reduced[name] = _ByHand(total if ranks_with_one else None, _largest_element(total), apart)
    return reduced


def _strided(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.layout != torch.strided else gradient


def _wide(parameter: torch.Tensor) -> torch.dtype:
    return torch.complex128 if parameter.is_complex() else torch.float64


@torch.no_grad()
def _differences(module: nn.Module, expected: Mapping[str, _ByHand], step: int) -> Sequence[ParameterDifference]:
    least = SMALLEST_SCALE * max(by_hand.size for by_hand in expected.values())
    found = []
    for name, parameter in ManagedState(module).trained().items():
        gradient, by_hand = parameter.grad, expected[name]
        if gradient is not None and by_hand.reduced is not None:
            here = _largest_element(_strided(gradient).to(by_hand.reduced.dtype) - by_hand.reduced)
        else:
            here = 0.0 if gradient is by_hand.reduced else math.inf
        scale, tolerance = max(by_hand.size, least), _tolerance(parameter)
        relative = 0.0 if here == 0 else here / scale if scale else math.inf
        # A nan must not be lost in a maximum over ranks, whose scales differ where they are of several groups.
        numbers = [0.0, 0.0, 1.0] if math.isnan(relative) else [here, relative, 0.0]
        numbers.append(float(by_hand.own_is_apart > tolerance * scale))
        largest = torch.tensor(numbers, dtype=torch.float64, device=parameter.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        absolute, relative, is_nan, differed = largest.tolist()
        if is_nan:
            absolute = relative = math.nan
        shape = tuple(parameter.shape)
        found.append(ParameterDifference(name, shape, absolute, relative, step, tolerance, bool(differed)))
    return found


def _tolerance(parameter: torch.Tensor) -> float:
    return max(TOLERANCE, TOLERATED_ROUNDINGS * torch.finfo(gradient_dtype(parameter)).eps)


def _largest_element(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _largest(differences: Sequence[ParameterDifference]) -> ParameterDifference:
    largest = max(differences, key=lambda d: math.inf if math.isnan(d.relative) else d.relative)
    return replace(largest, ranks_differed=any(difference.ranks_differed for difference in differences))
