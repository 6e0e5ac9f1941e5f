"""compile_ddp: averaging gradients inside the compiled backward graph."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.graph import compile_once, precompiled
from compiled_ddp.graph.backend import Entry
from compiled_ddp.graph.program import Bindings, Program, Segment, SegmentCall, SegmentCalls, call_captured
from compiled_ddp.graph.telling import Teller, describe
from compiled_ddp.graph.warmup import Choice
from compiled_ddp.options import CompilerKeywords, Options, part_options, takes_options
from compiled_ddp.plan import BucketPlan
from compiled_ddp.planning.cost_model import BackwardWork
from compiled_ddp.ranks.agreement import Description
from compiled_ddp.users_code import warn_user
from compiled_ddp.wrapper import DataParallelWrapper
from compiled_ddp.wrapping.ddp_arguments import DDPArguments, DDPKeywords, Device
from compiled_ddp.wrapping.parts import Lifecycle
from compiled_ddp.wrapping.warm_ups import WarmUps

# Graphs would come in the order of the threads, another one in every step.
_SEVERAL_DEVICES = "the model is on several devices, whose backwards autograd runs in threads of their own"


class CompileKeywords(CompilerKeywords, DDPKeywords, total=False):
    """Keyword arguments of `compile_ddp`: its options, and arguments of DDP."""


@takes_options(CompilerKeywords)
def compile_ddp(
    model: nn.Module,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    *,
    process_group: dist.ProcessGroup | None = None,
    find_unused_parameters: bool = False,
    **ddp_arguments: Unpack[CompileKeywords],
) -> "CompiledDDP":
    """Compile `model` for data-parallel training, with the gradients' all-reduces part of the backward graph.

    The training loop stays the ordinary one: `loss = ddp(x, y); loss.backward(); optimizer.step()`. After a backward
    each .grad is the mean over ranks, as under torch's DistributedDataParallel.

    Args:
        model: the model; it may have been through torch.compile or model.compile(). Its parameters and buffers are
            overwritten with those of the group's rank 0.
        device_ids: the model's GPU, to which each forward moves its inputs; None leaves them where they are.
        output_device: the same GPU, if given.
        dim: accepted for compatibility; inputs are not split.
        process_group: the ranks to average over; None is all of them.
        bucket_cap_mb: size of a bucket in MiB, at which it closes as under DDP. None plans the buckets with which a
            backward ends earliest, for the link and the device as they are measured here (docs/planner.md).
        first_bucket_mb: size of the first bucket, which decides how soon communication starts. None is 1 MiB where a
            `bucket_cap_mb` is given, and is planned where none is.
        bucket_cap_mb_list: the size of each bucket in MiB, in launch order; the last one applies to all further
            buckets. Replaces the two sizes above.
        calibration: what buckets are planned for, from `calibrate()` or `Calibration.load(path)`; None measures the
            link and the device here, where no size is given. The same on every rank.
        plan: the buckets of an earlier run, from `SavedPlan.load(path)`, in place of planning and of the sizes above;
            `ddp.plan.save(path)` writes them. Refused where it is not of this model. The same on every rank.
        embedding_rows: whether the gradient of an embedding is sent as those of its rows that are not zero, where that
            is fewer bytes, on CPUs with gloo; the sum is the same. None lets the measured link decide, where buckets
            are planned for it.
        broadcast_buffers: overwrite buffers with rank 0's at construction and at the start of a forward, by DDP's rule;
            None means True.
        forward_sync_buffers: DDP's newer name for the same, for forwards only: at construction buffers always become
            rank 0's. None leaves it to `broadcast_buffers`.
        init_sync: overwrite parameters and buffers with rank 0's at construction.
        find_unused_parameters: accepted for compatibility; unused parameters need no flag.
        static_graph: every step runs the same graph. A parameter may then get several gradients in one backward, by
            reentrant checkpoints that share it: where hooks reduce everything (`COMPILED_DDP_MODE=hooks`), as under
            EagerDDP.
        gradient_as_bucket_view: leave .grad as views of the buckets where they were None. False keeps them plain
            tensors where hooks reduce; where a graph does they are views at no cost.
        keep_buffers: keep the buckets' flat buffers from step to step. False gives them back when a forward begins, so
            that activations may use their memory once no .grad lies in it; each backward allocates them anew.
        reduction: how the ranks' gradients are combined: "mean", "sum", or "weighted", the mean weighted by what each
            rank passes to `set_weight`, for example its number of tokens.
        piggyback: names of the numbers that `piggyback()` sends along with the gradients and sums over ranks.
        comm_hook: reduces the buckets in place of an all-reduce, as part of the graph where there is one
            (`compiled_ddp.comm_hooks`).
        check_steps: what to do when ranks have begun different numbers of forwards, and so average different steps:
            "error" raises on every rank, "warn" warns once, "off" does not check.
        verify: when to prove that gradients were reduced, by checksums before and after, compared between ranks:
            "first" in the first backward, after a new graph, and while something is pending (`explain()` lists it);
            "always" in every backward; "off" never. A gradient that was not reduced raises on every rank.
        strict: raise where a graph cannot reduce its gradients, instead of falling back to hooks with a warning.
        smallest_graph_mb: if a backward runs several graphs, hooks reduce those with fewer MiB of gradients, in shared
            buckets: an all-reduce of their own would cost more than its overlap gains. 0 lets
            every graph reduce its own.
        warmup_chooses: let `warmup()` time the model compiled and eager, and run it eagerly, with hooks as under
            EagerDDP, if that is faster. Ignored with `strict` and with "aot_eager".
        compile_once: let one rank of a host compile each graph while the others wait and load the result from
            Inductor's cache. Ignored if that cache is off. False lets each rank compile for itself.
        backend: "inductor", or "aot_eager" for the same passes without code generation (debugging, fast tests).
        fullgraph: as in torch.compile. With it, or with `strict`, `nn.LSTM`, `nn.GRU` and `nn.RNN` are captured, step
            by step, which takes long to compile; otherwise they run eagerly, as under torch.compile, and hooks reduce
            them.
        dynamic: as in torch.compile.
        mode: as in torch.compile; an alternative to `options`.
        options: as in torch.compile. `{"compiled_ddp.naive": True}` keeps the reference program: one all-reduce for
            each gradient, unscheduled.
        **ddp_arguments: DDP's other arguments (docs/migration.md, "Arguments of the constructor").

    Raises:
        RuntimeError: torch.distributed is not initialised, the models differ between ranks, or torch is unsupported.
        TypeError, ValueError: the model or an option cannot be used; the message says what to do.

    `COMPILED_DDP_MODE=hooks` in the environment switches the passes off: the model is compiled as by torch.compile
    and hooks reduce its gradients. `COMPILED_DDP_COMPILE_ONCE=0` is `compile_once=False`, in functional steps too.
    """
    options, others = part_options(ddp_arguments, CompilerKeywords)
    others |= {"device_ids": device_ids, "output_device": output_device, "dim": dim}
    others |= {"find_unused_parameters": find_unused_parameters}
    return CompiledDDP(model, process_group, options, others)


class CompiledDDP(DataParallelWrapper):
    """The wrapper that `compile_ddp` returns: a module to call and train like the one it wraps."""

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None,
        options: Options,
        ddp_arguments: DDPArguments,
    ) -> None:
        self._calls = SegmentCalls()
        self._known_limits, self._given_up = 0, list[str]()  # what Dynamo captures no more
        self._fallen_back: set[str] = set()  # why
        self._choice = Choice()
        super().__init__(torch_private.modules.without_compile_wrapper(module), process_group, options, ddp_arguments)
        try:
            self._prepare_to_compile(self._settings.options)
        except BaseException:
            self.unwrap()
            raise

    def _wrap(self, module: nn.Module, options: Options, ddp_arguments: DDPArguments) -> None:
        CompiledDDP.__init__(self, module, None, options, ddp_arguments)

    def _check_and_describe(self, module: nn.Module) -> Description:
        description = super()._check_and_describe(module)
        if self._settings.options.backend == "inductor":
            precompiled.check_processor(torch_private.compiler_cache.folder())
        for part_name, part in self._setup.managed_state.wrappers_inside().items():
            bare = torch_private.modules.without_compile_wrapper(part)
            if isinstance(bare, nn.parallel.DistributedDataParallel) and not isinstance(bare, DataParallelWrapper):
                raise ValueError(
                    f"{part_name} is wrapped by torch's DistributedDataParallel, which would split the graphs around "
                    "it its own way: wrap that part with EagerDDP or compile_ddp, or the whole model with EagerDDP."
                )
        return description

    def _check_devices(self) -> None:
        if self._settings.options.strict and len(self._setup.managed_state.devices()) > 1:
            raise ValueError(f"strict=True wants graphs to reduce, and hooks do: {_SEVERAL_DEVICES}.")

    def _prepare_to_compile(self, options: Options) -> None:
        self._index_of_parameter: dict[int, int] = {}
        once = options.compile_once and compile_once.is_on() and options.backend == "inductor"
        name = type(self.module).__name__
        self.teller = Teller(self._runtime, name, backend=options.backend, compiles_once=once)
        if once:
            torch_private.vector_checks.remember()
            if self._runtime.communicator.rank == 0:
                precompiled.tell_if_foreign(self._runtime.communicator.world_size)
        policy = options.bucket_policy(self._runtime.communicator.world_size)
        index_of, naive = self._index_of_parameter, options.naive
        self._bindings = Bindings(self._runtime, self._managed, policy, index_of, self.teller, naive=naive)
        self._index_parameters()
        self._compiled = Entry(
            torch_private.captures.without_own_compilation(self.module),
            backend=options.backend,
            compiler_options=options.inductor_options(),
            fullgraph=options.fullgraph,
            dynamic=options.dynamic,
            # It takes ten times as long to compile them, step by step, as all else: only where graphs are asked for.
            recurrent=options.fullgraph or options.strict,
        )
        self._warm_ups = WarmUps(
            self._managed,
            self._settings,
            self._runtime,
            self._choice,
            self.teller,
            calls=self._calls,
            run_compiled=self._run_compiled,
        )

    def _index_parameters(self) -> None:
        self._index_of_parameter.clear()
        self._index_of_parameter |= {id(t): index for index, t in enumerate(self._runtime.parameters.tensors)}
        self._bindings.forget()
        self._runs_graphs = self._why_never_graph() is None  # asked in every call of a graph

    def _refreshed(self) -> None:
        self._index_parameters()

    def _why_not_graph(self) -> str | None:
        return self._why_never_graph() or self._choice.why_not_graph

    def _why_never_graph(self) -> str | None:
        """Why hooks reduce everything whatever a warm-up chooses: each of them compiles what might be chosen."""
        if self._setup.mode == "hooks":
            return "COMPILED_DDP_MODE=hooks"
        return _SEVERAL_DEVICES if len(self._managed.devices()) > 1 else None

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.begin_forward()
        run = self.module if self._choice.runs_eagerly else self._run_compiled
        outputs = run(*args, **kwargs)
        if torch.is_grad_enabled():
            self._runtime.end_forward(self._calls.take_forward())
        return outputs

    def _run_compiled(self, *args: Any, **kwargs: Any) -> Any:
        limits = torch_private.captures.recompile_limits()
        if limits.notes:
            limits.forget_if_reset()
        known = len(limits.notes)
        outputs = call_captured(self._compiled, args, kwargs, caller=self)
        if known != self._known_limits:  # another wrapper may have met them
            self._given_up = limits.given_up_in(self.module)
            self._known_limits = known
        for note in (*self._given_up, *limits.notes[known:]):
            self._fall_back(f"a part of the model runs without graphs: {note}")
        return outputs

    def _fall_back(self, why: str) -> None:
        if self._settings.options.strict and self._why_not_graph() is None:
            raise RuntimeError(f"{why}. compile_ddp(strict=True) does not fall back.")
        if why not in self._fallen_back:
            self._fallen_back.add(why)
            warn_user(f"{why}; hooks reduce its gradients.")

    # ---- compiling ahead ---------------------------------------------------------------------------------------------

    @torch_private.dynamo.untraced
    def warmup(self, *args: Any, **kwargs: Any) -> None:
        self._check_in_use()
        self._runtime.finish_broken_backward()
        if self._watched_model.look().changed and torch.is_grad_enabled():
            self._watched_model.take_changes()
        before = self._choice.runs_eagerly
        self._warm_ups.run(*self._settings.placed(args, kwargs), training=self.module.training)
        if self._choice.runs_eagerly is not before:
            self._runtime.reduction.agreed.leave_to_hooks(self._why_not_graph())
            self._runtime.reduction.forget_sequence()

    def _close(self, end: Lifecycle) -> None:
        super()._close(end)
        if end is Lifecycle.UNWRAPPED:
            torch_private.captures.restore_own_compilation(self.module)

    def _chosen(self) -> str:
        return str(self._choice)

    def _why_without_graphs(self) -> Sequence[str]:
        return sorted(self._fallen_back)

    def _work_of(self, plan: BucketPlan) -> BackwardWork | None:
        return self._bindings.work_of(plan)

    def _compiled_from(self) -> str:
        return describe(self.teller.compilations)

    # ---- told by segments --------------------------------------------------------------------------------------------

    def segment_captured(self, segment: Segment, inputs: Sequence[Any]) -> Program | None:
        if not self._runs_graphs or self._calls.stay_local:
            return None
        program = self._bindings.program(segment, inputs)
        smallest = self._settings.options.smallest_graph_bytes
        if program is not None and self._calls.follows_another and program.plan.nbytes < smallest:
            return None  # hooks reduce it, unless it shares parameters
        return program

    def segment_not_compiled(self, failure: str) -> None:
        self._fall_back(f"a graph of the model runs uncompiled, as {self._settings.options.backend} failed: {failure}")

    def segment_called(self, segment: Segment, inputs: Sequence[Any], node: Any) -> None:
        reduces = self._runs_graphs and not self._calls.stay_local
        call = self._bindings.call(segment, inputs, node) if reduces else None
        self._calls.note(segment, call)
        if call is not None:
            setattr(node, torch_private.autograd.CALL, call)
        elif reduces and segment.why_hooks is not None:
            self._bindings.report_left(inputs, segment.why_hooks)

    @property
    def _live_calls(self) -> Callable[[], Sequence[SegmentCall]]:
        return self._calls.live
