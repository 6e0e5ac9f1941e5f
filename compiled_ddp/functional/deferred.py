"""Updates that the next step makes: `pipeline_updates` where each rank has all of the optimizer's state."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compiled_ddp import torch_private
from compiled_ddp.functional.in_flight import InFlight
from compiled_ddp.functional.step_graph import Layout, Tensors
from compiled_ddp.functional.updates import GroupTensors, Made, Terms, noting_updates, rule_of, update_in_place
from compiled_ddp.plan import Bucket


@dataclass(frozen=True)
class Update:
    """One that is to be made of sums that are under way, on the terms of the step that has launched them."""

    layout: Layout
    optimizer: torch.optim.Optimizer
    params: Sequence[Tensor]  # in the order of the layout
    state: Mapping[str, Tensors]  # of those that it changes
    numbers: Sequence[Tensor]  # of each group
    factor: Tensor | None
    applies: Tensor | None

    def is_of(self, layout: Layout, state: Mapping[str, Tensors]) -> bool:
        """Whether a graph of this layout, which is given this state, makes it."""
        if layout != self.layout:
            return False
        return state is self.state or all(
            own.keys() == state[name].keys() and all(own[each] is state[name][each] for each in own)
            for name, own in self.state.items()
        )

    def make(self, gradients: Mapping[int, Tensor], skip: Tensor, made: Sequence[Made]) -> None:
        """With gradients by their places; without the parameters of updates that were `made` of it."""
        done = frozenset[int]().union(*(each.addresses for each in made))
        for number, (places, kind) in enumerate(zip(self.layout.places, self.layout.kinds, strict=True)):
            names = self.layout.names
            own = [n for n in places if names[n] in self.state and self.params[n].data_ptr() not in done]
            if not own:
                continue
            states = [self.state[names[place]] for place in own]
            needed = rule_of(self.optimizer).needed(kind)
            given = GroupTensors(
                [self.params[place].detach() for place in own],
                [gradients[place].to(self.params[place].dtype) for place in own],
                [[each[name] for each in states] for name in needed if name != "step"],
                [each["step"] for each in states] if "step" in needed else [],
            )
            terms = Terms(self.numbers[number], self.factor, skip, None)
            update_in_place(given, terms, type(self.optimizer).__name__, kind)


class DeferredUpdate(InFlight):
    """Sums of gradients that are under way, of which parameters and the optimizer's state are to be updated.

    Whoever needs parameters or state before the next step makes that update here.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, check_stale: bool) -> None:
        """Registers hooks with the optimizer, too, as what replaces its state reads none of it."""
        super().__init__(model, check_stale=check_stale)
        self._update: Update | None = None  # of what was launched last; None where that call has raised
        self._state: Mapping[str, Tensors] = {}  # of the latest one
        self._made: Sequence[Made] = ()  # by the graph that runs
        self._kept: list[Tensor] = []  # parameters as they are, while their memory is NaN
        land = weakref.WeakMethod(self.land)

        def before(*_: object) -> None:
            if (landing := land()) is not None:
                landing()

        optimizer.register_state_dict_pre_hook(before)
        optimizer.register_load_state_dict_pre_hook(before)
        torch_private.optimizers.register_own_step_pre_hook(optimizer, before)

    def before(self, layout: Layout, state: Mapping[str, Tensors]) -> Update | None:
        """What a graph of this layout, which is given this state, is to begin with; any other update is made here."""
        is_there = self._gathered and self._failure is None
        if is_there and self._update is not None and self._update.is_of(layout, state):
            return self._update
        self.land()
        return None

    def note(self, update: Update) -> None:
        """It is what comes of what was launched last."""
        if self._state is not update.state:
            self._memory = set()
        self._update, self._state = update, update.state

    def launched(self, buckets: tuple[Bucket, ...], results: list[Tensor]) -> list[Tensor]:
        self._update = None
        return super().launched(buckets, results)

    @contextlib.contextmanager
    def awaited_by_graph(self) -> Iterator[None]:
        with noting_updates() as self._made:
            try:
                with super().awaited_by_graph():
                    yield
            finally:
                self._made = ()

    def _begin(self, buckets: tuple[Bucket, ...]) -> tuple[list[Tensor], bool]:
        return [torch.zeros(each.numel, dtype=each.dtype, device=each.device) for each in buckets], False

    def _write(self, gathered: Sequence[Tensor], sound: Tensor) -> None:
        update, self._update = self._update, None
        if update is None:  # of a step that has raised
            return
        with torch.inference_mode(False), torch.no_grad():
            pairs = zip(self._buckets, gathered, strict=True)
            gradients = {each.index: bucket.view(each, flat) for bucket, flat in pairs for each in bucket.gradients}
            update.make(gradients, (~sound).float(), self._made)

    def _behind(self) -> Sequence[Tensor]:
        state = {} if self._update is None else self._update.state
        return [*self._parameters, *(each for own in state.values() for each in own.values())]

    def _show(self) -> None:
        super()._show()
        kept, self._kept = self._kept, []
        with torch.no_grad():
            for parameter, value in zip(self._parameters if kept else (), kept, strict=True):
                parameter.copy_(value)

    @torch.no_grad()
    def _spoil(self) -> None:
        self._kept = [parameter.detach().clone() for parameter in self._parameters]
        super()._spoil()
