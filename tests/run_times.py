"""Whole run times of several ranks in one process, each with a thread in which its hooks see real backwards."""

import contextlib
import unittest.mock
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from in_process import parameters_of
from stand_in_graph import GraphRun
from torch import Tensor
from wire import PATIENCE_S, Wire, WiredCommunicator

from compiled_ddp import torch_private
from compiled_ddp.options import Options
from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.step.conductor import conductor
from compiled_ddp.step.reduction import Wrapped
from compiled_ddp.step.runtime import Phase, Runtime


class _Raises(torch.autograd.Function):
    """Raises in backward, where it `breaks`."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, breaks: bool) -> Tensor:
        context.breaks = breaks
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        if context.breaks:
            raise Broken("an exception of the user's")
        return gradient, None


class Broken(Exception): ...


class Call:
    """One call of a stand-in for a captured graph."""

    synchronise, may_leave_out, leaves_out = True, False, False

    def __init__(self, plan: BucketPlan) -> None:
        self.plan, self.fingerprint = plan, plan.fingerprint
        self.index_of, self.undefined = {index: index for index in plan.indices}, frozenset[int]()
        self._node: weakref.ref[Any] | None = None
        self.ran_locally_in: int | None = None

    def made(self, node: Any) -> None:
        self._node = weakref.ref(node)

    @property
    def is_alive(self) -> bool:
        return self._node is not None and self._node() is not None

    def will_run(self) -> bool:
        node = None if self._node is None else self._node()
        return node is not None and torch_private.autograd.backward_will_execute(node)

    def compile(self, *, folds: bool) -> None: ...

    def note_local_run(self) -> None:
        self.ran_locally_in = torch_private.autograd.current_graph_task()

    def has_run_locally(self) -> bool:
        return self.ran_locally_in == torch_private.autograd.current_graph_task()

    def is_still_to_run(self) -> bool:
        return not self.has_run_locally() and self.will_run()

    def note_defined(self, indices: Set[int]) -> None: ...

    def every_parameter(self) -> "Call":
        return self

    def take_all_in(self, whole: bool = True) -> None: ...

    def when_reached(self, tell: Callable[[Any], None]) -> None:
        """When the run time is closed, at the end of a test: no backward follows."""


class _Graph(torch.autograd.Function):
    """Reduces in its backward what the section that it reserves has; an exception may end it after `most` launches."""

    @staticmethod
    def forward(context: Any, rank: "RunTime", call: Call, most: int, *tensors: Tensor) -> Tensor:
        context.rank, context.call, context.most = rank, call, most
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(context: Any, _: Tensor) -> Any:  # type: ignore[override]
        rank, call, most = context.rank, context.call, context.most
        gradients: dict[int, Tensor] = {index: rank.values(index) for index in call.plan.indices}
        with rank.runtime.lock:
            reserved = rank.runtime.reserve(call)
            if reserved is not None:
                graph = GraphRun(reserved, call.plan, gradients, rank.communicator, most=most)
                if most <= len(call.plan.buckets):
                    graph.wait()  # as `wait_tensor` would, for whoever asks for a launched bucket
                    graph.reserved.break_off()
                    raise Broken("an exception of the user's")
                gradients = graph.complete()
        return None, None, None, *(gradients.get(index) for index in call.plan.indices)


class RunTime:
    """One rank's run time, with a thread of its own in which its hooks see real backwards."""

    def __init__(self, wire: Wire, rank: int, sizes: Sequence[int], options: Options) -> None:
        self.rank, self._thread = rank, ThreadPoolExecutor(1)
        self._calls: list[Call] = []
        parameters = parameters_of(sizes)
        self.tensors = parameters.tensors
        self.runtime = Runtime(
            Wrapped(
                parameters,
                parameters_of(()),
                WiredCommunicator(wire, rank),
                options,
                live_calls=lambda: [call for call in reversed(self._calls) if call.is_alive],
            )
        )
        self.reduction, self.communicator = self.runtime.reduction, self.runtime.communicator
        self.carried, self.agreed = self.reduction.carried, self.reduction.agreed

    def forward(
        self,
        *used: int,
        graph: Sequence[int] = (),
        most: int = 99,
        breaks_before: bool = False,
        breaks_after: bool = False,
    ) -> Tensor:
        """A loss whose gradients are `values` of the used parameters, and of those that a graph uses.

        Its backward may raise: before it has come to any parameter, after it has come to all, or in the graph when that
        has launched `most` buckets.
        """
        self.runtime.begin_forward(synchronise=True, counted=True)
        self.runtime.reduction.models_collectives.begin()
        output = _Raises.apply(torch.zeros((), requires_grad=True), breaks_after)  # its backward runs last
        for index in used:
            output = output + (self.tensors[index] * self.values(index)).sum()
        if graph:
            output = output + self._in_graph(graph, most)
        output = _Raises.apply(output, breaks_before)
        self.runtime.reduction.models_collectives.end()
        self.runtime.end_forward([call for call in self._calls if call.is_alive])
        self.runtime.watch([output])
        return output

    def _in_graph(self, indices: Sequence[int], most: int) -> Tensor:
        policy = self.reduction.options.bucket_policy(self.communicator.world_size)
        call = Call(policy.assign([GradientSpec.of(index, self.tensors[index]) for index in indices]))
        output = _Graph.apply(self, call, most, *(self.tensors[index] for index in indices))
        call.made(output.grad_fn)
        self._calls.append(call)
        return output

    def step(self, *used: int, tries: int = 1, **how: Any) -> None:
        """What an exception leaves to be sent follows, as it would before the next forward.

        A backward that the graph has broken off is run again, so often in all.
        """
        try:
            loss = self.forward(*used, **how)
            for _ in range(tries - 1):
                with contextlib.suppress(Broken):
                    return loss.backward(retain_graph=True)
            loss.backward()
        except BaseException:
            self.runtime.finish_broken_backward()
            raise

    def skip(self) -> None:
        self.runtime.begin_forward(synchronise=True, counted=True)
        conductor.skip([self.runtime])

    def values(self, index: int) -> Tensor:
        return torch.full((self.tensors[index].numel(),), 2.0 * index + 4.0 * self.rank + 2.0)

    def submit(self, call: "Callable[[RunTime], object]") -> "Future[object]":
        return self._thread.submit(call, self)

    def close(self) -> None:
        self._thread.shutdown()
        self.runtime.close("the test is over")


def together(ranks: Sequence[RunTime], *calls: Callable[[RunTime], object]) -> list[BaseException | None]:
    """Let each rank run its call, or all the one, at the same time; returns what each has raised."""
    calls = calls * len(ranks) if len(calls) == 1 else calls
    futures = [rank.submit(call) for rank, call in zip(ranks, calls, strict=True)]
    return [future.exception(timeout=2 * PATIENCE_S) for future in futures]


# ---- for tests -------------------------------------------------------------------------------------------------------

SIZES = (3, 2, 4)

Two = Callable[..., tuple[RunTime, RunTime]]


@contextlib.contextmanager
def makes_two_ranks() -> Iterator[Two]:
    """In this context no other wrappers are there than those of the ranks that this makes, with given options."""
    made: list[RunTime] = []

    def make(**options: Any) -> tuple[RunTime, RunTime]:
        wire = Wire(2)
        made.extend(RunTime(wire, rank, SIZES, Options(**{"bucket_cap_mb": 1, **options})) for rank in range(2))
        return made[-2], made[-1]

    with unittest.mock.patch.object(conductor, "references", []):
        yield make
        for rank in made:
            rank.close()


def uses(*indices: int, **how: Any) -> Callable[[RunTime], None]:
    return lambda rank: rank.step(*indices, **how)


ALL = uses(0, 1, 2)


def mean(index: int) -> Tensor:
    return torch.full((SIZES[index],), 2.0 * index + 4.0)


def forget_gradients(*ranks: RunTime) -> None:
    for rank in ranks:
        for tensor in rank.tensors:
            tensor.grad = None


EVERY = range(len(SIZES))


def assert_steps_well(*ranks: RunTime, step: Callable[[RunTime], None] = ALL, used: Collection[int] = EVERY) -> None:
    """The next step, without .grad, leaves the mean of the parameters that it has `used`, and nothing under way."""
    forget_gradients(*ranks)
    assert together(ranks, step) == [None, None]
    for rank in ranks:
        assert [index for index in EVERY if rank.tensors[index].grad is not None] == sorted(used)
        assert all(torch.equal(rank.tensors[index].grad, mean(index)) for index in used)  # type: ignore[arg-type]
        assert rank.runtime.under_way.phase is Phase.IDLE


def refined(
    two: Two, step: Callable[[RunTime], None] = ALL, *, used: Collection[int] = EVERY, **options: Any
) -> tuple[RunTime, RunTime]:
    """Two ranks after a first backward, without .grad."""
    ranks = two(**options)
    assert_steps_well(*ranks, step=step, used=used)
    forget_gradients(*ranks)
    return ranks
