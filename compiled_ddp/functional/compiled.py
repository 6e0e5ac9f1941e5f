"""A whole training step as one graph, whose reductions are launched and awaited inside of it."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.functional.closed_over import closed_over, generators_shared
from compiled_ddp.functional.operator import plan_of, spec_of
from compiled_ddp.functional.session import Session, tracing
from compiled_ddp.functional.traced_step import Leaf, TracedStep, trace
from compiled_ddp.passes.step_pipeline import StepPipeline
from compiled_ddp.passes.unfold_sums import arrival_order, find_sums
from compiled_ddp.plan import Bucket, BucketPlan
from compiled_ddp.torch_private.dynamo import untraced

Backend = Literal["inductor", "aot_eager"]


def compile(
    step: Callable[..., Any],
    *,
    donate: str | int | Sequence[str | int] = (),
    backend: Backend = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = True,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """`step`, a function of trees of tensors that calls `grad` or `grad_and_value`, as one compiled graph.

    Each bucket is launched behind its last gradient, and awaited where its sum is first read. Gradients of other
    ranks' shapes are compiled for by every rank alone.

    The step is traced with the first arguments of each kind (structure, shapes, dtypes, devices, values that are no
    tensors), and again where a number, tensor or function that it closes over is replaced. As with jax.jit, Python that
    has an effect besides the results runs only then. Results do not require gradients.

    Args:
        donate: arguments, by name or position, in whose memory results of the same shape, stride and dtype are written,
            each in the first that fits, in order. They are the results then: use them no more.
        backend: "inductor", or "aot_eager", which runs the same graph without compiling kernels.
        mode, options: as in torch.compile; for Inductor.
        fullgraph: True; the step is always one graph.
        dynamic: None or False; other shapes are another graph.

    Raises ValueError for arguments that are not as described; TypeError for `donate` that names no argument.
    """
    if backend not in ("inductor", "aot_eager"):
        raise ValueError(f'backend must be "inductor" or "aot_eager", found {backend!r}.')
    if not fullgraph or dynamic:
        raise ValueError("a functional step is one graph of fixed shapes: leave out fullgraph=False and dynamic=True.")
    given = torch_private.compiler_options.inductor_options(mode, options, dynamic)
    donated = (donate,) if isinstance(donate, str | int) else tuple(donate)
    compiled = CompiledStep(step, backend, given, donated)

    @functools.wraps(step)
    def compiled_step(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    return untraced(compiled_step)


class FlatBuffers:
    """Memory for the buckets of one compiled step, kept from call to call.

    [Note: nothing that leaves aliases what is kept] A step may return a bucket's part as it is, and only the compiled
    code tells: which results do is the same in every run of it, and is found in the first one.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self.memory = [torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device) for bucket in buckets]
        self._leaving: list[int] | None = None  # the places of those that results are parts of; None before a run

    def give_up(self, results: Sequence[Tensor]) -> None:
        """Take new memory for what `results` are parts of."""
        if self._leaving is None:
            held = {torch_private.tensors.memory_of(result) for result in results}
            places = range(len(self._buckets))
            self._leaving = [n for n in places if torch_private.tensors.memory_of(self.memory[n]) in held]
        for number in self._leaving:
            self.memory[number] = torch.empty_like(self.memory[number])


@dataclass(frozen=True)
class _Runnable:
    """A step, traced and compiled for one kind of arguments."""

    traced: TracedStep
    run: Callable[..., Any]
    session: Session
    flat_buffers: FlatBuffers

    def __call__(self, leaves: Sequence[Any]) -> Any:
        for each in self.session.reductions:
            each.reduction.begin_compiled(each.leading)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        with torch.no_grad():
            for generator in self.traced.generators:
                generator.load(leaves)
            given = [*(tensor.detach() for tensor in tensors), *self.traced.constants, *self.flat_buffers.memory]
            results = self._explained(given)
        first_state = len(results) - len(self.traced.generators)
        first_sums = first_state - len(self.session.runs)
        for each, sums in zip(self.session.runs, results[first_sums:first_state], strict=True):
            each.reduction.check(sums)
        for generator, state in zip(self.traced.generators, results[first_state:], strict=True):
            generator.advance(leaves, state)
        self.flat_buffers.give_up(results[:first_sums])
        return self.traced.rebuild(results[:first_sums], leaves)

    def _explained(self, inputs: list[Tensor]) -> list[Tensor]:
        if not self.session.reductions:
            return list(self.run(*inputs))
        first = self.session.reductions[0].reduction
        with first.communicator.explaining(first.name):
            return list(self.run(*inputs))


class CompiledStep:
    """What `compile` returns."""

    def __init__(
        self,
        step: Callable[..., Any],
        backend: Backend,
        options: Mapping[str, Any],
        donated: Sequence[str | int],
    ) -> None:
        self._step, self._backend, self._options, self._donated = step, backend, options, donated
        self._compiled: dict[Hashable, _Runnable] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = torch_private.trees.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        closed = closed_over(self._step)
        key = (structure, tuple(map(Leaf.of, leaves)), generators_shared(leaves, closed), closed, _ambient(tensors))
        if key not in self._compiled:
            self._compiled[key] = self._compile(args, kwargs)
        return self._compiled[key](leaves)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Runnable:
        session = Session()
        with tracing(session):
            traced = trace(self._step, args, kwargs, self._donated, session)
        plans = tuple(self._plans(traced, session))
        flat_buffers = FlatBuffers([bucket for plan, _ in plans for bucket in plan.buckets])
        traced = traced.add_inputs(flat_buffers.memory)
        pipeline = StepPipeline(plans, in_place=self._backend == "aot_eager", lent=True)
        rewriting = torch_private.inductor.rewriting_step(pipeline.run, pipeline.cache_identity)
        run = torch_private.inductor.compile_step(
            traced.graph_module, traced.inputs, backend=self._backend, options=self._options, rewriting=rewriting
        )
        return _Runnable(traced, run, session, flat_buffers)

    def _plans(self, traced: TracedStep, session: Session) -> list[tuple[BucketPlan, str]]:
        """Each reduction's plan, in the order in which rank 0's graph produces the gradients, and its group's name."""
        plans = []
        for node, each in zip(find_sums(traced.graph_module.graph), session.runs, strict=True):
            reduction = each.reduction
            order = reduction.agree_on_order(each.leaves, arrival_order(node))
            gradients, passengers = ([value.meta["val"] for value in given] for given in node.args[:2])  # type: ignore[union-attr]
            specs = tuple(spec_of(index, tuple(g.shape), g.dtype, g.device) for index, g in enumerate(gradients))
            ridden = sum(passenger.numel() for passenger in passengers)
            capacities_bytes = reduction.options.capacities_bytes
            plan = plan_of(specs, order, capacities_bytes, reduction.world_size, ridden)
            plans.append((plan, reduction.communicator.group_name))
        return plans


def _ambient(tensors: Sequence[Tensor]) -> Hashable:
    """What changes what operators do, besides their operands."""
    kinds = sorted({tensor.device.type for tensor in tensors})
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
