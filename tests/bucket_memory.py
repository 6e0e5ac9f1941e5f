"""What the code that Inductor writes for CUDA does to the memory of buckets: every element is written, once, before the
launch; nothing touches it until the wait; and what lies there is the plan's gradient, with the mean taken once.

Neither torch nor Triton runs. The wrapper that Inductor has written is run with stand-ins for tensors, which know only
which part of which memory they are; for library calls, which know from their schemas what they read and write; and for
kernels, whose text is read: which elements does each `tl.store` reach, and from which arguments comes what it stores.
What cannot be read so and touches a bucket is a fault, too. So is a gradient that comes from other inputs of the
backward than in the graph before the passes, which is how two exchanged ones are seen; where both come from the same
inputs and are of one size, no text can tell.
"""

import ast
import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

# Offsets from where a pointer points, or None where the text does not tell; asked for buckets alone.
Elements = Callable[[], "np.ndarray[Any, Any] | None"]
# Of what a value comes: inputs of the backward, each with how often it was multiplied by the mean's factor on the way.
Origin = frozenset[tuple[str, int]]
NOTHING: Origin = frozenset()
MOST_MEANS = 3  # counted no further, so that loops come to an end


@dataclass(frozen=True)
class Expected:
    """A gradient as the plan places it."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset_elements: int
    numel: int
    output: int  # its place in what the backward returns
    inputs: frozenset[str]  # of which the graph computes it, tensors alone


@dataclass(frozen=True)
class Write:
    """What a line stores. `elements()` are offsets in the memory, an offset as often as it is stored, or None."""

    line: str
    elements: "Elements"
    origin: Origin
    adds: bool  # to what lies there, which must have been written

    @functools.cached_property
    def bounds(self) -> tuple[int, int]:
        """The first element and the one behind the last."""
        elements = self.elements()
        return (0, 0) if elements is None or len(elements) == 0 else (int(elements.min()), int(elements.max()) + 1)


@dataclass(eq=False)
class Memory:
    """What is allocated once, or an input."""

    numel: int | None
    origin: Origin = NOTHING
    portions: dict[int, Origin] = field(default_factory=dict)  # of a workspace with several partial sums
    writes: list[Write] = field(default_factory=list)
    touched: list[tuple[str, str]] = field(default_factory=list)  # what was done to it, by which line
    launched_after: int | None = None  # writes; None before the launch
    in_flight: bool = False


def scaled(origin: Origin) -> Origin:
    """By the mean's factor."""
    return frozenset((name, min(count + 1, MOST_MEANS)) for name, count in origin)


class Faults:
    """Of one backward, in the order in which they were found."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, kind: str, what: str, line: str = "") -> None:
        text = f"{kind}: {what}" + (f", by `{line}`" if line else "")
        if text not in self.found:
            self.found.append(text)


class Run:
    """The wrapper's run: its statements in order, and what they do to memory."""

    def __init__(self, source: str, mean: float) -> None:
        self.lines = source.splitlines()
        self.mean = mean
        self.faults = Faults()
        self.launches: list[Memory] = []
        self.bound: list[tuple[str, Memory]] = []  # results of library calls and of tensor methods

    def line(self) -> str:
        """The statement of the wrapper that runs now."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename != "<wrapper>":
            assert frame.f_back is not None
            frame = frame.f_back
        return self.lines[frame.f_lineno - 1].strip()

    def read(self, tensor: "Tensor") -> Origin:
        self._touch(tensor, "read")
        memory = tensor.memory
        return memory.origin if tensor.portion is None else memory.portions.get(tensor.portion, memory.origin)

    def write(self, tensor: "Tensor", elements: Elements, origin: Origin, *, adds: bool) -> None:
        """`elements` are offsets from the tensor's own start."""
        memory, start = tensor.memory, tensor.offset

        def in_memory() -> "np.ndarray[Any, Any] | None":
            from_start = elements()
            return None if from_start is None or start is None else from_start + start

        self._touch(tensor, "written")
        memory.writes.append(Write(self.line(), in_memory, origin, adds))

    def write_all(self, tensor: "Tensor", origin: Origin, *, adds: bool = False) -> None:
        self.write(tensor, tensor.elements, origin, adds=adds)
        tensor.keep_origin(origin, adds=adds)

    def _touch(self, tensor: "Tensor", how: str) -> None:
        line = self.line()
        tensor.memory.touched.append((how, line))
        if tensor.memory.in_flight:
            self.faults.add("in flight", f"a bucket is {how} between its launch and its wait", line)

    def launch(self, tensor: "Tensor") -> "Tensor":
        memory = tensor.memory
        if memory.launched_after is not None:
            self.faults.add("launched twice", "a bucket", self.line())
        memory.launched_after, memory.in_flight = len(memory.writes), True
        self.launches.append(memory)
        return tensor

    def wait(self, tensor: "Tensor") -> "Tensor":
        if not tensor.memory.in_flight:
            self.faults.add("waited for", "what was not launched", self.line())
        tensor.memory.in_flight = False
        return tensor

    def result(self, origin: Origin) -> "Tensor":
        """Of a call that allocates what it returns."""
        memory = Memory(None, origin)
        self.bound.append((self.line(), memory))
        return Tensor(self, memory, None, None, None)


def _offsets(size: Sequence[int], stride: Sequence[int]) -> np.ndarray[Any, Any]:
    offsets = np.zeros(1, np.int64)
    for length, step in zip(size, stride, strict=True):
        offsets = (offsets[:, None] + np.arange(length) * step).ravel()
    return offsets


class Tensor:
    """A part of a memory; which part is unknown where a size or the offset is None.

    Any method returns something new that is computed from this, but for views and for what writes in place.
    """

    VIEWS = ("view", "permute", "transpose", "t", "reshape", "expand", "unsqueeze", "squeeze", "as_strided", "detach")

    def __init__(
        self, run: Run, memory: Memory, size: Sequence[int] | None, stride: Sequence[int] | None, offset: int | None
    ) -> None:
        self.run, self.memory, self.sizes, self.strides, self.offset = run, memory, size, stride, offset
        self.portion: int | None = None  # which of equal ones of a workspace

    @property
    def numel(self) -> int | None:
        return None if self.sizes is None else math.prod(self.sizes)

    def elements(self) -> "np.ndarray[Any, Any] | None":
        """Offsets from its own start."""
        return None if self.sizes is None or self.strides is None else _offsets(self.sizes, self.strides)

    def size(self) -> tuple[int, ...]:
        return tuple(self.sizes or ())

    def stride(self) -> tuple[int, ...]:
        return tuple(self.strides or ())

    def keep_origin(self, origin: Origin, *, adds: bool) -> None:
        """Of what has been written here: all that lies in the memory, or some of it."""
        whole = not adds and self.numel == self.memory.numel
        self.memory.origin = origin if whole else self.memory.origin | origin

    def part(self) -> "Tensor":
        """Some of it, or all of it in another shape."""
        part = Tensor(self.run, self.memory, None, None, None)
        part.portion = self.portion
        return part

    def __getitem__(self, index: object) -> "Tensor":
        part = self.part()
        if isinstance(index, slice):
            part.portion = index.start // (index.stop - index.start)
        return part

    def __iter__(self) -> Iterator["Tensor"]:
        raise TypeError("the wrapper unpacks a tensor")

    def __getattr__(self, name: str) -> Callable[..., "Tensor"]:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(self._method, name)

    def _method(self, name: str, *args: Any, **kwargs: Any) -> "Tensor":
        if name in self.VIEWS:
            return self.part()
        origin = _origin_of(self.run, (args, kwargs))
        if not name.endswith("_"):
            return self.run.result(self.run.read(self) | origin)
        if name in ("copy_", "fill_", "zero_"):
            self.run.write_all(self, origin)
            return self
        origin |= self.run.read(self)
        is_mean = name in ("mul_", "div_") and any(_is_mean(value, self.run.mean) for value in args)
        self.run.write_all(self, scaled(origin) if is_mean else origin, adds=True)
        if is_mean:
            self.memory.origin = scaled(origin)
        return self


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))


def _origin_of(run: Run, values: Any) -> Origin:
    return frozenset().union(*(run.read(tensor) for tensor in _tensors(values)))


def _is_mean(value: object, mean: float) -> bool:
    """Whether this is the mean's factor, or the world size."""
    return isinstance(value, int | float) and (math.isclose(value, mean) or math.isclose(value, 1 / mean))


# ---- library calls ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """A dotted name of torch.ops, as far as it has been read."""

    run: Run
    path: tuple[str, ...]

    def __getattr__(self, name: str) -> "Names":
        return Names(self.run, (*self.path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.run
        operator: Any = functools.reduce(getattr, self.path, torch.ops)
        if self.path[:2] == ("_c10d_functional", "all_reduce_"):
            return run.launch(args[0])
        if self.path[:2] == ("_c10d_functional", "wait_tensor"):
            return run.wait(args[0])
        overload = operator.default if hasattr(operator, "overloads") else operator
        arguments = overload._schema.arguments
        named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        shared = {a.name for a in arguments if a.alias_info is not None and not a.alias_info.is_write}
        origin = _origin_of(run, {name: value for name, value in named.items() if name not in written})
        for name in written & named.keys():
            for tensor in _tensors(named[name]):
                is_out = name.startswith("out")
                run.write_all(tensor, origin if is_out else origin | run.read(tensor), adds=not is_out)
        returns = overload._schema.returns
        if not returns:
            return None
        if any(result.alias_info is not None for result in returns):
            given = next(iter(written or shared))
            return named[given] if given in written else named[given].part()
        return Results(run, run.result(origin))


class Results(Tensor):
    """What a call returns, one tensor or several."""

    def __init__(self, run: Run, result: Tensor) -> None:
        super().__init__(run, result.memory, None, None, None)

    def __getitem__(self, _: object) -> Tensor:
        return self.part()


@dataclass(frozen=True)
class Libraries:
    """`extern_kernels`: what is given as `out` is written, all else is read."""

    run: Run

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        return functools.partial(self._call, name)

    def _call(self, name: str, *args: Any, out: Tensor | None = None, **factors: Any) -> Tensor:
        run = self.run
        first = _origin_of(run, args[0])
        for factor in ("beta",) if name in ("addmm", "baddbmm") else ():
            first = scaled(first) if _is_mean(factors.get(factor), run.mean) else first
        others = _origin_of(run, args[1:])
        others = scaled(others) if _is_mean(factors.get("alpha"), run.mean) else others
        if out is None:
            return run.result(first | others)
        run.write_all(out, first | others)
        return out


# ---- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel, of which only its text is known."""

    run: Run
    source: str

    @functools.cached_property
    def function(self) -> ast.FunctionDef:
        (function,) = (node for node in ast.parse(self.source).body if _is_kernel(node))
        return function

    def run_(self, *args: Any, stream: object = None, **kwargs: Any) -> None:
        names = [argument.arg for argument in self.function.args.args]
        given = dict(zip(names, args, strict=False)) | kwargs
        grid = args[len(names) :]
        if len(grid) > 1:
            given["BATCH"] = grid[1]  # which the text of a batched product tells from torch 2.12 on
        reading = Reading(self.run.mean, given)
        reading.statements(self.function.body)
        outside = {name: self.run.read(tensor) for name, tensor in given.items() if name in reading.loaded}
        written: dict[str, Origin] = {}
        for pointer, store in reading.stores.values():
            origin = frozenset(
                (source, min(count + means, MOST_MEANS))
                for name, means in store.origin
                for source, count in outside.get(name, NOTHING)
            )
            everywhere = given[pointer].elements if store.adds else store.elements  # where it adds, the data tells
            self.run.write(given[pointer], everywhere, origin, adds=store.adds)
            written[pointer] = written.get(pointer, NOTHING) | origin
            if store.portion is not None:
                given[pointer].memory.portions[store.portion] = origin
        for pointer, origin in written.items():
            given[pointer].keep_origin(origin, adds=False)
        for name in reading.escaped:
            given[name].memory.touched.append(("not understood", self.run.line()))


def _is_kernel(node: ast.stmt) -> bool:
    """Whether this is the function that is launched; others are its helpers."""
    if not isinstance(node, ast.FunctionDef):
        return False
    return any("triton" in ast.unparse(decorator) for decorator in node.decorator_list) and not node.name.startswith(
        "_triton_helper"
    )


@dataclass(frozen=True)
class Store:
    elements: Elements
    origin: Origin  # of pointers
    adds: bool
    portion: int | None = None  # of a workspace


class Reading:
    """What a kernel's text says, for the arguments that it is launched with.

    An axis (`xindex`, `r0_index`, a template's rows and columns) stands for all of its indices at once, each axis in a
    dimension of its own.
    """

    def __init__(self, mean: float, given: Mapping[str, Any]) -> None:
        self.mean = mean
        self.pointers = {name for name, value in given.items() if isinstance(value, Tensor)}
        self.numbers: dict[str, Any] = {name: value for name, value in given.items() if isinstance(value, int)}
        self.launched = dict(self.numbers)
        self.indices: dict[str, Any] = {}  # arrays of offsets, or booleans
        self.origins: dict[str, Origin] = {name: frozenset([(name, 0)]) for name in self.pointers}
        self.axes: list[str] = []
        self.constants: set[str] = set()  # names that hold the mean's factor
        self.loaded: set[str] = set()
        self.escaped: set[str] = set()
        self.stores: dict[int, tuple[str, Store]] = {}  # by the call's identity
        self.parts: dict[str, Origin] = {}  # what blocks of a cooperative reduction leave for each other, by name

    def statements(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assign(name, value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self._assign(name, value)
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                    self._calls_in(value)
                    for target in targets:
                        self._forget(target, self._origin(value))
                case ast.AugAssign(target=ast.Name(id=name), value=value):
                    self._calls_in(value)
                    self.origins[name] = self.origins.get(name, NOTHING) | self._origin(value)
                case ast.For(body=inner) | ast.While(body=inner):
                    for _ in range(2):  # what it carries over is known from the second time on
                        self.statements(inner)
                case ast.If(body=inner, orelse=otherwise):
                    self.statements(inner)
                    self.statements(otherwise)
                case ast.Expr(value=value):
                    self._calls_in(value)

    def _forget(self, target: ast.expr, origin: Origin) -> None:
        name = ast.unparse(target)
        self.indices.pop(name, None)
        self.origins[name] = origin

    def _assign(self, name: str, value: ast.expr) -> None:
        self._calls_in(value)
        self.origins[name] = self._origin(value)
        self.constants.discard(name)
        if any(isinstance(node, ast.Constant) and _is_mean(node.value, self.mean) for node in ast.walk(value)):
            self.constants.add(name)
        if name.endswith("numel") or name in ("M", "N", "BATCH"):
            number = self._evaluated(value)
            if number is not None:  # a launch covers no more than it is told of, a kernel no more than it knows of
                self.numbers[name] = min(number, self.launched.get(name, number))
            return
        axis = self._axis(name, value)
        index = axis if axis is not None else self._evaluated(value)
        if index is None:
            self.indices.pop(name, None)
        else:
            self.indices[name] = index

    def _axis(self, name: str, value: ast.expr) -> np.ndarray[Any, Any] | None:
        text = ast.unparse(value)
        prefix = name.removesuffix("index")
        length = None
        if name != prefix and prefix and ("arange" in text or "_offset" in text or "offset +" in text):
            length = self.numbers.get(f"{prefix}numel")
        elif text in ("rm[:, None]", "rn[None, :]"):
            length = self.numbers.get({"rm[:, None]": "M", "rn[None, :]": "N"}[text])
            name = text
        elif name == "idx_q" and "tl.program_id(1)" in text:  # of a batched product
            length = self.numbers.get("BATCH")
        if length is None:
            return None
        if name not in self.axes:
            self.axes.append(name)
        shape = [1] * 8
        shape[self.axes.index(name)] = length
        return np.arange(length).reshape(shape)

    def _evaluated(self, value: ast.expr) -> Any:
        """The indices or truths of an expression; None where they depend on what is loaded, or on more."""
        try:
            return _Evaluation({**self.numbers, **self.indices}).of(value)
        except _Unknown:
            return None

    def _origin(self, value: ast.expr) -> Origin:
        """Of which pointers an expression comes, and how often it was multiplied by the mean's factor."""
        if isinstance(value, ast.Name):
            return self.origins.get(value.id, NOTHING)
        if isinstance(value, ast.Call) and _is_load(value) and _start_of(value.args[0]) in self.parts:
            return self.parts[_start_of(value.args[0])]
        inner = [self._origin(child) for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr)]
        inner += [self._origin(child.value) for child in ast.iter_child_nodes(value) if isinstance(child, ast.keyword)]
        together = frozenset().union(*inner)
        if isinstance(value, ast.BinOp) and any(self._holds_mean(side) for side in (value.left, value.right)):
            return scaled(together)
        return together

    def _holds_mean(self, value: ast.expr) -> bool:
        named = isinstance(value, ast.Name) and value.id in self.constants
        return named or (isinstance(value, ast.Constant) and _is_mean(value.value, self.mean))

    def _calls_in(self, value: ast.expr) -> None:
        """Of what is loaded and stored, and of pointers that are given to anything else."""
        calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
        accounted: set[str] = set()
        for call in calls:
            name = ast.unparse(call.func)
            pointers = {pointer for argument in call.args[:1] for pointer, _ in self._pointer_of(argument)}
            if name == "tl.load":
                self.loaded |= pointers
            elif name == "tl.store" or name.startswith("tl.atomic_"):
                self._store(call, pointers, adds=name != "tl.store")
            else:
                continue
            accounted |= pointers
        named = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)} & self.pointers
        if calls and not named <= accounted:
            self.escaped |= named - accounted
            self.loaded |= named - accounted

    def _pointer_of(self, address: ast.expr) -> Origin:
        """The pointer that an address starts from."""
        return self.origins.get(_start_of(address), NOTHING)

    def _store(self, call: ast.Call, pointers: set[str], *, adds: bool) -> None:
        address, value, *rest = call.args
        mask: ast.expr = rest[0] if rest else ast.Constant(None)
        origin = frozenset().union(*(self._origin(part) for part in (value, mask))) | {
            found for found in self._origin(address) if found[0] not in pointers
        }
        if _start_of(address).endswith("_ws"):
            self.parts[_start_of(address)] = origin
        for pointer in pointers:
            if adds:
                origin |= {(pointer, 0)}
                self.loaded.add(pointer)
            portion = re.search(r"\+ (\d+) \* tl\.num_programs\(0\)", ast.unparse(address))
            self.stores[id(call)] = (
                pointer,
                Store(self._elements(address, mask), origin, adds, int(portion[1]) if portion else None),
            )

    def _elements(self, address: ast.expr, mask: ast.expr) -> Elements:
        """Of an address, where the mask is true, at this place of the text."""
        evaluation = _Evaluation({**self.numbers, **self.indices})

        def evaluated() -> "np.ndarray[Any, Any] | None":
            try:
                offsets, start = 0, address
                while isinstance(start, ast.BinOp):
                    offsets, start = offsets + evaluation.of(start.right), start.left
                unmasked = isinstance(mask, ast.Constant) and mask.value is None
                where = np.asarray(True if unmasked else evaluation.of(mask), bool)
            except _Unknown:
                return None
            every, kept = np.broadcast_arrays(np.asarray(offsets), where)
            return every[kept].ravel()

        return evaluated


def _is_load(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "tl.load"


def _start_of(address: ast.expr) -> str:
    """The name that an address starts from; empty where it starts from no name."""
    while isinstance(address, ast.BinOp):
        address = address.left
    return address.id if isinstance(address, ast.Name) else ""


class _Unknown(Exception):
    """An expression depends on more than indices."""


class _Evaluation:
    """Arithmetic on indices."""

    OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
        ast.Add: np.add,
        ast.Sub: np.subtract,
        ast.Mult: np.multiply,
        ast.FloorDiv: np.floor_divide,
        ast.Mod: np.mod,
        ast.BitAnd: np.logical_and,
        ast.BitOr: np.logical_or,
        ast.Lt: np.less,
        ast.LtE: np.less_equal,
        ast.Gt: np.greater,
        ast.GtE: np.greater_equal,
        ast.Eq: np.equal,
    }

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names

    def of(self, value: ast.expr) -> Any:
        match value:
            case ast.Constant(value=bool() | int() as number):
                return number
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in self.OPERATORS:
                return self.OPERATORS[type(op)](self.of(left), self.of(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in self.OPERATORS:
                return self.OPERATORS[type(op)](self.of(left), self.of(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.of(operand)
            case ast.Subscript(value=inner):  # [:, None] and the like
                return self.of(inner)
            case ast.Call(func=ast.Attribute(attr="to" | "broadcast_to", value=inner)) if not _is_tl(inner):
                return self.of(inner)
            case ast.Call(func=ast.Attribute(attr="broadcast_to"), args=[inner, *_]):
                return self.of(inner)
            case ast.Call(func=ast.Attribute(attr="full"), args=[_, ast.Constant(value=bool() as truth), *_]):
                return truth
        raise _Unknown(ast.unparse(value))


def _is_tl(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "tl"


# ---- running the wrapper ---------------------------------------------------------------------------------------------


def _run_wrapper(source: str, mean: float) -> tuple[Run, Sequence[Any]]:
    """Run the wrapper with stand-ins; what it did, and what it returned."""
    run = Run(source, mean)
    module = ast.parse(source)
    wrapper, kernels = [], {}
    for node in module.body:
        match node:
            case ast.FunctionDef(name=name) if name == "get_args" or name.startswith(("partition_", "call")):
                wrapper.append(node)
            case ast.ClassDef(name="Runner") | ast.Assign(targets=[ast.Name(id="runner" | "call")]):
                wrapper.append(node)
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(args=[_, ast.Constant(value=str() as text), *_])
            ):
                kernels[name] = text
    module.body = [node for node in wrapper if getattr(node, "name", "") != "get_args"]
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    names = _stand_ins(run, kernels, (name for name in used if name.startswith("assert_")))
    exec(compile(module, "<wrapper>", "exec"), names)
    return run, names["call"](_inputs(run, source))


def _inputs(run: Run, source: str) -> list[Any]:
    """Those that Inductor writes for a benchmark of its code, by name."""
    (get_args,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "get_args")
    values: dict[str, Any] = {}
    for statement in get_args.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[size, stride, *_])):
                shape, steps = ast.literal_eval(size), ast.literal_eval(stride)
                numel = 1 + sum((length - 1) * step for length, step in zip(shape, steps, strict=True))
                values[name] = Tensor(run, Memory(numel, frozenset([(name, 0)])), shape, steps, 0)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                values[name] = value
            case ast.Return(value=ast.List(elts=names)):
                return [values[ast.unparse(name)] for name in names]
    raise AssertionError("get_args returns no list")


def _stand_ins(run: Run, kernels: Mapping[str, str], assertions: Iterable[str]) -> dict[str, Any]:
    def empty_strided(size: Sequence[int], stride: Sequence[int], _: object) -> Tensor:
        return Tensor(run, Memory(math.prod(size)), size, stride, 0)

    def reinterpret(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        return Tensor(run, tensor.memory, size, stride, offset)

    def nothing(*_: object) -> None:
        return None

    operators = Names(run, ())
    library = SimpleNamespace(
        ops=operators,
        cuda=SimpleNamespace(_DeviceGuard=lambda _: nullcontext(), set_device=nothing),
        **{name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    )
    return {
        "torch": library,
        "aten": operators.aten,
        "math": math,
        "device": torch.device,
        "empty_strided_cuda": empty_strided,
        "reinterpret_tensor": reinterpret,
        "extern_kernels": Libraries(run),
        "get_raw_stream": nothing,
        **dict.fromkeys(assertions, nothing),
        "copy_if_misaligned": lambda tensor: tensor,
        "copy_misaligned": lambda tensor: tensor,  # its name in torch 2.12
        **{name: SimpleNamespace(run=Kernel(run, text).run_) for name, text in kernels.items()},
    }


# ---- what is claimed -------------------------------------------------------------------------------------------------


def faults_of(source: str, buckets: Sequence[tuple[int, Sequence[Expected]]], *, mean: float) -> list[str]:
    """What is wrong with the buckets of a generated backward; nothing, if all is right.

    `buckets` are the plan's: how many elements each has, and its gradients. `mean` is the factor that makes a sum over
    the ranks a mean.
    """
    run, returned = _run_wrapper(source, mean)
    faults = run.faults
    if [memory.numel for memory in run.launches] != [numel for numel, _ in buckets]:
        faults.add(
            "launches",
            f"expected buckets of {[numel for numel, _ in buckets]} elements, found "
            f"{[memory.numel for memory in run.launches]}",
        )
        return faults.found
    for number, (memory, (numel, gradients)) in enumerate(zip(run.launches, buckets, strict=True)):
        if memory.in_flight:
            faults.add("in flight", f"bucket {number} is returned before its wait")
        _check_coverage(run, number, memory, numel, gradients)
        for gradient in gradients:
            _check_origin(faults, memory, gradient)
            _check_output(faults, memory, gradient, returned)
    return faults.found


def _check_coverage(run: Run, number: int, memory: Memory, numel: int, gradients: Sequence[Expected]) -> None:
    written = _written(run.faults, number, memory, numel)
    of_gradients = np.zeros(numel, bool)
    for gradient in gradients:
        part = slice(gradient.offset_elements, gradient.offset_elements + gradient.numel)
        of_gradients[part] = True
        where = f"{gradient.name} in bucket {number}"
        missing = int((written[part] == 0).sum())
        unread = [line for line, result in run.bound if not any(how == "read" for how, _ in result.touched)]
        if missing == gradient.numel and unread:
            run.faults.add("bound instead of written", where, "; ".join(unread))
        elif missing:
            run.faults.add("never written", f"{missing} of {gradient.numel} elements of {where}")
        if (written[part] > 1).any():
            lines = [write.line for write in memory.writes if not write.adds and _within(write, gradient)]
            run.faults.add("written twice", where, "; ".join(lines))
    others = written[~of_gradients]
    if (others != 1).any():
        run.faults.add("never written", f"{int((others != 1).sum())} elements of no gradient in bucket {number}")


def _written(faults: Faults, number: int, memory: Memory, numel: int) -> "np.ndarray[Any, Any]":
    """How often each element of a bucket is written before its launch."""
    written = np.zeros(numel, np.int64)
    for write in memory.writes[: memory.launched_after]:
        elements = write.elements()
        if elements is None:
            faults.add("not understood", f"what is written to bucket {number}", write.line)
            continue
        inside = elements[(elements >= 0) & (elements < numel)]
        if len(inside) < len(elements):
            faults.add("beside", f"what is written to bucket {number} reaches beyond it", write.line)
        if not write.adds:
            written += np.bincount(inside, minlength=numel)
        elif not (written[inside] > 0).all():
            faults.add("added to nothing", f"bucket {number}, where nothing was written", write.line)
    for how, line in memory.touched:
        if how == "not understood":
            faults.add("not understood", f"what is done to bucket {number}", line)
    return written


def _within(write: Write, gradient: Expected) -> bool:
    start, beyond = write.bounds
    return start < gradient.offset_elements + gradient.numel and gradient.offset_elements < beyond


def _check_origin(faults: Faults, memory: Memory, gradient: Expected) -> None:
    """Whether a gradient comes of the inputs that it is computed of in the graph, and has been averaged once."""
    origins = [write.origin for write in memory.writes if _within(write, gradient)]
    origin = frozenset().union(*origins)
    found = {name for name, _ in origin}
    if not gradient.inputs <= found and found:
        missing = sorted(gradient.inputs - found)
        faults.add("exchanged", f"{gradient.name} should come of {missing}, and comes of {sorted(found)}")
    means = {count for name, count in origin if name.startswith(("tangents", "pending"))}
    if found and means != {1}:
        faults.add("mean", f"{gradient.name} is multiplied by {'/'.join(map(str, sorted(means)))} means, expected 1")


def _check_output(faults: Faults, memory: Memory, gradient: Expected, returned: Sequence[Any]) -> None:
    output = returned[gradient.output]
    found = None if output is None else (output.size(), output.stride(), output.offset)
    if (
        output is None
        or output.memory is not memory
        or found != (gradient.size, gradient.stride, gradient.offset_elements)
    ):
        faults.add("returned from elsewhere", f"{gradient.name}: found {found}")
