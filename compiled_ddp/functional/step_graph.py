"""A training step as functions of tensors, which `compile_step` compiles: an update, and a micro-batch before one.

What a graph has fixed is `Layout`: which parameters are trained, their groups and the groups' switches.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compiled_ddp import torch_private
from compiled_ddp.functional.on_buckets import Kept
from compiled_ddp.functional.reduction import GradientReduction, Options
from compiled_ddp.functional.session import current_session, note_departing, note_settled
from compiled_ddp.functional.shares import gathered_in_trace, own_row, scattered_by, summed_in_trace
from compiled_ddp.functional.transforms import GradientFunction
from compiled_ddp.functional.updates import GroupTensors, Kind, Terms, rule_of, updated_in_trace, why_outside, widened
from compiled_ddp.passes.ops import gathered_before, summed_before

Loss = Callable[..., Any]
Tensors = dict[str, Tensor]

USED = "which parameters are used"  # among what is held: a number for each, above 0 where it is; see `_summed`


@dataclass(frozen=True)
class Layout:
    """The names of the trained parameters, each with its group, and the kinds of the groups.

    `outside` says why the update is the optimizer's own step(), outside of the graph; it is empty, and there are
    `kinds`, where the graph has the update. So many `ranks` share that; where it is 1, each makes all of it.
    """

    names: tuple[str, ...]
    groups: tuple[int, ...]
    kinds: tuple[Kind, ...]
    outside: str
    ranks: int

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        ranks: int = 1,
        needed_by: str = "",
    ) -> "Layout":
        """Of the model's `parameters` as they are now.

        Raises ValueError where the optimizer has others, and where its update cannot be a part of the graph, for an
        option that it is `needed_by`.
        """
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        names, groups = list[str](), list[int]()
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if not parameter.requires_grad:
                    continue
                if id(parameter) not in name_of:
                    raise ValueError(
                        f"parameter {place} of group {number} of the optimizer, of shape {tuple(parameter.shape)}, is "
                        "none of the model's: make the module that it belongs to a part of the model; or make the "
                        "optimizer anew, where the model has another one in its place, as a tied one."
                    )
                names.append(name_of[id(parameter)])
                groups.append(number)
        if not names:
            raise ValueError("the optimizer has no parameter that is trained: check requires_grad.")
        kinds, outside = _kinds_of(optimizer)
        if outside and needed_by:
            raise ValueError(
                f"with {needed_by} the update is a part of the graph, and that of {type(optimizer).__name__} cannot "
                f"be: {outside}. Leave out {needed_by}."
            )
        return cls(tuple(names), tuple(groups), kinds, outside, ranks)

    def has_kinds_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the options of an optimizer's groups, of the same parameters, make no other layout."""
        return _kinds_of(optimizer) == (self.kinds, self.outside)

    @property
    def places(self) -> list[range]:
        """Where the parameters of each group stand."""
        begins = [self.groups.index(group) if group in self.groups else 0 for group in range(len(self.kinds))]
        return [range(begin, begin + self.groups.count(group)) for group, begin in enumerate(begins)]

    def trained(self, parameters: Mapping[str, nn.Parameter]) -> list[tuple[str, int, nn.Parameter]]:
        """Name, group and parameter of each."""
        return [(name, group, parameters[name]) for name, group in zip(self.names, self.groups, strict=True)]


def _kinds_of(optimizer: torch.optim.Optimizer) -> tuple[tuple[Kind, ...], str]:
    outside = why_outside(optimizer)
    return () if outside else tuple(map(rule_of(optimizer).kind, optimizer.param_groups)), outside


class WithLoss(nn.Module):
    """The model and its loss as one module, whose tensors `functional_call` replaces."""

    def __init__(self, model: nn.Module, loss_fn: Loss | None, *, has_aux: bool) -> None:
        super().__init__()
        self.model, self.loss_fn, self.has_aux = model, loss_fn or _call, has_aux

    def forward(self, *batch: Any, **named: Any) -> Any:
        return self.loss_fn(self.model, *batch, **named)

    # Hooks of all modules (`register_module_forward_hook`) are for the user's, and would be called around this one too.
    __call__ = forward


def _call(model: nn.Module, *batch: Any, **named: Any) -> Any:
    return model(*batch, **named)


class Written(NamedTuple):
    """What a graph writes into: the model's own tensors, and the optimizer's."""

    params: Tensors  # those that are trained, where the update is in the graph
    buffers: Tensors
    state: dict[str, Tensors]
    held: Tensors  # sums of the gradients of earlier micro-batches; empty where each batch is an update
    kept: Sequence[Tensor] = ()  # what a communication hook keeps for the buckets


class Read(NamedTuple):
    """What it reads, and is there in each call."""

    params: Tensors  # those that are trained, where the update is not in the graph
    others: Tensors  # parameters that are not
    rank: Tensor  # the number of this one, int64, shape (1,): which shares are its


class Given(NamedTuple):
    """What it is given anew in each call."""

    share: Tensor | None  # what a micro-batch counts in the mean of all of them; None where there is one
    scale: Tensor | None  # that of a GradScaler; None without one
    batch: Any  # None where what is held is all there is
    named: Any
    factor: Tensor | None = None  # of the step before, whose update this one makes: `StepGraph.deferred_of`
    applies: Tensor | None = None  # likewise


class Outcome(NamedTuple):
    """What comes of an update besides new tensors."""

    value: Tensor  # this rank's loss
    aux: Any
    unused: tuple[str, ...]  # parameters that this rank's loss does not come to
    used: Tensor  # for each parameter whether some rank's loss comes to it; no part of a bucket, which would leave
    finite: Tensor | None  # whether all gradients are; None without a scale
    gradients: Tensors  # reduced; where ranks share the update, their shares
    factor: Tensor | None  # of all of them, to be unscaled and clipped; None where that is 1
    is_sound: Tensor | None = None  # whether ranks have reduced what they meant to, for that; None for one rank

    def used_by_some(self) -> Tensor | None:
        """For each parameter whether some rank uses it; None where this one uses all."""
        return self.used if self.unused else None

    def applies(self) -> Tensor | None:
        """For each parameter whether it is to change; None where all are."""
        if self.finite is None:
            return self.used_by_some()
        return self.used & self.finite

    def updated(self, layout: Layout) -> set[str]:
        """The parameters that are to change."""
        applies = self.applies()
        if applies is None:
            return {*layout.names}
        return {name for name, is_updated in zip(layout.names, applies.tolist(), strict=True) if is_updated}


class _TermsOfAll(NamedTuple):
    """On what terms the parameters of all groups are updated: see `Terms`."""

    numbers: Sequence[Tensor]  # of each group
    factor: Tensor | None
    skip: Tensor | None
    applies: Tensor | None

    def of_group(self, number: int, places: range) -> Terms:
        applies = None if self.applies is None else self.applies[places.start : places.stop]
        return Terms(self.numbers[number], self.factor, self.skip, applies)


class StepGraph:
    """The functions that are compiled, for a layout: each returns what becomes of what it writes, and a result."""

    def __init__(
        self,
        whole: WithLoss,
        optimizer: torch.optim.Optimizer,
        options: Options,
        clip_grad_norm: float | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        """Ranks share the update where the options say that sums are scattered."""
        self.has_aux, self._optimizer, self._clip_grad_norm = whole.has_aux, optimizer, clip_grad_norm
        if options.is_scattered and (scaler is not None or clip_grad_norm is not None):
            options = replace(options, numbers=2)  # how many gradients are infinite, and the square of their norm
        self._gradient = GradientFunction(_loss_of(whole), 0, True, options, "grad_and_value", before_sum=_summed)

    @property
    def reduction(self) -> GradientReduction:
        return self._gradient.reduction

    def add_of(self, layout: Layout) -> Callable[..., Any]:
        """A function that adds a micro-batch's gradients to those that are held, on this rank alone."""
        gradient = self._gradient

        def add(written: Written, read: Read, given: Given) -> Any:
            found = gradient.on_this_rank(_differentiated(written, read), written, read, given)
            gradients, (used,), (value, aux, buffers, _) = found
            return written._replace(buffers=buffers, held={**gradients, USED: used}), (value, aux)

        return add

    def reduce_of(self, layout: Layout) -> Callable[..., Any]:
        """A function whose result has the reduced gradients, for an update outside."""
        reduced_of = self._reduced_of(layout)

        def reduce(written: Written, read: Read, given: Given) -> Any:
            outcome, buffers, kept = reduced_of(written, read, given)
            gradients, factor = outcome.gradients, outcome.factor
            if factor is not None:
                gradients = {name: each * factor.to(each.device, each.dtype) for name, each in gradients.items()}
            left = written._replace(buffers=buffers, held=_zeros(written.held), kept=kept)
            return left, outcome._replace(gradients=gradients, factor=None, is_sound=_are_sound())

        return reduce

    def update_of(self, layout: Layout) -> Callable[..., Any]:
        """A function that updates; `numbers` are those of each group."""
        reduced_of = self._reduced_of(layout)
        is_gathered_later = layout.ranks > 1 and self.reduction.options.is_gathered_later

        def update(written: Written, read: Read, numbers: Sequence[Tensor], given: Given) -> Any:
            if is_gathered_later:
                written = written._replace(params=_arrived(written.params))
            outcome, buffers, kept = reduced_of(written, read, given)
            terms = _TermsOfAll(numbers, outcome.factor, _skip(outcome.finite, _are_sound()), outcome.used_by_some())
            params, state = self._updated(layout, written, read, outcome.gradients, terms)
            if is_gathered_later:
                note_departing(params[name] for name in written.params)
                params = written.params
            if layout.ranks == 1 or is_gathered_later:
                note_settled(params.values())
            else:
                params = self._gathered(params, written.params, layout.ranks)
            left = Written(params, buffers, state, _zeros(written.held), kept)
            return left, outcome._replace(gradients={}, factor=None)

        return update

    def deferred_of(self, layout: Layout) -> Callable[..., Any]:
        """A function that begins with the update of the step before, and leaves the sums for its own under way.

        `numbers`, `given.factor` and `given.applies` are of that step: what it has returned of its outcome.
        """
        reduced_of = self._reduced_of(layout)

        def update(written: Written, read: Read, numbers: Sequence[Tensor], given: Given) -> Any:
            *sums, are_there = summed_before([*written.params.values()])
            terms = _TermsOfAll(numbers, given.factor, _skip(are_there), given.applies)
            gradients = dict(zip(written.params, sums, strict=True))
            params, state = self._updated(layout, written, read, gradients, terms)
            params = {name: params[name] for name in written.params}
            note_settled(params.values())
            outcome, buffers, _ = reduced_of(written._replace(params=params), read, given)
            note_departing((outcome.gradients[name] for name in params), outcome.finite)
            aux = _apart(outcome.aux, params.values())  # so that parameters may be updated where they are
            return Written(params, buffers, state, _zeros(written.held)), outcome._replace(gradients={}, aux=aux)

        return update

    def factor_of_none(self, device: torch.device, scale: Tensor | None) -> Tensor | None:
        """`given.factor` of `deferred_of` where no step is before."""
        if self._clip_grad_norm is None and scale is None:
            return None
        return torch.ones((), dtype=torch.float64, device=device)

    def _updated(
        self, layout: Layout, written: Written, read: Read, gradients: Tensors, terms: _TermsOfAll
    ) -> tuple[Tensors, dict[str, Tensors]]:
        """Parameters, or this rank's shares of them, and their state behind the update."""
        params, state = dict[str, Tensor](), dict[str, Tensors]()
        for number, (places, kind) in enumerate(zip(layout.places, layout.kinds, strict=True)):
            if places:
                own = terms.of_group(number, places)
                of_params, of_state = self._updated_group(layout, places, kind, written, read, gradients, own)
                params, state = params | of_params, state | of_state
        note_settled(each for own in state.values() for each in own.values())
        return params, state

    def _updated_group(
        self,
        layout: Layout,
        places: range,
        kind: Kind,
        written: Written,
        read: Read,
        gradients: Tensors,
        terms: Terms,
    ) -> tuple[Tensors, dict[str, Tensors]]:
        """Those of a group."""
        names, is_shared = [layout.names[place] for place in places], layout.ranks > 1
        params = [written.params[name] for name in names]
        if is_shared:
            params = [own_row(each, layout.ranks, read.rank) for each in params]
        needed = [each for each in rule_of(self._optimizer).needed(kind) if each != "step"]
        before = [[written.state[name][each] for name in names] for each in needed]
        steps = [written.state[name]["step"] for name in names if "step" in written.state[name]]
        flat = [[share.view(-1) for share in every] for every in before] if is_shared else before
        given = GroupTensors(params, [gradients[name] for name in names], flat, steps)
        new = updated_in_trace(given, terms, type(self._optimizer).__name__, kind)
        after = {"step": dict(zip(names, new.steps, strict=True))} if new.steps else {}
        for each, old, every in zip(needed, before, new.state, strict=True):
            shaped = [value.view(one.shape) for value, one in zip(every, old, strict=True)] if is_shared else every
            after[each] = dict(zip(names, shaped, strict=True))
        state = {name: {each: after[each][name] for each in written.state[name]} for name in names}
        return dict(zip(names, new.params, strict=True)), state

    def _gathered(self, shares: Tensors, params: Tensors, ranks: int) -> Tensors:
        """Parameters as their ranks have updated them, each rank its shares."""
        sent, sizes = [*shares.values()], [params[name].shape for name in shares]
        by = scattered_by(self.reduction.communicator.process_group, sent[0].device)
        return dict(zip(shares, gathered_in_trace(sent, sizes, ranks, by), strict=True))

    def _reduced_of(self, layout: Layout) -> Callable[[Written, Read, Given], tuple[Outcome, Tensors, list[Tensor]]]:
        """A function that has, besides what comes of an update, new buffers and what a communication hook keeps."""
        gradient, most = self._gradient, self._clip_grad_norm
        sums_numbers = self.reduction.world_size > 1 and self.reduction.options.numbers > 0

        def reduced(written: Written, read: Read, given: Given) -> tuple[Outcome, Tensors, list[Tensor]]:
            (gradients, (used, *kept)), (_, (value, aux, buffers, unused)) = gradient(
                _differentiated(written, read), written, read, given
            )
            infinite = squares = torch.zeros((), dtype=torch.float64, device=used.device)
            if given.scale is not None:
                infinite = _infinite(gradients, used.device)
            if most is not None:
                squares = _squares(gradients, used.device)
            if sums_numbers:
                infinite, squares = summed_in_trace(torch.stack([infinite, squares])).unbind()
            finite = None if given.scale is None else infinite == 0
            factor = None if given.scale is None else given.scale.double().reciprocal()
            if most is not None:
                norm = squares.sqrt() if factor is None else squares.sqrt() * factor
                clipping = (most / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
                factor = clipping if factor is None else factor * clipping
            if finite is not None:  # else what was sent of this update is lost
                kept = [
                    torch.where(finite.to(new.device), new, old) for new, old in zip(kept, written.kept, strict=True)
                ]
            return Outcome(value, aux, unused, used > 0, finite, gradients, factor), buffers, kept

        return reduced


def _differentiated(written: Written, read: Read) -> Tensors:
    """What gradients are taken of."""
    return {**written.params, **read.params}


def _loss_of(whole: WithLoss) -> Loss:
    """The loss as a function of tensors, with all that comes of a batch besides it."""
    users_loss = whole.loss_fn  # so that what it closes over is followed, as of any function of a compiled step

    def loss(params: Tensors, written: Written, read: Read, given: Given) -> Any:
        if given.batch is None:
            nothing = next(iter(params.values())).real.sum() * 0.0
            return nothing, (nothing, None, written.buffers, tuple(params))
        # A gradient function may not write into what it is given.
        copies = {name: buffer.clone() for name, buffer in written.buffers.items()}
        named = {**params, **read.others, **copies}
        tensors = {f"model.{name}": each for name, each in named.items()}
        with _HoweverReached(whole.model, named), _putting_back(whole):
            result = torch.func.functional_call(whole, tensors, given.batch, given.named)
        value, aux = _loss_and_more(result, whole)
        assert users_loss is whole.loss_fn
        unused = tuple(torch_private.autograd.not_reached(value, params))
        # Those that forward has written into, or replaced by others: `functional_call` puts these into `tensors`.
        buffers = {name: tensors[f"model.{name}"].detach() for name in written.buffers}
        _refuse_other_buffers(whole.model, written.buffers, buffers)
        scalar = value.reshape(())
        return scalar if given.scale is None else scalar * given.scale, (value, aux, buffers, unused)

    loss.__qualname__ = f"loss of {type(whole.model).__name__}"
    return loss


@contextlib.contextmanager
def _putting_back(whole: nn.Module) -> Iterator[None]:
    """Modules hold what they held behind this: in one that has two names `functional_call` leaves other tensors."""
    held: list[dict[str, Any]] = [each for m in whole.modules() for each in (m._parameters, m._buffers)]
    before = [dict(each) for each in held]
    try:
        yield
    finally:
        for each, own in zip(held, before, strict=True):
            each.clear()
            each.update(own)


class _HoweverReached(TorchFunctionMode):
    """The model's own tensors count as those of these names for all that is done with them in here.

    `functional_call` gives modules others in their place. A loss may have them elsewhere too: in a list that it closes
    over, in the optimizer's groups, in an attribute that is no parameter.
    """

    def __init__(self, model: nn.Module, named: Tensors) -> None:
        super().__init__()
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._instead = {id(tensor): named[name] for name, tensor in own.items() if name in named}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch_private.trees.map_tensors(self._traced, (args, kwargs or {}))
        if function is Tensor.requires_grad_:  # of activations, for autograd's checkpoints
            return args[0]
        return function(*args, **kwargs)

    def _traced(self, tensor: Tensor) -> Tensor:
        return self._instead.get(id(tensor), tensor)


def _loss_and_more(result: Any, whole: WithLoss) -> tuple[Tensor, Any]:
    """The loss, and what `has_aux` is for. Raises TypeError or ValueError for anything else, with what to do."""
    returned_by = "the model" if whole.loss_fn is _call else "loss_fn"
    if whole.has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise TypeError(
            f"with has_aux {returned_by} returns a pair of the loss and anything else, found {_told(result)}."
        )
    value, aux = result if whole.has_aux else (result, None)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value, aux
    if isinstance(value, Tensor):
        raise ValueError(
            f"{returned_by} returns a tensor of shape {tuple(value.shape)}, and a loss is one number: take its mean()."
        )
    remedy = "return the loss itself"
    if isinstance(value, tuple | list):
        remedy = "return the loss alone, or a pair of the loss and anything else with has_aux=True"
    elif isinstance(value, Mapping) or hasattr(value, "loss"):
        remedy = 'pass loss_fn=lambda model, batch: model(**batch).loss, or the like with ["loss"]'
    raise TypeError(f"{returned_by} returns {_told(value)}, where compile_step takes a loss, a tensor: {remedy}.")


def _told(value: object) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, tuple | list) else "None" if value is None else f"a {kind}"


def _refuse_other_buffers(model: nn.Module, before: Tensors, after: Tensors) -> None:
    """Raise RuntimeError for what a step could not write into the buffers that there are."""
    for name, old in before.items():
        new = after[name]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise RuntimeError(
                f"the forward of {type(model).__name__} replaces the buffer {name}, of shape {tuple(old.shape)} and "
                f"{old.dtype}, by one of shape {tuple(new.shape)} and {new.dtype}, and a graph writes into the memory "
                "that there is: make the buffer as large as it gets when the model is made, or train with "
                "compile_ddp(model)."
            )


def _summed(
    gradients: Tensors,
    found: tuple[Tensor, Any, Tensors, tuple[str, ...]],
    params: Tensors,
    written: Written,
    read: Read,
    given: Given,
) -> tuple[Tensors, list[Tensor], Kept]:
    """The gradients of all micro-batches of an update so far; which parameters have one, which rides along; and what a
    communication hook has kept.

    A parameter without a gradient on any rank is left as it is, as by torch.optim.
    """
    unused, held = found[-1], written.held
    runs = [(float(used), len([*run])) for used, run in itertools.groupby(name not in unused for name in gradients)]
    device = next(iter(gradients.values())).device
    used = torch.cat([torch.full((length,), used, dtype=torch.float32, device=device) for used, length in runs])
    if held:
        used = torch.maximum(held[USED], used)
        gradients = {name: held[name] + gradient for name, gradient in gradients.items()}
    if given.share is not None:
        share = given.share
        gradients = {name: each * share.to(each.device, each.dtype) for name, each in gradients.items()}
    return gradients, [used], Kept(written.kept, used if unused else None)


def _apart(tree: Any, tensors: Iterable[Tensor]) -> Any:
    """A tree without what shares memory with one of these: copies in its place."""
    memory = {torch_private.tensors.memory_of(each) for each in tensors}
    return torch_private.trees.map_tensors(
        lambda leaf: leaf.clone() if torch_private.tensors.memory_of(leaf) in memory else leaf, tree
    )


def _arrived(params: Tensors) -> Tensors:
    """Parameters as the step before has left them under way."""
    found: list[Tensor] = gathered_before([*params.values()])
    return dict(zip(params, found, strict=True))


def _zeros(held: Tensors) -> Tensors:
    return {name: torch.zeros_like(each) for name, each in held.items()}


def _infinite(gradients: Tensors, device: torch.device) -> Tensor:
    """How many of these have an element that is not finite; float64."""
    return torch.stack([(~each.isfinite().all()).to(device, torch.float64) for each in gradients.values()]).sum()


def _squares(gradients: Tensors, device: torch.device) -> Tensor:
    """The square of the norm of all together; float64."""
    norms = [torch.linalg.vector_norm(widened(each)) for each in gradients.values()]
    return torch.stack([each.to(device, torch.float64) for each in norms]).square().sum()


def _are_sound() -> Tensor | None:
    """Whether ranks have reduced what they meant to; None where there is one."""
    session = current_session()
    return None if session is None else session.are_sound()


def _skip(*conditions: Tensor | None) -> Tensor | None:
    """1.0 where no parameter is to be updated, as one of these does not hold; None where there are none."""
    reasons = [~each for each in conditions if each is not None]
    return torch.stack([each.to(reasons[0].device) for each in reasons]).any().float() if reasons else None
