"""The model of a wrapper between its forwards: whether it has changed, and taking it as it is now, on every rank."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from compiled_ddp.model.owners import mark_parts
from compiled_ddp.model.watch import Look, ModelWatch
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.agreement import Description, agree_on_description
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.wrapping.settings import Settings
from compiled_ddp.wrapping.setup import Setup

_of_wrappers_in_use: "weakref.WeakSet[WatchedModel]" = weakref.WeakSet()


class WatchedModel:
    """The model of one wrapper in use, until `close()`."""

    def __init__(
        self,
        setup: Setup,
        settings: Settings,
        runtime: Runtime,
        *,
        why_not_graph: Callable[[], str | None],
        refreshed: Callable[[], None],
    ) -> None:
        """`why_not_graph` tells why hooks reduce the model as it is, None if graphs do.

        `refreshed` is told when the runtime has other parameters.
        """
        self._setup, self._settings, self._runtime = setup, settings, runtime
        self._why_not_graph, self._refreshed = why_not_graph, refreshed
        self._refreshes = 0
        self._take_as_it_is()
        runtime.reduction.ask_for_newcomers(self.newcomers)
        self.to_broadcast: list[torch.Tensor] = []  # behind the backward of the forward that has used them
        self._added_before = 0  # so many synchronised backwards had begun then
        _of_wrappers_in_use.add(self)

    def _take_as_it_is(self) -> None:
        self._watch = ModelWatch(self._setup.managed_state, follows=self._settings.options.follows_model)
        self.has_grown = self._watch.has_grown

    def look(self) -> Look:
        """Compare the model with what it was when the wrapper was made, or when its changes were last taken.

        Raises RuntimeError or ValueError for what no wrapper can follow.
        """
        return self._watch.look()

    def newcomers(self) -> dict[str, nn.Parameter]:
        """What has been put into the model since the latest look at it and is to be trained, by name."""
        if not self.has_grown():  # as in most steps, which ask
            return {}
        known = {*map(id, self._runtime.parameters.tensors), *map(id, self._runtime.reduction.sparse.tensors)}
        trained = self._setup.managed_state.trained()
        return {name: parameter for name, parameter in trained.items() if id(parameter) not in known}

    def buffers(self) -> Sequence[torch.Tensor]:
        """Those that the wrapper looks after, as they are now: each once, in registration order."""
        return self._watch.buffers()

    def take_changes(self, *, in_forward: bool = False) -> None:
        """Let every wrapper of this process whose model has changed take it as it is: a collective of all ranks.

        All at once, in an order that ranks share: each one waits for all ranks, whose forwards may come in other
        orders. Raises where this one cannot; another one tries again in its own forward, and raises there.
        With `in_forward`, a forward has used what was added: rank 0's values of that come in the next one.
        """
        changed = [model for model in _of_wrappers_in_use if model._can_be_followed()]
        error: Exception | None = None
        for model in sorted(changed, key=lambda model: model._runtime.communicator.group_name):
            try:
                model._refresh(in_forward=in_forward)
            except Exception as refused:
                error = refused if model is self else error
        if error is not None:
            raise error

    def _can_be_followed(self) -> bool:
        """Whether the model has changed, in what no error keeps its wrapper from taking: that is its forward's."""
        try:
            return self.look().changed
        except (RuntimeError, ValueError):
            return False

    def broadcast_newcomers(self) -> None:
        """Before a forward with gradients: give every rank rank 0's values of what was added in an earlier one.

        Not before that one's backward, for which autograd has saved what is there.
        """
        if self._runtime.beginning.number > self._added_before:
            tensors, self.to_broadcast = self.to_broadcast, []
            self._setup.broadcast(tensors, self._runtime.communicator)

    def _refresh(self, *, in_forward: bool) -> None:
        """Take the model as it is now: on every rank before the same forward or backward, or an error on every rank."""
        self._refreshes += 1
        communicator = self._runtime.communicator
        agree_on_description(
            communicator.ranks,
            self._check_and_describe,
            occasion=f"refresh/{self._refreshes}",
            purpose="to compare the models of all ranks, as this rank's has changed since it was wrapped"
            + self._watch.in_what(),
            failure="the model has changed since it was wrapped, and its gradients cannot be reduced as it is",
        )
        kept, added = self._kept(), self._added()
        if self._settings.options.init_sync:
            if in_forward:
                self.to_broadcast += [parameter for _, parameter in added]
                self._added_before = self._runtime.beginning.number
            else:
                self._setup.broadcast([parameter for _, parameter in added], communicator)
        mark_parts(self._setup.managed_state)
        self._runtime.reduction.agreed.leave_to_hooks(self._why_not_graph())
        trained = [*kept, *added]
        self._runtime.reduction.retrain(TrainedParameters(tuple(n for n, _ in trained), tuple(p for _, p in trained)))
        self._take_as_it_is()
        self._refreshed()

    def _check_and_describe(self) -> Description:
        return self._setup.check_and_describe_parts(self._runtime.reduction.sparse.names)

    def _kept(self) -> list[tuple[str, nn.Parameter]]:
        """What the runtime reduces already, unless it is to forget what the model does not have any more."""
        known = self._runtime.parameters
        names = {id(parameter): name for name, parameter in self._setup.managed_state.parameters().items()}
        kept = [(names.get(id(p), before), p) for before, p in zip(known.names, known.tensors, strict=True)]
        if not self._settings.options.follows_model:
            return kept  # also what is gone keeps its place, which captured segments know
        return [(name, parameter) for name, parameter in kept if id(parameter) in names]

    def _added(self) -> list[tuple[str, nn.Parameter]]:
        known = {id(tensor) for tensor in self._runtime.parameters.tensors}
        return [(name, parameter) for name, parameter in self._setup.dense().items() if id(parameter) not in known]

    def close(self) -> None:
        """Take no changes any more."""
        _of_wrappers_in_use.discard(self)
