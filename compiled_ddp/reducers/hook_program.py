"""A communication hook, traced: the program that graphs take in and that hooks of gradients run."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from compiled_ddp import torch_private
from compiled_ddp.comm_hooks import CommHook, Ranks, StatefulHook
from compiled_ddp.passes.graph_edit import output_values, set_output_values
from compiled_ddp.passes.ops import LAUNCHES, all_gather, all_reduce, wait_tensor
from compiled_ddp.plan import gradient_dtype

_aten = torch.ops.aten
_clone = _aten.clone.default

# What stands for the collectives where a program runs on one rank alone, as if all ranks had the same tensors.
_ALONE: Mapping[object, Callable[..., torch.Tensor]] = {
    all_reduce: lambda tensor, *_: tensor.clone(),
    all_gather: lambda tensor, size, _: torch.cat([tensor] * size),
    wait_tensor: lambda tensor: tensor,
}
_CHECKED_ELEMENTS = 64  # of the bucket that a hook is tried with


def check_hook(hook: CommHook, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise TypeError or ValueError unless `hook` reduces gradients like those of every parameter; on whatever ranks.

    It is traced for each dtype and device, and run once there, so that an operator that is not made for one of them is
    found here and not in the first backward.
    """
    first_of: dict[tuple[torch.dtype, torch.device], str] = {}
    for name, parameter in parameters.items():
        first_of.setdefault((gradient_dtype(parameter), parameter.device), name)
    for (dtype, device), name in first_of.items():
        flat = example(_CHECKED_ELEMENTS, dtype, device)
        try:
            state = initial_state(hook, flat)
            HookProgram(hook, Ranks(2, "check"), flat, state).run_alone(torch.ones_like(flat), state)
            elementwise = elementwise_state(hook, dtype, device)
        except Exception as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(
                f"the communication hook {hook!r} cannot reduce gradients like those of parameter {name}, {dtype} on "
                f"{device}: {error} Let the hook convert what it is given, or use another one."
            ) from error
        if isinstance(hook, StatefulHook) and not elementwise.issuperset(hook.owed):
            raise ValueError(
                f"the communication hook {hook!r} has owed={hook.owed!r}, and of its {len(state)} tensors of state "
                f"those at {sorted(elementwise)} are floating point and as long as the bucket: name some of these."
            )


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """A flat buffer as hooks are given it: complex numbers are pairs of real ones. Shares the memory."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def example(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A bucket of `numel` gradients as a hook is given it, all zero."""
    return as_real(torch.zeros(numel, dtype=dtype, device=device))


@torch.no_grad()
def initial_state(hook: CommHook, flat: torch.Tensor) -> list[torch.Tensor]:
    """What `hook` keeps for a bucket like `flat` at first, in memory that nothing else has; empty without state."""
    if not isinstance(hook, StatefulHook):
        return []
    state: object = hook.initial_state(flat)
    if not isinstance(state, tuple | list) or not all(isinstance(tensor, torch.Tensor) for tensor in state):
        raise TypeError(f"{hook!r}.initial_state must return a tuple of tensors, found {_format_value(state)}.")
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in state]


def elementwise_state(hook: CommHook, dtype: torch.dtype, device: torch.device) -> frozenset[int]:
    """Which tensors of a hook's state have, whatever the bucket, one floating-point number for each of its elements.

    What they have of a parameter moves along with its gradients where these go into another bucket.
    """
    tried = []
    for numel in (_CHECKED_ELEMENTS, _CHECKED_ELEMENTS + 1):  # one alone may be as long as the bucket by chance
        flat = example(numel, dtype, device)
        state = initial_state(hook, flat)
        tried.append({n for n, t in enumerate(state) if t.shape == flat.shape and t.is_floating_point()})
    return frozenset(set.intersection(*tried))


class HookProgram:
    """What a hook does to buckets of one size, dtype and device.

    [Note: what a hook hands out is its own] Whatever the hook does with its arguments, the program writes into none of
    them, its new state shares no memory with anything, and its result none with its arguments. The state is contiguous,
    of the types that it had before. It is kept as it was where the result is not finite, which all ranks see alike,
    and where it would become so: one step that overflows is lost, and nothing after it.
    """

    def __init__(self, hook: CommHook, ranks: Ranks, flat: torch.Tensor, state: Sequence[torch.Tensor]) -> None:
        """Trace `hook` for buckets like `flat`. Raises TypeError or ValueError where it is not what a hook must be."""

        def run(gradients: torch.Tensor, *old: torch.Tensor) -> tuple[torch.Tensor, ...]:
            before = [tensor.clone() for tensor in old]  # the hook may write into what it is given
            results = hook(gradients, ranks, *old)
            reduced, *new = _checked(hook, results, [gradients, *before])
            return reduced, *_unless_not_finite(reduced, new, before)

        traced = torch_private.tracing.trace_functional(run, [flat, *state])
        self.graph: Graph = traced.graph
        if self.graph.find_nodes(op="get_attr"):
            raise ValueError(
                f"the communication hook {hook!r} reads a tensor that is none of its arguments: keep it as state of a "
                "compiled_ddp.comm_hooks.StatefulHook."
            )
        _leave_inputs_alone(self.graph)
        _set_result_apart(self.graph)
        nodes = list(self.graph.nodes)
        self.launches = [node for node in nodes if node.target in LAUNCHES]  # the same on every rank, in this order
        waited = {node for node in nodes if node.target is wait_tensor}
        for node in nodes:
            if not waited.isdisjoint(node.all_input_nodes):
                waited.add(node)
        # Where a collective needs another one's result, the others would have to be launched in between.
        several_rounds = any(node.target in LAUNCHES for node in waited)
        self.first = nodes if several_rounds else [node for node in nodes if node not in waited]
        self.then = [] if several_rounds else [node for node in nodes if node in waited]
        text = [str(self.graph), *(_format_value(node.meta["val"]) for node in self.graph.find_nodes(op="placeholder"))]
        self.identity = hashlib.sha256("\n".join(text).encode()).hexdigest()

    def inputs(self, flat: torch.Tensor, state: Sequence[torch.Tensor]) -> dict[Node, Any]:
        return dict(zip(self.graph.find_nodes(op="placeholder"), [as_real(flat), *state], strict=True))

    @torch.no_grad()
    def run(
        self,
        nodes: Sequence[Node],
        values: dict[Node, Any],
        instead: Mapping[object, Callable[..., Any]] | None = None,
    ) -> None:
        """Run some of the nodes, from and into `values`; `instead` has functions to call in place of operators."""
        with torch_private.tensors.without_autocast():  # the dtypes are those that the hook was traced with
            for node in nodes:
                if node.op == "call_function":
                    assert callable(node.target)
                    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = (instead or {}).get(node.target, node.target)(*args, **kwargs)

    def wait(self, values: Mapping[Node, Any]) -> None:
        """Wait for the collectives among `values`, whatever has become of their results; a no-op the second time."""
        for node in self.launches:
            if node in values:
                wait_tensor(values[node])

    @torch.no_grad()
    def launch_zeros(self, launched: int) -> list[torch.Tensor]:
        """Launch, with zeros, what a run that broke off after `launched` collectives has left; returns their results.

        None waits for another one's result, so that this rank need not compute anything.
        """
        results = []
        for node in self.launches[launched:]:
            assert callable(node.target)
            sent, *others = node.args
            assert isinstance(sent, Node)
            like = sent.meta["val"]
            results.append(node.target(torch.zeros(like.shape, dtype=like.dtype, device=like.device), *others))
        return results

    def results(self, values: Mapping[Node, Any]) -> list[torch.Tensor]:
        """The mean, and the new state."""
        return [values[node] for node in output_values(self.graph) if node is not None]

    def run_alone(self, flat: torch.Tensor, state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results where every rank has what this one has. No collective is started."""
        values = self.inputs(flat, state)
        self.run([*self.first, *self.then], values, _ALONE)
        return self.results(values)


def _checked(hook: CommHook, results: object, expected: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What a hook has returned, if it is like `expected`: gradients and state."""
    found = tuple(results) if isinstance(results, tuple | list) else (results,)
    if len(found) != len(expected) or not all(map(_alike, found, expected)):
        state = f", and {len(expected) - 1} tensors of state as they were given" if expected[1:] else ""
        raise TypeError(
            f"the communication hook {hook!r} must return the reduced gradients, {_format_value(expected[0])}{state}; "
            f"found {', '.join(map(_format_value, found))}."
        )
    return found


def _unless_not_finite(
    reduced: torch.Tensor, new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The new state where the result is finite; what was finite of it stays so."""
    kept = []
    good = _is_finite(reduced) if new else None
    for after, before in zip(new, old, strict=True):
        assert good is not None
        stays_so = _is_finite(after) | _is_finite(before).logical_not()
        kept.append(torch.where(good.to(after.device) & stays_so, after, before).contiguous())
    return kept


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all of it is, shape (). In two kernels, where `isfinite` takes five."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return tensor.abs().amax() < torch.inf  # not a number if any is not


def _leave_inputs_alone(graph: Graph) -> None:
    """Drop what is written into the program's inputs, which nothing reads any more, and so the copies of them."""
    inputs = set(graph.find_nodes(op="placeholder"))
    for node in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        if node.args[0] in inputs:
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=_clone):
        if node.args[0] in inputs and not node.kwargs:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _set_result_apart(graph: Graph) -> None:
    """Copy the result where it lies in memory of an input, or not from the beginning of its own without gaps."""
    result, *state = output_values(graph)
    assert result is not None
    value = result.meta["val"]
    taken = {torch_private.tensors.memory_of(node.meta["val"]) for node in graph.find_nodes(op="placeholder")}
    if torch_private.tensors.memory_of(value) in taken or not value.is_contiguous() or value.storage_offset():
        with graph.inserting_before(graph.output_node()):
            copied = graph.call_function(_clone, (result,), {"memory_format": torch.contiguous_format})
        copied.meta["val"] = value.clone(memory_format=torch.contiguous_format)
        set_output_values(graph, [copied, *state])


def _alike(found: object, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and _type(found) == _type(expected)


def _type(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _format_value(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    return repr(value)
