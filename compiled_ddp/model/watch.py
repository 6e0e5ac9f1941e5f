"""Whether a model has changed since its wrapper made its plan of it, for good or for the time of a functional_call."""

import enum
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.formatting import format_names
from compiled_ddp.model.checks import check_stepped_after_backward
from compiled_ddp.model.managed import ManagedState, every_parameter
from compiled_ddp.plan import gradient_dtype

# ---- what stands in the modules, compared with what stood there before -----------------------------------------------

Part = nn.Module | torch.Tensor | None


class RememberedParts:
    """Modules' dictionaries, as they change, beside what they held when this was made.

    [Note: as it was] A model of 800 parameters has 800 dictionaries. Their views follow them, so that one iterator over
    all views, compared with a list, tells in C whether anything stands elsewhere.
    """

    def __init__(self, siblings: Sequence[Mapping[str, Part]]) -> None:
        """`siblings` are the `_modules`, `_parameters` or `_buffers` of some modules."""
        self._now, self._before = siblings, [dict(now) for now in siblings]
        self.dictionaries = [now for now in siblings if isinstance(now, dict)]  # of these `lengths`
        # What TorchScript has in place of one has no views, and other parts under the same names for good.
        self._others = [(now, dict(now)) for now in siblings if not isinstance(now, dict)]
        filled = [now for now in self.dictionaries if now]
        self._names, self._values = [now.keys() for now in filled], [now.values() for now in filled]
        self.lengths = [*map(len, self.dictionaries)]
        self._names_before, self._values_before = [*_chained(self._names)], [*_chained(self._values)]

    def are_untouched(self) -> bool:
        """Whether each holds the same under the same names, in the same order."""
        return (
            [*map(len, self.dictionaries)] == self.lengths
            and all(map(operator.is_, _chained(self._values), self._values_before))
            and [*_chained(self._names)] == self._names_before
            and all(itertools.starmap(_are_the_same, self._others))
        )

    def are_in_place(self) -> bool:
        """Whether each holds the same in the same order, under whatever names."""
        return all(map(_are_the_same, self._now, self._before))

    def parts(self) -> Iterator[Part]:
        """What they hold now."""
        return _chained([now.values() for now in self._now])


_chained = itertools.chain.from_iterable


def _are_the_same(now: Mapping[str, Part], before: Mapping[str, Part]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now.values(), before.values()))


# ---- what has changed ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a trained parameter, or a module that holds some, stands in the model. A tied one has several."""

    siblings: Mapping[str, object]  # of the module it belongs to
    key: str
    name: str
    found: object

    @property
    def now(self) -> object:
        """What stands here, if anything does. What TorchScript has for a dictionary knows no `get`."""
        return self.siblings[self.key] if self.key in self.siblings else None  # noqa: SIM401

    def holds_any(self, parameters: Set[int]) -> bool:
        """Whether what was found is, or holds, one of these parameters, which are called by their ids."""
        found = every_parameter(self.found) if isinstance(self.found, nn.Module) else [self.found]
        return not parameters.isdisjoint(map(id, found))


def trained_places(state: ManagedState) -> list[Place]:
    """Every place of what requires a gradient, in the model as it is now, but for what is left alone."""
    places = []
    left_alone = {id(parameter) for parameter in state.left_alone().values()}
    for prefix, owner in state.modules():
        parts: Mapping[str, torch.Tensor | nn.Module | None]
        for parts in (owner._parameters, owner._modules):
            places += [
                Place(parts, key, f"{prefix}.{key}".removeprefix("."), part)
                for key, part in parts.items()
                if _is_trained(part, left_alone)
            ]
    return places


def _is_trained(part: torch.Tensor | nn.Module | None, left_alone: Set[int]) -> bool:
    if isinstance(part, nn.Module):
        return any(_is_trained(parameter, left_alone) for parameter in every_parameter(part))
    return part is not None and part.requires_grad and id(part) not in left_alone


def check_not_replaced(places: Sequence[Place]) -> None:
    """Raise RuntimeError if something else, or nothing, stands in one of `places` now."""
    for place in places:
        if place.now is not place.found:
            raise RuntimeError(
                f"{place.name} was replaced or removed after the model was wrapped: nothing would reduce the gradient "
                "of what stands there now. Call unwrap() and wrap the model again."
            )


def _refuse_export() -> None:
    """Raise RuntimeError under torch.export, which puts tensors of its own in the place of the parameters."""
    if torch.compiler.is_exporting():
        raise RuntimeError(
            "torch.export traces a wrapper's forward, and what talks to other ranks is in no exported program. "
            "Export the wrapped model, `wrapper.module`."
        )


class StandIns(enum.Enum):
    """What `torch.func.functional_call`, for the time of a call, has put others in the place of."""

    NOTHING = "nothing"
    FROZEN = "frozen parameters alone"
    SOME = "some of the trained parameters"
    ALL = "all trained parameters"


@dataclass(frozen=True)
class Look:
    """What a model looks like in one forward."""

    # Whether something was added, unfrozen, put into another place, or moved to another dtype, device, shape or format.
    changed: bool = False
    stand_ins: StandIns = StandIns.NOTHING
    leads_back: bool = False  # whether a gradient of a stand-in may go on to the parameters themselves


class ModelWatch:
    """Notices between forwards that a model has changed in what its wrapper made its plan from.

    Where it has not, a forward pays for a few comparisons that Python makes in C: [Note: as it was].
    """

    def __init__(self, state: ManagedState, *, follows: bool = False, reduced: Iterable[torch.Tensor] = ()) -> None:
        """With `follows`, what was replaced, removed or frozen is a change like any other, instead of an error.

        What is `reduced` counts as trained also while it is frozen, as parts are that take turns.
        """
        self._state, self._follows = state, follows
        self._asks_for_buffers = state.gives_buffers_itself
        self._places = trained_places(state)
        known = {*map(id, reduced)}
        self._trained = [p for p in state.parameters().values() if p.requires_grad or id(p) in known]
        memory: dict[_Memory, _Memory] = {}  # a model has many parameters of few shapes
        self._memory = [memory.setdefault(of_one, of_one) for of_one in map(_memory, self._trained)]
        self._take_contents()
        self._take_kinds()

    def look(self) -> Look:
        """Compare the model with what it was.

        Raises RuntimeError if something was replaced or removed, or has changed besides what a functional_call
        replaces, ValueError if an optimizer would step in the backward.
        """
        if (  # [Note: as it was]
            self._contents.are_untouched()
            and self._are_of_same_kind(*self._trained)
            and [*map(_grad_dtype, self._trained)] == self._grad_dtypes
            and not any(map(_requires_grad, self._frozen))
            and not any(map(hasattr, self._trained, _OPTIMIZERS))
        ):
            return _UNCHANGED
        return self._look_closely()

    def _look_closely(self) -> Look:
        if any(map(hasattr, self._trained, _OPTIMIZERS)):
            check_stepped_after_backward(self._state.trained())
        in_place = self._contents.are_in_place()
        if not in_place:
            _refuse_export()
            given = {id(value): value for value in torch_private.modules.given_by_functional_calls()}
            if any(id(part) in given for part in self._contents.parts()):
                return self._look_through(given)
        if self._follows and self._lacks_any():
            return Look(changed=True)
        stands_elsewhere = any(place.now is not place.found for place in self._places)
        if stands_elsewhere and not self._follows:
            self._check_nothing_lost()
        if stands_elsewhere or self._is_of_another_kind() or not (in_place or self._knows_all_trained()):
            return Look(changed=True)
        if not self._contents.are_untouched():
            self._take_contents()  # another module without trained parameters: no other rank need know
        self._take_kinds()  # as under autocast, say
        return _UNCHANGED

    def may_train_more(self) -> bool:
        """Whether something stands elsewhere than it did, or was unfrozen: the part of a look for behind a forward."""
        return not self._contents.are_untouched() or any(map(_requires_grad, self._frozen))

    @property
    def has_grown(self) -> bool:
        """Whether a module holds more parts than it did, or fewer: quicker still, for other moments."""
        return [*map(len, self.dictionaries)] != self.lengths

    def newcomers(self, known: Set[int]) -> dict[str, torch.nn.Parameter]:
        """What the model holds now and is to be trained, by name, but for those that are `known`, by their ids."""
        return {name: parameter for name, parameter in self._state.trained().items() if id(parameter) not in known}

    def buffers(self) -> Sequence[torch.Tensor]:
        """The buffers that the wrapper manages, as they are now: each once, in registration order."""
        if self._asks_for_buffers or not self._around_buffers.are_untouched():
            self._take_buffers()
        return self._buffers

    def _is_of_another_kind(self) -> bool:
        return any(parameter.requires_grad for parameter in self._frozen) or any(
            map(operator.ne, map(_memory, self._trained), self._memory)
        )

    def in_what(self) -> str:
        """Which parameters are of another kind than they were, behind a sentence that tells of a change."""
        now = zip(self._trained, self._memory, strict=True)
        converted = {id(parameter) for parameter, before in now if _memory(parameter) != before}
        names = [name for name, parameter in self._state.parameters().items() if id(parameter) in converted]
        return f", in the dtype, grad_dtype, device, shape or strides of {format_names(names)}" if names else ""

    def _look_through(self, given: Mapping[int, object]) -> Look:
        """The model as it is but for what functional_calls under way were `given`, by id."""
        check_not_replaced([place for place in self._places if id(place.now) not in given])
        own = {id(parameter) for parameter in (*self._frozen, *self._trained)}
        here = {id(parameter) for parameter in self._state.parameters().values()}
        replaced = [parameter for parameter in self._trained if id(parameter) not in here]
        if len(replaced) == len(self._trained):
            return Look(stand_ins=StandIns.ALL, leads_back=any(map(self._leads_back, given.values())))
        added = any(id(p) not in own | given.keys() for p in self._state.trained().values())
        if added or self._is_of_another_kind():
            raise RuntimeError(
                "the model has changed since it was wrapped, and a functional_call replaces a part of it: call the "
                "wrapper by itself once, on every rank, so that it takes the model as it is."
            )
        return Look(stand_ins=StandIns.SOME if replaced else StandIns.FROZEN)

    def _leads_back(self, value: object) -> bool:
        """Whether a tensor, or what torch.func's transforms have wrapped in it, may have been made of parameters."""
        if not isinstance(value, torch.Tensor):
            return False
        bare = torch_private.autograd.without_transforms(value)
        return bare.requires_grad and (not bare.is_leaf or any(bare is parameter for parameter in self._trained))

    def _check_nothing_lost(self) -> None:
        """Raise RuntimeError if a trained parameter is in no place of the model any more.

        One may stand in another: pruning and parametrizations put it there, and whoever puts a part into a container.
        """
        here = {id(parameter) for parameter in self._state.parameters().values()}
        lost = {id(parameter) for parameter in self._trained} - here
        if lost:
            check_not_replaced([place for place in self._places if place.holds_any(lost)])

    def _lacks_any(self) -> bool:
        """Whether a trained parameter is in no place of the model any more, or is frozen."""
        now = {id(parameter) for parameter in self._state.trained().values()}
        return any(id(parameter) not in now for parameter in self._trained)

    def _knows_all_trained(self) -> bool:
        known = {id(parameter) for parameter in self._trained}
        return all(id(parameter) in known for parameter in self._state.trained().values())

    def _take_contents(self) -> None:
        """Compare with what stands in each module now, from the next look on."""
        parts = [part for _, part in self._state.modules()]
        trained = {*map(id, self._trained)}
        # Also what has come without being trained, and may be later; not what is trained but for now.
        self._frozen = [
            parameter
            for parameter in self._state.parameters().values()
            if not parameter.requires_grad and id(parameter) not in trained
        ]
        self._contents = RememberedParts([held for part in parts for held in (part._modules, part._parameters)])
        self.dictionaries, self.lengths = self._contents.dictionaries, self._contents.lengths  # of all parts
        self._take_buffers()

    def _take_kinds(self) -> None:
        self._are_of_same_kind = torch_private.dynamo.guard_of(self._trained)
        self._grad_dtypes = [*map(_grad_dtype, self._trained)]  # which no guard of Dynamo's looks at

    def _take_buffers(self) -> None:
        parts = [part for _, part in self._state.modules()]
        self._around_buffers = RememberedParts([held for part in parts for held in (part._modules, part._buffers)])
        self._buffers = [*self._state.buffers().values()]


_UNCHANGED = Look()

_OPTIMIZERS = itertools.repeat(torch_private.tensors.OPTIMIZERS_IN_BACKWARD)
_requires_grad, _grad_dtype = operator.attrgetter("requires_grad"), operator.attrgetter("grad_dtype")


_Memory = tuple[object, ...]


def _memory(parameter: torch.Tensor) -> _Memory:
    dtypes = parameter.dtype, gradient_dtype(parameter)
    return dtypes, parameter.device, parameter.shape, parameter.stride()
