"""compile_ddp: averaging gradients inside the compiled backward graph."""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from compiled_ddp import torch_private
from compiled_ddp.agreement import Description
from compiled_ddp.capture import plan_segment, without_gradient
from compiled_ddp.comm_hooks import CommHook
from compiled_ddp.communicator import RankGroup
from compiled_ddp.ddp_arguments import DDPArguments, DDPKeywords, Device
from compiled_ddp.options import Options
from compiled_ddp.plain_graph import PlainGraph
from compiled_ddp.plan import GradientSpec, ReductionKind
from compiled_ddp.segment import VARIANTS, Segment, SegmentCall, weakly
from compiled_ddp.sparse_gradients import leaving_out
from compiled_ddp.warmup import Compiled, state_kept, timed, warm_up
from compiled_ddp.wrapper import DataParallelWrapper

# Graphs would come in the order of the threads, another one in every step.
_SEVERAL_DEVICES = "the model is on several devices, whose backwards autograd runs in threads of their own"


def compile_ddp(
    model: nn.Module,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    *,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float | None = None,
    first_bucket_mb: float = 1.0,
    bucket_cap_mb_list: Sequence[float] | None = None,
    broadcast_buffers: bool | None = None,
    forward_sync_buffers: bool | None = None,
    init_sync: bool = True,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    gradient_as_bucket_view: bool = True,
    reduction: ReductionKind = "mean",
    piggyback: Sequence[str] = (),
    comm_hook: CommHook | None = None,
    check_steps: str = "error",
    verify: str = "first",
    strict: bool = False,
    backend: str = "inductor",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **ddp_arguments: Unpack[DDPKeywords],
) -> "CompiledDDP":
    """Compile `model` for data-parallel training, with the gradients' all-reduces part of the backward graph.

    The training loop stays the ordinary one: `loss = ddp(x, y); loss.backward(); optimizer.step()`. After a backward
    each .grad is the mean over ranks, as under torch's DistributedDataParallel.

    Args:
        model: the model, also one that has been through torch.compile or model.compile(). Its parameters and buffers
            are overwritten by those of the group's rank 0.
        device_ids: the GPU of the model, where inputs are moved in each forward; None leaves them where they are.
        output_device: the same GPU, if given.
        dim: without effect, as inputs are not split.
        process_group: the ranks to average over; None is all of them.
        bucket_cap_mb: size of a bucket in MiB; None is 2, 8 or 25, by the speed of the link, which is measured here
            (`compiled_ddp.bucket_size`; docs/benchmarks.md, "Bucket size").
        first_bucket_mb: size of the first bucket, which decides how soon communication starts.
        bucket_cap_mb_list: a size in MiB for each bucket in order, the last one for all further ones too; in place of
            the two sizes above.
        broadcast_buffers: overwrite buffers by rank 0's at construction and at the begin of a forward, by DDP's rule;
            None is True.
        forward_sync_buffers: DDP's newer name for the same in forwards alone: buffers are rank 0's at construction in
            any case. None leaves it to `broadcast_buffers`.
        init_sync: overwrite parameters and buffers by rank 0's at construction.
        find_unused_parameters: accepted for compatibility; unused parameters need no flag.
        static_graph: every step runs the same graph. A parameter may then get several gradients in one backward, by
            reentrant checkpoints that share it: where hooks reduce everything (`COMPILED_DDP_MODE=hooks`), as under
            EagerDDP.
        gradient_as_bucket_view: leave .grad as views of the buckets where they were None. False keeps them plain
            tensors where hooks reduce; where a graph does they are views at no cost.
        reduction: what a synchronised backward makes of the ranks' gradients: their "mean", their "sum", or the mean
            "weighted" by what each rank gives to `set_weight`, for example its number of tokens.
        piggyback: names of numbers that `piggyback` sends along with the gradients, to be summed over ranks.
        comm_hook: reduces the buckets in place of an all-reduce, as part of the graph where there is one
            (`compiled_ddp.comm_hooks`).
        check_steps: what to do when ranks have begun different numbers of forwards, and so average different steps:
            "error" raises on every rank, "warn" warns once, "off" does not look.
        verify: when to prove that gradients were reduced, by checksums before and after, compared between ranks:
            "first" in the first backward, after a new graph, and while something is pending (`explain()` tells);
            "always" in every backward; "off" never. A gradient that was not reduced raises on every rank.
        strict: raise where a graph cannot serve, instead of falling back to hooks with a warning.
        backend: "inductor", or "aot_eager" for the same passes without code generation (debugging, fast tests).
        fullgraph: as in torch.compile.
        dynamic: as in torch.compile.
        mode: as in torch.compile; an alternative to `options`.
        options: as in torch.compile. `{"compiled_ddp.naive": True}` keeps the reference program: one all-reduce for
            each gradient.
        **ddp_arguments: DDP's other arguments (`compiled_ddp.ddp_arguments`; docs/migration.md, "Arguments of the
            constructor").

    Raises:
        RuntimeError: torch.distributed is not initialised, the models differ between ranks, or torch is unsupported.
        TypeError, ValueError: the model or an option cannot be used; the message says what to do.

    `COMPILED_DDP_MODE=hooks` in the environment switches the passes off: the model is compiled as by torch.compile
    and hooks reduce its gradients.
    """
    return CompiledDDP(
        model,
        process_group,
        Options(
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_mb=first_bucket_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            broadcast_buffers=True if broadcast_buffers is None else broadcast_buffers,
            forward_sync_buffers=forward_sync_buffers,
            init_sync=init_sync,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            reduction=reduction,
            piggyback=piggyback,
            comm_hook=comm_hook,
            check_steps=check_steps,
            verify=verify,
            strict=strict,
            backend=backend,
            fullgraph=fullgraph,
            dynamic=dynamic,
            mode=mode,
            options=options,
        ),
        {
            "device_ids": device_ids,
            "output_device": output_device,
            "dim": dim,
            "find_unused_parameters": find_unused_parameters,
            **ddp_arguments,
        },
    )


class CompiledDDP(DataParallelWrapper):
    """What `compile_ddp` returns: a module to call and train like the one it wraps."""

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None,
        options: Options,
        ddp_arguments: DDPArguments,
    ) -> None:
        self._calls: list[weakref.ref[SegmentCall]] = []
        self._calls_of_forward: list[SegmentCall] = []
        self._plain_graphs: list[weakref.ref[PlainGraph]] = []
        self._warmups = 0
        super().__init__(torch_private.without_compile_wrapper(module), process_group, options, ddp_arguments)
        try:
            self._prepare_to_compile(options)
        except BaseException:
            self.unwrap()
            raise

    def _wrap(self, module: nn.Module, options: Options, ddp_arguments: DDPArguments) -> None:
        CompiledDDP.__init__(self, module, None, options, ddp_arguments)

    def _check_and_describe(self, module: nn.Module, name: str, ranks: RankGroup) -> Description:
        description = super()._check_and_describe(module, name, ranks)
        for part_name, part in self._own.wrappers_inside().items():
            if isinstance(torch_private.without_compile_wrapper(part), nn.parallel.DistributedDataParallel):
                raise ValueError(
                    f"{part_name} is wrapped by torch's DistributedDataParallel, which would split the graphs around "
                    "it its own way: wrap that part with EagerDDP or compile_ddp, or the whole model with EagerDDP."
                )
        return description

    def _check_devices(self, ranks: RankGroup) -> None:
        super()._check_devices(ranks)
        if self._options.strict and len(self._own.devices()) > 1:
            raise ValueError(f"strict=True wants graphs to reduce, and hooks do: {_SEVERAL_DEVICES}.")

    def _prepare_to_compile(self, options: Options) -> None:
        self._index_of_parameter: dict[int, int] = {}
        self._index_parameters()
        self._compiler_options = torch_private.inductor_options(options.mode, options.compiler_options, options.dynamic)
        compiled = torch.compile(
            torch_private.without_own_compilation(self.module),
            backend=weakly(self._compile_graph),  # Dynamo keeps it for good
            fullgraph=options.fullgraph,
            dynamic=options.dynamic,
        )
        # In a tuple, so that it is no submodule: the model has one place in this wrapper, `module`.
        self._compiled: tuple[Callable[..., Any]] = (
            leaving_out(self._own.sparse_modules(), torch_private.captured_as_it_is(compiled, self.module)),
        )

    def _index_parameters(self) -> None:
        for index, tensor in enumerate(self._runtime.parameters.tensors):
            self._index_of_parameter[id(tensor)] = index  # in place: captured segments hold on to it

    def _refresh(self) -> None:
        super()._refresh()
        self._index_parameters()

    def _hooks_reason(self) -> str | None:
        if self._mode == "hooks":
            return "COMPILED_DDP_MODE=hooks"
        if len(self._own.devices()) > 1:
            return _SEVERAL_DEVICES
        return None

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        self._calls_of_forward = []
        (compiled,) = self._compiled
        outputs = compiled(*args, **kwargs)
        if torch.is_grad_enabled():
            self._runtime.end_forward(self._calls_of_forward)
        self._calls_of_forward = []
        return outputs

    # ---- compiling ahead ---------------------------------------------------------------------------------------------

    @torch_private.untraced
    def warmup(self, *args: Any, **kwargs: Any) -> None:
        self._check_in_use()
        self._runtime.finish_broken_backward()
        if self._watch.look().changed and torch.is_grad_enabled():
            self._refresh()
        self._warmups += 1
        ranks = self._runtime.communicator.ranks
        args, kwargs = self._on_its_device(args, kwargs)
        with state_kept(self.module):
            warm_up(ranks, self._warmups, self._compile_ahead(args, kwargs))

    def _compile_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Compiled]:
        """Run the module, outside of any step, and compile the backwards of what it calls."""
        live, self._calls_of_forward = self._calls, []
        (compiled,) = self._compiled

        def run_forward() -> bool:
            compiled(*args, **kwargs)  # its graph goes with its outputs: no backward will ever reach it
            return True

        try:
            yield from timed("the forward", run_forward)
            segments = list(dict.fromkeys(call.segment for call in self._calls_of_forward))
        finally:
            self._calls, self._calls_of_forward = live, []
        for number, segment in enumerate(segments, start=1):
            graph = f"graph {number} of {len(segments)} ({len(segment.plan.indices)} gradients)"
            for variant in VARIANTS:
                compile_variant = functools.partial(segment.compile_ahead, variant)
                yield from timed(f"{graph}, {variant} backward", compile_variant)
        for reference in self._plain_graphs:
            plain = reference()
            if plain is not None:
                yield from timed("backward of a graph without trained parameters", plain.compile_ahead)

    def _called(self, call: SegmentCall) -> None:
        self._calls_of_forward.append(call)
        self._calls = [reference for reference in self._calls if reference() is not None]
        self._calls.append(weakref.ref(call))

    def _live_calls(self) -> Sequence[SegmentCall]:
        calls = [call for reference in self._calls if (call := reference()) is not None]
        return sorted(calls, key=lambda call: -call.serial)

    def _refuse_replaced(self, inputs: Sequence[Any]) -> None:
        sparse = self._own.sparse()
        names = {id(parameter): name for name, parameter in self._own.parameters().items() if name not in sparse}
        for value in inputs:
            if id(value) in names and value.requires_grad and id(value) not in self._index_of_parameter:
                raise RuntimeError(
                    f"parameter {names[id(value)]} was replaced or unfrozen after compile_ddp: nothing would reduce "
                    "its gradient. Call unwrap() and wrap the model again."
                )

    def _compile_graph(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The torch.compile backend: called by Dynamo once for every graph it captures."""
        self._refuse_replaced(example_inputs)
        without = without_gradient(graph_module.graph)
        gradients = {
            position: GradientSpec.of(position, value)
            for position, value in enumerate(example_inputs)
            if id(value) in self._index_of_parameter and value.requires_grad and position not in without
        }
        if self._hooks_reason() is not None or not gradients or not torch.is_grad_enabled():
            plain = PlainGraph(
                graph_module, example_inputs, backend=self._options.backend, compiler_options=self._compiler_options
            )
            self._plain_graphs.append(weakref.ref(plain))
            return plain
        return Segment(
            graph_module,
            example_inputs,
            plan_segment(graph_module.graph, gradients, self._options, self._runtime.communicator.world_size),
            self._runtime,
            index_of_parameter=self._index_of_parameter,
            leaves_alone=self._own.leaves_alone,
            backend=self._options.backend,
            compiler_options=self._compiler_options,
            naive=self._options.naive,
            called=self._called,
        )
