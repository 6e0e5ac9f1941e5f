"""Random numbers of explicit generators in a traced step.

[Note: a generator is its state] A graph may run its operators in any order that its data allows, and a compiler merges
equal ones and drops those that nobody reads. So what draws from a generator becomes an operator that takes the state as
a tensor and returns the next one: each draw hangs on the one before it, and the last state is a result of the graph.
The numbers are those of the operator itself, on a generator of that state.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compiled_ddp import torch_private


@dataclass
class _TracedState:
    """A generator's state in a trace. Of a generator that is not made in the trace, `read` is what the graph reads."""

    generator: torch_private.tensors.GeneratorReference
    read: Tensor | None
    at_first: Tensor  # of the object, which nothing draws from while the step is traced
    now: Tensor


@dataclass(frozen=True)
class DrawnGenerator:
    """A generator that a graph draws from.

    `argument` is its place among the leaves of the step's arguments; other generators are the same in every call, and
    None where only the step itself has held it.
    """

    generator: torch.Generator | None
    argument: int | None
    read: Tensor | None

    def find(self, leaves: Sequence[Any]) -> torch.Generator | None:
        """In a call with these arguments."""
        return self.generator if self.argument is None else leaves[self.argument]

    def load(self, leaves: Sequence[Any]) -> None:
        """Let the graph begin with the generator's state."""
        generator = self.find(leaves)
        if generator is not None and self.read is not None:
            self.read.copy_(generator.get_state())

    def advance(self, leaves: Sequence[Any], state: Tensor) -> None:
        """Give it the state that the graph has ended with."""
        generator = self.find(leaves)
        if generator is not None:
            generator.set_state(state)


class TracedGenerators:
    """The generators that a step draws from while it is traced. [Note: a generator is its state]"""

    def __init__(self) -> None:
        self._states: list[_TracedState] = []
        self._latest: dict[int, _TracedState] = {}  # by the place in memory, which may be another's later

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """In here what draws from a generator is traced as an operator of its state."""
        with _Asking(self._note), _Drawing(self._draw):
            yield

    def fold_in(self, generator: torch.Generator, rank: int) -> torch.Generator:
        """As `fold_in_rank`, in the graph."""
        self._note(generator)
        traced = self._unchanged(generator)
        folded = torch.Generator(generator.device)
        with torch_private.tracing.below_transforms():
            traced.now, now = torch.ops.compiled_ddp.fold_in_rank.default(traced.now, generator.device, rank)
        self._add(folded, None, now)
        return folded

    def states(self) -> list[Tensor]:
        """What the graph has ended with."""
        return [traced.now for traced in self._states]

    def drawn(self, leaves: Sequence[Any]) -> list[DrawnGenerator]:
        """Each generator, in the order of `states`, once the step has been traced with arguments of these leaves."""
        found = []
        for traced in self._states:
            generator = traced.generator() if traced.generator.is_held_elsewhere else None
            argument = next((place for place, leaf in enumerate(leaves) if leaf is generator), None)
            held = generator if argument is None else None
            found.append(DrawnGenerator(held, None if generator is None else argument, traced.read))
        return found

    def _draw(self, generator: torch.Generator, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traced = self._unchanged(generator)
        result, traced.now = operator_of_state(operator)(traced.now, generator.device, *args, **kwargs)
        return result

    def _note(self, generator: torch.Generator) -> None:
        """Know the object that the step draws from: operators are given another one of the same state."""
        traced = self._latest.get(torch_private.tensors.place_of(generator))
        if traced is None or traced.generator() is not generator:
            state = _state(generator)
            self._add(generator, state, state)

    def _add(self, generator: torch.Generator, read: Tensor | None, now: Tensor) -> None:
        traced = _TracedState(torch_private.tensors.GeneratorReference(generator), read, _state(generator), now)
        self._latest[torch_private.tensors.place_of(generator)] = traced
        self._states.append(traced)

    def _unchanged(self, generator: torch.Generator) -> _TracedState:
        traced = self._latest[torch_private.tensors.place_of(generator)]
        if not _equal(traced.at_first, _state(generator)):
            raise RuntimeError(
                "a generator was given another state within a compiled step, between two draws: in the graph it would "
                "not be. Make a new one there, torch.Generator().manual_seed(seed), or seed it before the step."
            )
        return traced


def folded_in(generator: torch.Generator, rank: int) -> torch.Generator:
    """A generator made of one number of `generator`, and of a rank's."""
    device = generator.device
    drawn = torch.randint(2**62, (), dtype=torch.int64, device=device, generator=generator).item()
    mixed = hashlib.sha256(f"{drawn} {rank}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(mixed[:7], "little"))


def _state(generator: torch.Generator) -> Tensor:
    with torch_private.tracing.outside_of_traces():
        return generator.get_state()


def _equal(one: Tensor, other: Tensor) -> bool:
    with torch_private.tracing.outside_of_traces():
        return torch.equal(one, other)


def _generator_in(state: Tensor, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator


torch.library.define("compiled_ddp::fold_in_rank", "(Tensor state, Device generator, int rank) -> (Tensor, Tensor)")


@torch.library.impl("compiled_ddp::fold_in_rank", "CompositeExplicitAutograd")
def _fold_in_rank(state: Tensor, device: torch.device, rank: int) -> tuple[Tensor, Tensor]:
    """The next state, and that of the new generator."""
    generator = _generator_in(state, device)
    folded = folded_in(generator, rank)
    return generator.get_state(), folded.get_state()


@torch.library.register_fake("compiled_ddp::fold_in_rank")
def _fold_in_rank_fake(state: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(state), torch.empty_like(state)


@functools.cache
def operator_of_state(operator: Any) -> Any:
    """An operator that takes `(state, device, ...)` in place of a generator and returns (result, next state).

    It mutates nothing: what `operator` fills is copied first.

    Raises RuntimeError for an operator that mutates something else, or returns more than one tensor.
    """
    schema = operator._schema
    filled = [place for place, argument in enumerate(schema.arguments) if _is_written(argument)]
    if filled not in ([], [0]) or [str(returned.type) for returned in schema.returns] != ["Tensor"]:
        raise RuntimeError(f"{operator} cannot draw from a generator in a compiled step: draw without out=.")
    _, _, signature = str(schema).partition("(")
    taken = [part for part in signature.rpartition(") -> ")[0].split(", ") if not part.startswith("Generator")]
    parts = [part.replace("(a!)", "") for part in (taken[:-1] if taken[-1:] == ["*"] else taken)]
    name = f"compiled_ddp::draw_{schema.name.partition('::')[2]}_{schema.overload_name or 'default'}"

    def draw(state: Tensor, device: torch.device, /, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        generator = _generator_in(state, device)
        return _run(operator, bool(filled), generator, args, kwargs), generator.get_state()

    def draw_fake(state: Tensor, _: torch.device, /, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return _run(operator, bool(filled), None, args, kwargs), torch.empty_like(state)

    torch.library.define(name, f"({', '.join(['Tensor state', 'Device generator', *parts])}) -> (Tensor, Tensor)")
    torch.library.impl(name, "CompositeExplicitAutograd")(draw)
    torch.library.register_fake(name)(draw_fake)
    return getattr(torch.ops.compiled_ddp, name.partition("::")[2]).default


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _run(
    operator: Any, fills: bool, generator: torch.Generator | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    result: Tensor = operator(*((args[0].clone(), *args[1:]) if fills else args), generator=generator, **kwargs)
    return result


class _Asking(TorchFunctionMode):
    """Tells `note` of every generator that a function is called with."""

    def __init__(self, note: Callable[[torch.Generator], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        for value in (*args, *named.values()):
            if isinstance(value, torch.Generator):
                self._note(value)
        return function(*args, **named)


Draw = Callable[[torch.Generator, Any, tuple[Any, ...], dict[str, Any]], Any]


class _Drawing(torch_private.autograd.DispatchMode):
    """Hands every operator with a generator to `draw`, with its other arguments."""

    supports_higher_order_operators = True

    def __init__(self, draw: Draw) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = draw

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        given = [value for value in (*args, *named.values()) if isinstance(value, torch.Generator)]
        if not given:
            return operator(*args, **named)
        rest = tuple(value for value in args if not isinstance(value, torch.Generator))
        result = self._draw(given[0], operator, rest, {n: v for n, v in named.items() if n != "generator"})
        return args[0].copy_(result) if _is_written(operator._schema.arguments[0]) else result
