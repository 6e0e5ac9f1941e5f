"""A communication hook, traced: the program that graphs take in and that hooks of gradients run, and its state."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from compiled_ddp import torch_private
from compiled_ddp.comm_hooks import CommHook, Ranks, StatefulHook
from compiled_ddp.passes.graph_edit import output_values
from compiled_ddp.passes.ops import LAUNCHES, wait_tensor
from compiled_ddp.plan import Bucket


def check_hook(hook: CommHook, parameter: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless `hook` reduces gradients like `parameter`'s; on whatever ranks."""
    flat = torch.zeros(64, dtype=parameter.dtype)
    HookProgram(hook, Ranks(2, "check"), flat, _initial_state(hook, flat))


class HookProgram:
    """What a hook does to buckets of one size, dtype and device."""

    def __init__(self, hook: CommHook, ranks: Ranks, flat: torch.Tensor, state: Sequence[torch.Tensor]) -> None:
        """Trace `hook` for buckets like `flat`. Raises TypeError or ValueError where it is not what a hook must be."""

        def run(gradients: torch.Tensor, *old: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = hook(gradients, ranks, *old)
            return tuple(results) if isinstance(results, tuple | list) else (results,)

        traced = torch_private.trace_functional(run, [flat, *state])
        self.graph: Graph = traced.graph
        self._check(hook, flat, state)
        nodes = list(self.graph.nodes)
        waited = {node for node in nodes if node.target is wait_tensor}
        for node in nodes:
            if not waited.isdisjoint(node.all_input_nodes):
                waited.add(node)
        # Where a collective needs another one's result, the others would have to be launched in between.
        several_rounds = any(node.target in LAUNCHES for node in waited)
        self.first = nodes if several_rounds else [node for node in nodes if node not in waited]
        self.then = [] if several_rounds else [node for node in nodes if node in waited]
        self.identity = hashlib.sha256(traced.code.encode()).hexdigest()

    def _check(self, hook: CommHook, flat: torch.Tensor, state: Sequence[torch.Tensor]) -> None:
        if self.graph.find_nodes(op="get_attr"):
            raise ValueError(
                f"the communication hook {hook!r} reads a tensor that is none of its arguments: keep it as state of a "
                "compiled_ddp.comm_hooks.StatefulHook."
            )
        outputs = output_values(self.graph)
        expected = [flat, *state]
        found = [node.meta.get("val") if isinstance(node, Node) else node for node in outputs]
        if len(found) != len(expected) or any(not _alike(*pair) for pair in zip(found, expected, strict=True)):
            raise TypeError(
                f"the communication hook {hook!r} must return the reduced gradients, {_words(expected[0])}"
                f"{f', and {len(state)} tensors of state as they were given' if state else ''}; "
                f"found {', '.join(map(_words, found))}."
            )


class BucketHook:
    """A wrapper's communication hook: its programs by size, and its state by bucket."""

    def __init__(self, hook: CommHook, ranks: Ranks, numel_of: Callable[[int], int]) -> None:
        """`numel_of` tells the number of a parameter's elements."""
        self._hook, self._ranks, self._numel_of = hook, ranks, numel_of
        self._programs: dict[tuple[int, torch.dtype, torch.device], HookProgram] = {}
        self._state: dict[tuple[int, ...], list[torch.Tensor]] = {}  # by the bucket's parameters
        self._latest: dict[int, tuple[int, ...]] = {}  # parameter -> the bucket that it came into last

    def program(self, bucket: Bucket) -> HookProgram | None:
        """None for a bucket of riders alone, which is reduced as it is."""
        if not bucket.gradients:
            return None
        kind = bucket.numel, bucket.dtype, bucket.device
        if kind not in self._programs:
            flat = _flat(bucket)
            self._programs[kind] = HookProgram(self._hook, self._ranks, flat, _initial_state(self._hook, flat))
        return self._programs[kind]

    def state(self, bucket: Bucket) -> list[torch.Tensor]:
        """What the hook keeps for a bucket over parameters.

        When gradients go into another bucket than before, what a state as long as the bucket has of them goes along:
        the error that a compression still owes is not lost.
        """
        if bucket.indices not in self._state:
            state = _initial_state(self._hook, _flat(bucket))
            for slot, tensor in enumerate(state):
                if tensor.shape == (bucket.numel,):
                    for gradient in bucket.gradients:
                        place = tensor.narrow(0, gradient.offset_elements, gradient.numel)
                        for before in self._places(gradient.index, slot):
                            place += before
                            before.zero_()
            self._state[bucket.indices] = state
            self._latest.update(dict.fromkeys(bucket.indices, bucket.indices))
        return self._state[bucket.indices]

    def _places(self, index: int, slot: int) -> Iterator[torch.Tensor]:
        """Where the states of other buckets keep something of this gradient."""
        for indices, state in self._state.items():
            numels = [self._numel_of(other) for other in indices]
            if index in indices and state[slot].shape == (sum(numels),):
                place = indices.index(index)
                yield state[slot].narrow(0, sum(numels[:place]), numels[place])

    def keep(self, bucket: Bucket, state: Sequence[torch.Tensor]) -> None:
        """Replace the state of a bucket."""
        if state:
            self._state[bucket.indices] = list(state)

    def begin(self, bucket: Bucket, flat: torch.Tensor) -> "HookedWork":
        """Reduce a bucket by hand: launch now; `wait` leaves the mean in `flat`."""
        program = self.program(bucket)
        assert program is not None
        return HookedWork(program, flat, self.state(bucket), functools.partial(self.keep, bucket))

    def state_dict(self, names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """The state of this rank, by the `names` of each bucket's parameters."""
        return {
            ",".join(names[index] for index in indices): state
            for indices, state in self._state.items()
            if any(self._latest[index] == indices for index in indices)
        }

    def load_state_dict(self, state: Mapping[str, Sequence[torch.Tensor]], names: Sequence[str]) -> None:
        """Take up what `state_dict` has returned. Raises KeyError for a parameter that is not there."""
        index_of = {name: index for index, name in enumerate(names)}
        self._state = {
            tuple(index_of[name] for name in bucket.split(",")): [tensor.clone() for tensor in tensors]
            for bucket, tensors in state.items()
        }
        self._latest = {index: indices for indices in self._state for index in indices}


class HookedWork:
    """What stands for the Work of an all-reduce where a hook has launched it: one run of its program by hand.

    In two parts: up to its collectives at once, and what comes after them in `wait`.
    """

    def __init__(
        self,
        program: HookProgram,
        flat: torch.Tensor,
        state: Sequence[torch.Tensor],
        keep: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        """`keep` is given the new state."""
        self._program, self._flat, self._keep = program, flat, keep
        inputs = program.graph.find_nodes(op="placeholder")
        self._values: dict[Node, Any] = dict(zip(inputs, [flat, *state], strict=True))
        self._run(program.first)

    def wait(self) -> None:
        """Leave the mean in the flat buffer; a no-op the second time."""
        if not self._values:
            return
        self._run(self._program.then)
        reduced, *state = (self._values[node] for node in output_values(self._program.graph) if node is not None)
        self._values.clear()
        with torch.no_grad():
            self._flat.copy_(reduced)
        self._keep(state)

    @torch.no_grad()
    def _run(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.op == "call_function":
                assert callable(node.target)
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
                self._values[node] = node.target(*args, **kwargs)


def _initial_state(hook: CommHook, flat: torch.Tensor) -> list[torch.Tensor]:
    return list(hook.initial_state(flat)) if isinstance(hook, StatefulHook) else []


def _flat(bucket: Bucket) -> torch.Tensor:
    return torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)


def _alike(found: object, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (expected.shape, expected.dtype)


def _words(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    return repr(value)
