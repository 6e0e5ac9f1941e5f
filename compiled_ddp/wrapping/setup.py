"""What ranks check, agree on and broadcast before a wrapper's first step, and where its model has changed since."""

import weakref
from collections.abc import Callable, Collection

import torch
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.environment import check_environment
from compiled_ddp.model.checks import (
    broadcast_tensors,
    check_layouts,
    check_model,
    check_parts,
    check_writable,
    describe_model,
)
from compiled_ddp.model.managed import Contents, ManagedState
from compiled_ddp.model.owners import mark_parts, owner_of
from compiled_ddp.model.watch import ModelWatch
from compiled_ddp.options import Mode, mode_from_environment
from compiled_ddp.plan import gradient_dtype
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.agreement import Description, agree_on_description
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.kept_calibration import calibration_for
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.reducers.traced_hook import check_hook
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.users_code import warn_user
from compiled_ddp.wrapping.ddp_arguments import check_ddp_arguments, input_device
from compiled_ddp.wrapping.parts import Settings

# ---- before the first step -------------------------------------------------------------------------------------------


class Setup:
    """What all ranks must have in common, and what rank 0 gives to the others."""

    managed_state: ManagedState  # what the wrapper looks after
    contents: Contents  # all of it, when it was checked last
    mode: Mode

    def __init__(self, wrapper: str, settings: Settings, ranks: RankGroup, check_devices: Callable[[], None]) -> None:
        """`wrapper` is the name of its class; `check_devices` raises for devices that this class cannot use."""
        self._wrapper, self._settings, self._ranks, self._check_devices_too = wrapper, settings, ranks, check_devices

    def agree(
        self,
        module: nn.Module,
        check_and_describe: Callable[[nn.Module], Description],
        wrong_group: Exception | None,
    ) -> None:
        """Check and compare the model, or raise on every rank; a wrapper that it has already is closed then.

        `wrong_group` is the error of a rank that was given no ranks to average over.
        """
        before = owner_of(module)

        def describe() -> Description:
            if wrong_group is not None:
                raise wrong_group
            if before is not None:
                before.make_way()
            description = check_and_describe(module)
            if before is not None:
                before.warn_of(self._wrapper)  # which may be an error: then it is one on every rank
            return description

        agree_on_description(self._ranks, describe, failure="the model was not wrapped")
        if before is not None:
            before.be_replaced()

    def check_and_describe(self, module: nn.Module) -> Description:
        """Collect what ranks compare at construction. Raises an error that says what to do if `module` does not fit."""
        check_environment()
        options, ddp_arguments = self._settings.options, self._settings.ddp_arguments
        options.check()
        self.managed_state, self.contents = check_model(module, self._wrapper)
        check_layouts(self.contents, options)
        if options.init_sync:
            check_writable(self.contents)
        check_ddp_arguments(ddp_arguments, module, self._wrapper)
        self._settings.move_inputs_to(input_device(ddp_arguments, self.contents.devices))
        self._check_devices()
        self._check_plan()
        self._check_hook()
        sparse = self.contents.sparse
        if sparse and (options.comm_hook is not None or options.scaling is not None):
            raise ValueError(
                f"parameter {min(sparse)} has a sparse gradient, which takes part in no communication hook and in none "
                "of apex's scalings: pass sparse=False to its embedding."
            )
        self.mode = mode_from_environment()
        return {"wrapper": [self._wrapper], **describe_model(self.contents, options, self.mode, at_init=True)}

    def check_and_describe_parts(self, known_sparse: Collection[str]) -> Description:
        """As `check_and_describe`, for a model that has changed; `known_sparse` had sparse gradients before."""
        self.contents = self.managed_state.contents()
        check_parts(self.managed_state, self.contents)
        check_layouts(self.contents, self._settings.options)
        self._check_devices()
        self._check_plan()
        self._check_hook()
        added = sorted(self.contents.sparse.difference(known_sparse))
        if added:
            raise ValueError(
                f"parameter {added[0]} with a sparse gradient was added or unfrozen after the model was wrapped: call "
                "unwrap() and wrap the model again."
            )
        return describe_model(self.contents, self._settings.options, self.mode, at_init=False)

    def _check_devices(self) -> None:
        broadcast = (tensor.device for tensor in broadcast_tensors(self.contents, self._settings.options).values())
        torch_private.groups.check_backends(self._ranks.process_group, [*self.contents.devices, *broadcast])
        self._check_devices_too()

    def _check_plan(self) -> None:
        if self._settings.options.plan is not None:
            self._settings.options.plan.check(self.dense())

    def _check_hook(self) -> None:
        if self._settings.options.comm_hook is not None:
            check_hook(self._settings.options.comm_hook, self.dense())

    def dense(self) -> dict[str, nn.Parameter]:
        """The trained parameters with dense gradients, by name."""
        sparse = self.contents.sparse
        return {name: parameter for name, parameter in self.contents.trained.items() if name not in sparse}

    def by_rows(self) -> frozenset[str]:
        """The names of embeddings' weights whose gradients are summed by rows, when it is known what is planned for."""
        options, ranks = self._settings.options, self._ranks
        if not self.contents.embeddings or ranks.world_size == 1 or not ranks.is_gloo:
            return frozenset()
        return frozenset(
            name
            for name, weight in self.contents.by_rows.items()
            if options.sends_rows(name, len(weight), weight.numel() * gradient_dtype(weight).itemsize)
        )

    def sparse(self) -> dict[str, nn.Parameter]:
        """The trained parameters with sparse gradients, by name."""
        sparse = self.contents.sparse
        return {name: parameter for name, parameter in self.contents.trained.items() if name in sparse}

    def synchronise_state(self, communicator: Communicator) -> None:
        """Give every rank the parameters and buffers of rank 0, by DDP's rule."""
        if self._settings.options.init_sync:
            tensors: list[torch.Tensor] = list(self.contents.parameters.values())
            if self._settings.options.synchronise_buffers_at_init:
                tensors += self.contents.buffers.values()
            self.broadcast(tensors, communicator)

    @torch.no_grad()
    def broadcast(self, tensors: Collection[torch.Tensor], communicator: Communicator) -> None:
        """Overwrite `tensors` by rank 0's."""
        communicator.broadcast([tensor.detach() for tensor in tensors])

    def calibrate(self, communicator: Communicator) -> None:
        """Measure the link and the device where the user gives no size of a bucket, to plan for them. A collective."""
        given = self._settings.options.calibration
        if given is not None and given.world_size != communicator.world_size and communicator.rank == 0:
            warn_user(
                f"calibration= was measured with {given.world_size} ranks, and there are {communicator.world_size}: "
                "buckets are planned for the link that it describes. Run `compiled-ddp calibrate` with these ranks."
            )
        if self._settings.options.needs_calibration:
            with communicator.explaining("the link could not be measured"):
                device = next(iter(self.dense().values())).device
                self._settings.plan_for(calibration_for(communicator, device))


# ---- between forwards: whether the model has changed, and taking it as it is now, on every rank ----------------------

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
        self.to_broadcast: list[torch.Tensor] = []  # behind the backward of the forward that has used them
        self._added_before = 0  # so many synchronised backwards had begun then
        _of_wrappers_in_use.add(self)

    def _take_as_it_is(self) -> None:
        """Compare it from now on with what it is."""
        follows, reduction = self._settings.options.follows_model, self._runtime.reduction
        reduced = () if follows else (*reduction.parameters.tensors, *reduction.sparse.tensors)
        watch = ModelWatch(self._setup.managed_state, follows=follows, reduced=reduced)
        self.look, self.buffers, self.may_train_more = watch.look, watch.buffers, watch.may_train_more
        self.in_what = watch.in_what
        reduction.compare_with(watch)

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
        if self._runtime.number > self._added_before:
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
            + self.in_what(),
            failure="the model has changed since it was wrapped, and its gradients cannot be reduced as it is",
        )
        kept, added = self._kept(), self._added()
        if self._settings.options.init_sync:
            if in_forward:
                self.to_broadcast += [parameter for _, parameter in added]
                self._added_before = self._runtime.number
            else:
                self._setup.broadcast([parameter for _, parameter in added], communicator)
        mark_parts(self._setup.managed_state)
        self._runtime.reduction.agreed.leave_to_hooks(self._why_not_graph())
        trained = [*kept, *added]
        names, tensors = tuple(name for name, _ in trained), tuple(parameter for _, parameter in trained)
        parameters = TrainedParameters(names, tensors, self._setup.by_rows())
        communicator.sum_rows(parameters.rows)
        self._runtime.reduction.retrain(parameters)
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
