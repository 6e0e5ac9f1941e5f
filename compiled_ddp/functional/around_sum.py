"""A communication hook as whole steps take most: what it does to each element before one sum over ranks, and behind it.

So it needs to know of no bucket: what it makes of gradients is planned, summed, scattered and proven as gradients are,
and a compiler has it in the kernels that make them, and in those that read the sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from compiled_ddp.comm_hooks import CommHook, Ranks, StatefulHook
from compiled_ddp.functional.on_buckets import OnBuckets
from compiled_ddp.passes.graph_edit import is_elementwise, output_values
from compiled_ddp.passes.ops import all_reduce
from compiled_ddp.plan import gradient_dtype
from compiled_ddp.reducers.traced_hook import HookProgram, check_hook, example
from compiled_ddp.torch_private.tracing import outside_of_traces

_ELEMENTS = (64, 65)  # of the gradients that a hook is traced with: it may not ask how many there are


class NotAroundSum(ValueError):
    """Raised for a hook that is not elementwise around one sum."""


def hook_of_step(
    hook: CommHook, parameters: Mapping[str, Tensor], ranks: int, *, scatters: bool
) -> tuple["AroundSum | OnBuckets", list[str]]:
    """`hook` as a step takes it, and what ranks compare of it: what it does to gradients of these parameters.

    Raises TypeError or ValueError for what is no hook, and NotAroundSum for one on buckets where the step `scatters`.
    """
    around = AroundSum(hook)
    try:
        return around, around.check(parameters, ranks)
    except NotAroundSum:
        if scatters:
            raise
    on_buckets = OnBuckets(hook)
    return on_buckets, on_buckets.check(parameters, ranks)


class AroundSum:
    """A hook around the sum over so many ranks. It divides, and so what comes of the sum is the mean."""

    told = "Gradients"  # what it is given, in `explain()`

    def __init__(self, hook: CommHook) -> None:
        self.hook = hook
        self._programs: dict[tuple[torch.dtype, torch.device, int], _Program] = {}

    def check(self, parameters: Mapping[str, Tensor], ranks: int) -> list[str]:
        """What ranks compare: which hook, and what it does to gradients of these parameters.

        Raises TypeError or ValueError for what is no hook, and NotAroundSum for one on buckets.
        """
        if isinstance(self.hook, StatefulHook):
            raise _not_around(self.hook, "keeps tensors for each bucket from step to step")
        check_hook(self.hook, parameters)
        like = {(gradient_dtype(each), each.device) for each in parameters.values()}
        return sorted(self._program(dtype, device, ranks).program.identity for dtype, device in like)

    def sent(self, gradient: Tensor, ranks: int) -> Tensor:
        """What is summed of this rank's gradient."""
        program = self._program(gradient.dtype, gradient.device, ranks)
        return program.before(torch.view_as_real(gradient) if gradient.is_complex() else gradient)

    def mean(self, summed: Tensor, dtype: torch.dtype, ranks: int) -> Tensor:
        """The mean of gradients of this dtype, of the sum of what is sent of them."""
        mean = self._program(dtype, summed.device, ranks).behind(summed)
        return torch.view_as_complex(mean) if dtype.is_complex else mean

    def _program(self, dtype: torch.dtype, device: torch.device, ranks: int) -> "_Program":
        if (dtype, device, ranks) not in self._programs:
            with outside_of_traces():
                self._programs[dtype, device, ranks] = _Program.of(self.hook, dtype, device, ranks)
        return self._programs[dtype, device, ranks]


@dataclass(frozen=True)
class _Program:
    """The nodes of a hook before its sum and behind that, from `given` to `sent` and from `summed` to `mean`."""

    program: HookProgram
    given: Node
    sent: Node
    summed: Node
    mean: Node

    @classmethod
    def of(cls, hook: CommHook, dtype: torch.dtype, device: torch.device, ranks: int) -> "_Program":
        """Raises NotAroundSum where it is not elementwise around one sum."""
        programs = [HookProgram(hook, Ranks(ranks, "sum"), example(size, dtype, device), []) for size in _ELEMENTS]
        program, other = programs
        if str(program.graph) != str(other.graph):
            raise _not_around(hook, "does another thing for another number of elements")
        if [node.target for node in program.launches] != [all_reduce]:
            raise _not_around(hook, f"launches {len(program.launches)} collectives, or another one")
        (launch,), (given,) = program.launches, program.graph.find_nodes(op="placeholder")
        (summed,) = launch.users
        (mean,) = output_values(program.graph)
        assert mean is not None
        for node in (*program.first, *program.then):
            if node.op == "call_function" and node not in (launch, summed) and not _is_made_of(given, node):
                raise _not_around(hook, f"calls {node.target}")
        later = {*program.then}
        if any(not later.issuperset(node.all_input_nodes) for node in later - {summed}):
            raise _not_around(hook, "reads what it was given, or a number of its own, behind the sum")
        sent = launch.args[0]
        assert isinstance(sent, Node)
        if not sent.meta["val"].is_floating_point():
            raise _not_around(hook, f"sends {sent.meta['val'].dtype}, in which a sum is not proven")
        return cls(program, given, sent, summed, mean)

    def before(self, gradient: Tensor) -> Tensor:
        return self._run(self.program.first, self.given, gradient, self.sent)

    def behind(self, summed: Tensor) -> Tensor:
        return self._run(self.program.then, self.summed, summed, self.mean)

    def _run(self, nodes: Sequence[Node], into: Node, value: Tensor, result: Node) -> Tensor:
        values = {into: value}
        apart = (into, self.program.launches[0])
        self.program.run([node for node in nodes if node not in apart], values)
        return values[result]


def _is_made_of(given: Node, node: Node) -> bool:
    """Whether each element of a node's result is made of that at its place of what is `given`."""
    value, like = node.meta["val"], given.meta["val"]
    is_alike = value.shape == like.shape and value.device == like.device
    return is_alike and is_elementwise(node) and bool(node.all_input_nodes)


def _not_around(hook: CommHook, why: str) -> NotAroundSum:
    return NotAroundSum(
        "with pipeline_updates or shard_optimizer each rank has its share of the gradients, so a communication hook "
        "may do something to each element before and after one all-reduce, as bf16_compress, fp16_compress and "
        f"fp32_reduce of compiled_ddp.comm_hooks do, and {hook!r} {why}: leave out these options, or train with "
        "compile_ddp(model, comm_hook=...)."
    )
