"""A model's description as Python source, and the source as a module.

Straight-line source of its own for every model: Dynamo caches by code object, so an interpreter of descriptions would
reach the recompile limit after some models and run eagerly from then on.
"""

import itertools
import linecache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuzz.description import Model, Op, parameters_of, walk
from fuzz.operators import EVERY, FUNCTIONS, SUMS, clamp_gradient

WIDTH = 3
FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
_numbers = itertools.count()


class BreakingBlock(nn.Module):
    """One code object, and so one graph of Dynamo's, serves all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH, **FLOAT), nn.Linear(WIDTH, WIDTH, **FLOAT)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.into(x.to(self.into.weight.dtype))).clamp(-3, 3)
        torch._dynamo.graph_break()
        return (x + self.out(x)).float().clamp(-3, 3)


class _Writer:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._methods: list[str] = []
        self._temporaries = itertools.count()
        self._asides = 0

    def write(self) -> str:
        body = self._body(self._model.ops)
        # An output that is the input itself has no node, and so no backward that could begin a synchronised one.
        results = ", ".join(["x", *(f"aside{n}" for n in range(self._asides))])
        forward = ["def forward(self, x):", "    x = x * 1", *body, f"    return {results}"]
        lines = ["class Generated(Base):", *(f"    {line}" for line in [*self._methods, *forward])]
        return "\n".join(lines) + "\n"

    def _body(self, ops: tuple[Op, ...]) -> list[str]:
        return [f"    {line}" for op in ops for line in self._lines(op)]

    def _lines(self, op: Op) -> list[str]:
        layer, vector = f"self.linear{op.key}", f"self.vector{op.key}"
        cast = f"x.to({layer}.weight.dtype)"
        match op.kind:
            case "linear":
                return [f"x = {layer}({cast}).float().clamp(-3, 3)"]
            case "scale":
                return [f"x = (x * {vector}).clamp(-3, 3)"]
            case "transposed":
                return [f"x = ({cast} @ {layer}.weight.t().reshape(-1).view(3, 3)).float().clamp(-3, 3)"]
            case "select":
                return [f"x = (x + {layer}.weight[1].float()).clamp(-3, 3)"]
            case "detached":
                return [f"x = (x + {layer}({cast}).detach().float()).clamp(-3, 3)"]
            case "reshaped":
                return ["x = x.t().reshape(-1).view(3, -1).t()"]
            case "in_place":
                return ["x = x.clone()", f"x.add_({vector})", "x[:, 0].mul_(2)", "x = x.clamp(-3, 3)"]
            case "nonlinear":
                return [f"x = {FUNCTIONS[op.variant % 3].__name__}.apply(x)"]
            case "activation_hook":
                return ["x = x * 1", "if x.requires_grad:", "    x.register_hook(clamp_gradient)"]
            case "break":
                here = ["torch._dynamo.graph_break()"]
                return [f"if self.rank in {op.ranks!r}:", f"    {here[0]}"] if op.ranks else here
            case "block":
                return [f"x = self.block{op.key}(x)"]
            case "all_reduce":  # over rows first, as ranks may have different numbers of them
                return [f"x = (x + {SUMS[op.variant % 3].__name__}(x.sum(0))).clamp(-3, 3)"]
            case "trap":
                return ["x = trap(x)"]
            case _:
                return self._lines_with_inner(op)

    def _lines_with_inner(self, op: Op) -> list[str]:
        match op.kind:
            case "branch":
                kept = f"kept{next(self._temporaries)}"
                inner = [line.removeprefix("    ") for line in self._body(op.inner)]
                return [f"{kept} = x", *inner, f"x = (x + {kept}).clamp(-3, 3)"]
            case "sometimes":
                return [f"if self.active == {op.variant == 0}:", *(self._body(op.inner) or ["    pass"])]
            case "checkpoint":
                return [f"x = checkpoint({self._method(op, [])}, x, use_reentrant={op.variant == 1})"]
            case "eager":
                return [f"x = {self._method(op, ['@torch.compiler.disable'])}(x)"]
            case "aside":
                kept, aside = f"kept{next(self._temporaries)}", f"aside{self._asides}"
                self._asides += 1
                inner = [line.removeprefix("    ") for line in self._body(op.inner)]
                return [f"{kept} = x", *inner, f"{aside} = x", f"x = {kept}"]
        raise ValueError(op.kind)

    def _method(self, op: Op, decorators: list[str]) -> str:
        name = f"part{next(self._temporaries)}"
        self._methods += [*decorators, f"def {name}(self, x):", *self._body(op.inner), "    return x", ""]
        return f"self.{name}"


def source_of(model: Model) -> str:
    """Python source of the class that the description stands for."""
    return _Writer(model).write()


class Base(nn.Module):
    """Parameters and switches of a generated model; all values are small integers, the same on every rank."""

    def __init__(self, model: Model, rank: int) -> None:
        super().__init__()
        self.rank, self.active = rank, True
        generator = torch.Generator("cpu").manual_seed(0)
        for name, key in sorted({read for op, _ in walk(model.ops) if (read := parameters_of(op))}):
            if name == "linear":
                dtype = getattr(torch, model.dtype_of(key))
                self.add_module(f"linear{key}", nn.Linear(WIDTH, WIDTH, dtype=dtype, device="cpu"))
            elif name == "block":
                self.add_module(f"block{key}", BreakingBlock())
            else:
                self.register_parameter(f"vector{key}", nn.Parameter(torch.empty(WIDTH, **FLOAT)))
        for number in range(model.unused):
            self.register_parameter(f"unused{number}", nn.Parameter(torch.empty(WIDTH, 2, **FLOAT)))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(
                    torch.randint(-1, 2, parameter.shape, generator=generator, dtype=torch.int64, device="cpu")
                )
        for key in model.frozen:
            if f"linear{key}" in dict(self.named_children()):
                self.get_submodule(f"linear{key}").requires_grad_(False)
        if rank in model.hooked_on:
            self._hook_weights(model.hooked)

    def _hook_weights(self, keys: tuple[int, ...]) -> None:
        for key in keys:
            layer = dict(self.named_children()).get(f"linear{key}")
            if layer is not None and layer.weight.requires_grad:
                layer.weight.register_hook(clamp_gradient)


def build(model: Model, rank: int) -> Base:
    """The module on `rank`. Tracebacks and debuggers show its source."""
    source = source_of(model)
    file = f"<random model {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {"torch": torch, "checkpoint": checkpoint, "Base": Base, **EVERY}
    exec(compile(source, file, "exec"), names)
    generated = names["Generated"]
    assert isinstance(generated, type) and issubclass(generated, Base)
    return generated(model, rank)
