"""How long the backward of a captured forward graph computes until each gradient is ready: counted, not run.

Backward runs the graph in reverse, and the gradient of a parameter is ready behind the work of its first reader. An
operation with f floating-point operations takes f again for each of its operands with a gradient, that of a parameter
first, as the passes schedule it. Elementwise work, which compilers fuse, is counted by the memory of its results.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from compiled_ddp import torch_private
from compiled_ddp.formatting import quoted
from compiled_ddp.passes.schedule_collectives import emit_with_inputs
from compiled_ddp.planning.cost_model import BackwardWork, Work
from compiled_ddp.users_code import warn_user

_log = logging.getLogger(__name__)
_SEED = torch.ops.aten.ones_like.default


def count_backward(graph: Graph, gradient_order: Sequence[int]) -> BackwardWork:
    """What the backward of this graph of Dynamo's computes, by the shapes it was captured with."""
    nodes, count = list(graph.nodes), _Counter()
    placeholders = graph.find_nodes(op="placeholder")
    position = {node: place for place, node in enumerate(nodes)}
    read_first = {
        index: min((position[user] for user in placeholders[index].users), default=-1) for index in gradient_order
    }
    done, ready_behind = Work(), dict[int, Work]()  # by a node's position: once its parameters' gradients are there
    for place in reversed(range(len(nodes))):
        of_parameters, of_others = count.backward_of(nodes[place])
        ready_behind[place] = done + of_parameters
        done = ready_behind[place] + of_others
    ready_behind[-1] = done  # read by nobody
    return BackwardWork(tuple(ready_behind[read_first[index]] for index in gradient_order), done)


def count_gradients(gradients: Sequence[Node]) -> BackwardWork | None:
    """What a step that was traced operator by operator computes until each of these is there, in this order.

    Counted is what hangs on the seed of the derivative: what comes before it is the forward. None where there is none.
    """
    graph = gradients[0].graph
    hangs = dict.fromkeys(graph.find_nodes(op="call_function", target=_SEED))
    for node in graph.nodes:
        if not hangs.keys().isdisjoint(node.all_input_nodes):
            hangs[node] = None
    count, done, until_ready, ordered = _Counter(), Work(), list[Work](), dict[Node, None]()
    for gradient in gradients:
        before = len(ordered)
        emit_with_inputs(gradient, ordered)
        new = itertools.islice(reversed(ordered), len(ordered) - before)
        done = sum((count.of_operator(node) for node in new if node in hangs), done)
        until_ready.append(done)
    return BackwardWork(tuple(until_ready), done) if done.flops else None


def counted(count: Callable[[], BackwardWork | None]) -> BackwardWork | None:
    """None, with a warning, where counting fails: for an estimate no training is to stop."""
    try:
        return count()
    except Exception as error:
        warn_user(
            f"when a graph's gradients will be ready could not be counted, and is taken by sizes: {quoted(error)}"
        )
        return None


class _Counter:
    """Counts each kind of operation once: models have many of few shapes."""

    def __init__(self) -> None:
        self._flops: dict[object, float] = {}

    def backward_of(self, node: Node) -> tuple[Work, Work]:
        """The work of a node's backward: for the gradients of parameters, and for all others behind them."""
        if node.op not in ("call_function", "call_method"):
            return Work(), Work()
        inner = [work for graph in _graphs_in(node) for work in self._whole(graph)]
        if inner:
            return Work(), sum(inner, Work())
        operands = [source for source in node.all_input_nodes if _has_gradient(_value_of(source))]
        if not operands:
            return Work(), Work()
        flops = self._flops_of(node)
        if not flops:
            return Work(), Work(0.0, 2.0 * _nbytes(_value_of(node)))
        factors = [source for source in operands if _value_of(source).dim() > 1]  # a bias is added
        of_parameters = any(source.op == "placeholder" for source in factors)
        return Work(flops * of_parameters), Work(flops * (min(len(factors), 2) - of_parameters))

    def of_operator(self, node: Node) -> Work:
        """The work of an operator as it stands in a graph, where what is elementwise is fused with what reads it."""
        if getattr(node.target, "is_view", False):
            return Work()
        flops = self._flops_of(node)
        return Work(flops) if flops else Work(0.0, _nbytes(_value_of(node)))

    def _whole(self, graph: Graph) -> Iterator[Work]:
        """The backward of a graph inside, as of a checkpoint, and its forward once more."""
        for node in graph.nodes:
            yield from self.backward_of(node)
            if node.op in ("call_function", "call_method"):
                yield Work(self._flops_of(node), _nbytes(_value_of(node)))

    def _flops_of(self, node: Node) -> float:
        if not _may_multiply(node):
            return 0.0
        args, kwargs = _each_argument(node, _described)
        kind = repr((node.target, args, kwargs))
        if kind not in self._flops:
            self._flops[kind] = _run_counted(node)
        return self._flops[kind]


def _run_counted(node: Node) -> float:
    """The floating-point operations of a node, run on tensors without memory."""
    args, kwargs = _each_argument(node, _without_memory)
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    if node.op == "call_method":
        function = getattr(type(args[0]), str(node.target))
    try:
        # Only this way of computing attention is counted for every device.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            function(*args, **kwargs)
    except Exception as error:
        _log.debug("the operations of %s are not counted: %s: %s", node.format_node(), type(error).__name__, error)
        return 0.0
    return float(counter.get_total_flops())


def _each_argument(node: Node, function: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with what `function` makes of each, also of those in lists and dicts."""
    changed: Any = map_aggregate((node.args, node.kwargs), function)
    return changed[0], changed[1]


def _may_multiply(node: Node) -> bool:
    """Whether it is a function of torch's own with two tensors or more, which cannot do anything but compute."""
    tensors = [source for source in node.all_input_nodes if isinstance(_value_of(source), Tensor)]
    if len(tensors) < 2 or not isinstance(_value_of(node), Tensor | tuple | list):
        return False
    if node.op == "call_method":
        return hasattr(Tensor, str(node.target))
    if torch_private.dynamo.is_operator(node.target):
        return torch_private.dynamo.library_of(node.target) == "aten"
    module = getattr(node.target, "__module__", None) or "torch"
    return module in ("torch", "_operator", "torch.nn.functional", "torch._C._nn", "torch.functional")


def _graphs_in(node: Node) -> Iterator[Graph]:
    """Those that an operator of Dynamo's, such as a checkpoint, takes as arguments."""
    root = node.graph.owning_module
    for source in node.all_input_nodes:
        found = getattr(root, str(source.target), None) if source.op == "get_attr" and root is not None else None
        if isinstance(found, GraphModule):
            yield found.graph


def _value_of(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _nbytes(value: Any) -> float:
    values = value if isinstance(value, tuple | list) else [value]
    tensors = [each for each in values if isinstance(each, Tensor)]
    return float(sum(math.prod(_sizes(tensor.shape)) * tensor.element_size() for tensor in tensors))


def _sizes(numbers: Sequence[Any]) -> tuple[int, ...]:
    """What has none at capture counts as 1: it depends on values, or is ragged, as in nested tensors."""
    hints = map(torch_private.dynamo.size_hint, numbers)
    return tuple(hint if isinstance(hint, int) else 1 for hint in hints)


def _described(argument: Any) -> Any:
    value = _value_of(argument) if isinstance(argument, Node) else argument
    if isinstance(value, Tensor):
        return _sizes(value.shape), str(value.dtype)
    return torch_private.dynamo.size_hint(value)


def _without_memory(argument: Any) -> Any:
    value = _value_of(argument) if isinstance(argument, Node) else argument
    if isinstance(value, Tensor):
        return torch.empty(_sizes(value.shape), dtype=value.dtype, device="meta")
    return torch_private.dynamo.size_hint(value)
