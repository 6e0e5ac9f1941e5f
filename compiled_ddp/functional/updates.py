"""What torch.optim's SGD, Adam and AdamW make of gradients, as one operator of a graph that has the update.

`optimizer_step` runs torch's own functions, fused where it can: one pass over memory for all parameters of a group, and
one node of the graph. As operators of the graph, which Inductor would make kernels of, the update of 802 parameters
took minutes to compile, and that of a GPT a sixth of its step more than torch's.

Numbers of a parameter group (the learning rate, betas, weight decay) are inputs of the graph, a float64 vector for each
group, so that a scheduler, or an assignment, changes them without a compilation. What is a switch there, or turns a
part of the formula on (`weight_decay` other than 0), is part of the graph, and another graph when it changes.

State is torch's own: `optimizer.state[parameter]` has what `optimizer.step()` would have put there, under its names.
"""

import contextlib
import contextvars
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from compiled_ddp import torch_private
from compiled_ddp.passes.ops import note_taken, optimizer_step, optimizer_step_in_place

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """The part of a group that a graph has fixed: which numbers it takes, and which switches are on."""

    numbers: tuple[str, ...]
    switches: tuple[str, ...]

    def has(self, switch: str) -> bool:
        return switch in self.switches


class GroupTensors(NamedTuple):
    """Of the parameters of a group: each list has one for each, and `state` one list for each of the rule's names."""

    params: list[Tensor]
    gradients: list[Tensor]
    state: list[list[Tensor]]
    steps: list[Tensor]  # counts of steps; empty where a rule has none

    def chosen(self, places: Sequence[int]) -> "GroupTensors":
        """Those at these places."""

        def of(every: Sequence[Tensor]) -> list[Tensor]:
            return [every[place] for place in places] if every else []

        return GroupTensors(of(self.params), of(self.gradients), [*map(of, self.state)], of(self.steps))


class Rule(Protocol):
    """How one class of optimizers updates parameters."""

    def why_not(self, group: Group) -> str:
        """What of this group's options it does not have; empty where it has all."""

    def kind(self, group: Group) -> Kind: ...

    def numbers(self, group: Group) -> list[float]:
        """In the order of `kind(group).numbers`."""

    def needed(self, kind: Kind) -> tuple[str, ...]:
        """What a step finds in the state of a parameter, by torch's names; "step" is its count."""

    def begin(self, name: str, parameter: Tensor, group: Group) -> Tensor:
        """What that is in a first step, where torch makes it."""

    def apply(self, given: GroupTensors, numbers: Mapping[str, Any], kind: Kind, *, fused: bool, skip: Any) -> None:
        """Update all in place; `skip` is 1.0 where nothing is to be updated, which is asked where it is `fused`."""


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Of an optimizer for which `why_outside` has nothing to say."""
    return _RULES[type(optimizer)]


def why_outside(optimizer: torch.optim.Optimizer) -> str:
    """Why a graph cannot do what `optimizer.step()` does; empty where it can."""
    rule = _RULES.get(type(optimizer))
    if rule is None:  # a subclass may compute anything
        return f"it is none of torch.optim's {', '.join(kind.__name__ for kind in _RULES)}"
    if torch_private.optimizers.has_hooks(optimizer):
        return "it has hooks on its step(), or another step()"
    for group in optimizer.param_groups:
        if why := rule.why_not(group):
            return why
        if any(map(Tensor.is_complex, group["params"])):
            return "it has complex parameters"
    return ""


def _switched_on(group: Group, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if group.get(name))


def _has(group: Group, *names: str) -> str:
    """The first of these options that is on, in words."""
    return next((f"it has {name}={group[name]!r}" for name in names if group.get(name)), "")


class _SGD:
    def why_not(self, group: Group) -> str:
        # With dampening the first step is another one than all later ones.
        return _has(group, "differentiable", *(("dampening",) if group["momentum"] else ()))

    def kind(self, group: Group) -> Kind:
        switches = _switched_on(group, "momentum", "weight_decay", "nesterov", "maximize")
        return Kind(("lr", "momentum", "weight_decay"), switches)

    def numbers(self, group: Group) -> list[float]:
        return [float(group[name]) for name in ("lr", "momentum", "weight_decay")]

    def needed(self, kind: Kind) -> tuple[str, ...]:
        return ("momentum_buffer",) if kind.has("momentum") else ()

    def begin(self, name: str, parameter: Tensor, group: Group) -> Tensor:
        # torch's first step makes it the gradient, which is what zeros become.
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def apply(self, given: GroupTensors, numbers: Mapping[str, Any], kind: Kind, *, fused: bool, skip: Any) -> None:
        buffers: list[Tensor | None] = [*given.state[0]] if given.state else [None] * len(given.params)
        sgd(
            given.params,
            given.gradients,
            buffers,
            fused=fused,
            foreach=not fused,
            found_inf=skip,
            dampening=0.0,
            nesterov=kind.has("nesterov"),
            maximize=kind.has("maximize"),
            **numbers,
        )


class _Adam:
    def __init__(self, *, decoupled: bool) -> None:
        """AdamW's weight decay is `decoupled`; Adam's may be, by an option of the group."""
        self._decoupled = decoupled

    def why_not(self, group: Group) -> str:
        return _has(group, "differentiable", "capturable")

    def kind(self, group: Group) -> Kind:
        switches = _switched_on(group, "weight_decay", "amsgrad", "maximize")
        decoupled = group.get("decoupled_weight_decay", self._decoupled)
        return Kind(
            ("lr", "beta1", "beta2", "weight_decay", "eps"), (*switches, *(("decoupled",) if decoupled else ()))
        )

    def numbers(self, group: Group) -> list[float]:
        beta1, beta2 = group["betas"]
        return [float(each) for each in (group["lr"], beta1, beta2, group["weight_decay"], group["eps"])]

    def needed(self, kind: Kind) -> tuple[str, ...]:
        return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if kind.has("amsgrad") else ()))

    def begin(self, name: str, parameter: Tensor, group: Group) -> Tensor:
        if name == "step":
            fused = bool(group.get("fused"))
            is_wide = torch.get_default_dtype() == torch.float64 and not fused
            dtype = torch.float64 if is_wide else torch.float32
            return torch.tensor(0.0, dtype=dtype, device=parameter.device if fused else "cpu")
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def apply(self, given: GroupTensors, numbers: Mapping[str, Any], kind: Kind, *, fused: bool, skip: Any) -> None:
        first, second, *largest = given.state
        adam(
            given.params,
            given.gradients,
            first,
            second,
            largest[0] if largest else [],
            given.steps,
            fused=fused,
            foreach=not fused,
            found_inf=skip,
            amsgrad=kind.has("amsgrad"),
            maximize=kind.has("maximize"),
            decoupled_weight_decay=kind.has("decoupled"),
            **numbers,
        )


_RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: _SGD(),
    torch.optim.Adam: _Adam(decoupled=False),
    torch.optim.AdamW: _Adam(decoupled=True),
}
_BY_NAME = {kind.__name__: rule for kind, rule in _RULES.items()}


def as_vectors(numbers: Sequence[Sequence[float]]) -> list[Tensor]:
    """A graph's inputs: the numbers of each group, float64, on the CPU."""
    return [torch.tensor(own, dtype=torch.float64, device="cpu") for own in numbers]


# ---- the operator ----------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """On what terms an update is made."""

    numbers: Tensor  # of the group
    factor: Tensor | None  # of all gradients, float64; None where that is 1
    skip: Tensor | None  # 1.0 where nothing is to be updated; None where all is
    applies: Tensor | None  # for each parameter whether it is to be; None where all are


def updated_in_trace(given: GroupTensors, terms: Terms, optimizer: str, kind: Kind) -> GroupTensors:
    """What becomes of them, in a step that is traced: see `passes.update_in_place`."""
    found: list[Tensor] = optimizer_step(*_arguments(given, terms, optimizer, kind))
    lists = [found[begin : begin + len(given.params)] for begin in range(0, len(found), len(given.params))]
    params, *state_lists = lists
    steps = state_lists.pop() if given.steps else []
    return GroupTensors(params, given.gradients, state_lists, steps)


def update_in_place(given: GroupTensors, terms: Terms, optimizer: str, kind: Kind) -> None:
    """Do so outside of any trace."""
    optimizer_step_in_place(*_arguments(given, terms, optimizer, kind))


def _arguments(given: GroupTensors, terms: Terms, optimizer: str, kind: Kind) -> tuple[Any, ...]:
    """Of the operator."""
    state = [*itertools.chain.from_iterable(given.state)]
    names = ",".join(kind.switches), ",".join(kind.numbers)
    return given.params, given.gradients, state, given.steps, *terms, optimizer, *names


class Made(NamedTuple):
    """An update that has begun."""

    has_state: bool
    addresses: frozenset[int]  # of the parameters
    skip: Tensor | None  # as of its `Terms`

    @property
    def was_left_out(self) -> bool:
        try:
            return self.skip is not None and bool(self.skip)
        except RuntimeError:  # a GPU that has failed tells nothing any more
            return False


_made: contextvars.ContextVar[list[Made] | None] = contextvars.ContextVar("made", default=None)


@contextlib.contextmanager
def noting_updates() -> Iterator[list[Made]]:
    """Those that begin in here."""
    made: list[Made] = []
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)


def _update(
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    state: Sequence[Tensor],
    steps: Sequence[Tensor],
    numbers: Tensor,
    factor: Tensor | None,
    skip: Tensor | None,
    applies: Tensor | None,
    optimizer: str,
    switches: str,
    names: str,
) -> None:
    note_taken(*gradients)
    kind = Kind(tuple(names.split(",")), tuple(filter(None, switches.split(","))))
    count = len(params)
    lists = [[*state[begin : begin + count]] for begin in range(0, len(state), count)]
    given = GroupTensors([*params], [*gradients], lists, [*steps])
    if applies is not None:
        given = given.chosen([place for place, applied in enumerate(applies.tolist()) if applied])
    fused = _can_be_fused(given)
    if skip is not None and (not fused or skip.is_cpu):
        if bool(skip):
            return
        skip = None
    if not given.params:
        return
    if factor is not None:
        given = given._replace(gradients=[each * factor.to(each.device, each.dtype) for each in given.gradients])
    own = dict(zip(kind.numbers, numbers.tolist(), strict=True))
    with _widened_on_cpu(given) as wide:
        if fused:
            wide = wide._replace(gradients=[*map(Tensor.contiguous, wide.gradients)])
        if (made := _made.get()) is not None:  # behind all that may find no memory
            kept = None if skip is None else skip.clone()  # whose memory others may get later in the graph
            made.append(Made(bool(state or steps), frozenset(map(Tensor.data_ptr, given.params)), kept))
        _BY_NAME[optimizer].apply(wide, own, kind, fused=fused, skip=skip)


_OF_16_BITS = frozenset((torch.float16, torch.bfloat16))
_dtype_of, _device_of = operator.attrgetter("dtype"), operator.attrgetter("device")  # of hundreds in a call, in C


def widened(tensor: Tensor) -> Tensor:
    """In float32 what has 16 bits; anything else as it is."""
    return tensor.float() if tensor.dtype in _OF_16_BITS else tensor


@contextlib.contextmanager
def _widened_on_cpu(given: GroupTensors) -> Iterator[GroupTensors]:
    """Tensors of 16 bits on the CPU as copies in float32, which are written back.

    Torch's fused SGD leaves such parameters as they are there, or takes what lies in memory (torch 2.13, from 16
    elements on).
    """

    if _OF_16_BITS.isdisjoint(map(_dtype_of, itertools.chain(given.params, given.gradients, *given.state))):
        yield given
        return

    def wide(every: Sequence[Tensor]) -> list[Tensor]:
        return [widened(each) if each.is_cpu else each for each in every]

    copies = GroupTensors(wide(given.params), wide(given.gradients), [*map(wide, given.state)], given.steps)
    yield copies
    for old, new in zip((given.params, *given.state), (copies.params, *copies.state), strict=True):
        for tensor, copy in zip(old, new, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)


def _can_be_fused(given: GroupTensors) -> bool:
    """Whether torch's fused kernels may be given these: they go through memory, and read counts on their device."""
    devices = {*map(_device_of, itertools.chain(given.params, given.steps))}
    if len(devices) > 1 or any(device.type not in ("cpu", "cuda") for device in devices):
        return False
    return all(map(Tensor.is_contiguous, itertools.chain(given.params, *given.state)))


@torch.library.impl("compiled_ddp::optimizer_step", "CompositeExplicitAutograd")
def _optimizer_step(
    params: Sequence[Tensor], gradients: Sequence[Tensor], state: Sequence[Tensor], steps: Sequence[Tensor], *terms: Any
) -> list[Tensor]:
    copies = [[each.clone() for each in every] for every in (params, state, steps)]
    _update(copies[0], gradients, copies[1], copies[2], *terms)
    return [*itertools.chain.from_iterable(copies)]


torch.library.impl("compiled_ddp::optimizer_step_", "CompositeExplicitAutograd", _update)
