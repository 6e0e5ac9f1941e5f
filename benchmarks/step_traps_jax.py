"""The traps of `benchmarks.step_traps` under jax.jit, in an environment with JAX alone (see `benchmarks.beside_jax`):

    python -m venv ~/jax && ~/jax/bin/pip install -r benchmarks/requirements-jax.txt
    ~/jax/bin/python -m benchmarks.step_traps_jax

Parameters, the optimizer's state and buffers go in and come out, as JAX has it. What the loop changes besides is closed
over, as a script's settings are, or passed: numbers as arrays, switches as static arguments. It is right where losses
and parameters are those of the same step without jit. Needs no torch.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.trap_scores import scores

jax.config.update("jax_enable_x64", True)  # as in `benchmarks.step_traps`
STEPS = 6
Tree = dict[str, Any]


_SWITCHES = ("is_training", "uses_spare", "frozen")


@dataclass
class Settings:
    """What a loop may change between steps."""

    weight: float = 1.0  # of the loss
    temperature: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    lr: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("first", "norm", "spare", "last"), 0.05))
    is_training: bool = True
    uses_spare: bool = False
    frozen: frozenset[str] = frozenset()
    key: Any = 0  # of dropout

    @property
    def switches(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in _SWITCHES)

    @property
    def numbers(self) -> Tree:
        return {name: value for name, value in vars(self).items() if name not in _SWITCHES}


def _loss(params: Tree, buffers: Tree, batch: tuple[Any, Any], now: Settings) -> tuple[Any, Tree]:
    x, y = batch
    hidden = x @ params["first"] / now.temperature
    if now.is_training:
        mean, var = hidden.mean(0), hidden.var(0)
        kept = {"norm": 0.9 * buffers["norm"] + 0.1 * jnp.stack((mean, var))}
    else:
        (mean, var), kept = buffers["norm"], {"norm": buffers["norm"]}
    hidden = jnp.tanh((hidden - mean) / jnp.sqrt(var + 1e-5) * params["norm"])
    keeps = jax.random.bernoulli(jax.random.key(now.key), 0.9, hidden.shape)
    hidden = jnp.where(keeps, hidden, 0.0) if now.is_training else hidden
    hidden = hidden @ params["spare"] if now.uses_spare else hidden
    return jnp.mean(((hidden @ params["last"])[:, 0] - y) ** 2) * now.weight, kept


def _step(params: Tree, state: Tree, buffers: Tree, batch: tuple[Any, Any], now: Settings) -> tuple[Any, ...]:
    """A step of AdamW."""
    (loss, buffers), gradients = jax.value_and_grad(_loss, has_aux=True)(params, buffers, batch, now)
    count, (b1, b2) = state["count"] + 1, now.betas
    params, first, second = {**params}, {**state["first"]}, {**state["second"]}
    for name, gradient in gradients.items():
        if name not in now.frozen:
            first[name] = b1 * first[name] + (1 - b1) * gradient
            second[name] = b2 * second[name] + (1 - b2) * gradient**2
            root = jnp.sqrt(second[name] / (1 - b2**count)) + now.eps
            decayed = params[name] * (1 - now.lr[name] * now.weight_decay)
            params[name] = decayed - now.lr[name] * first[name] / (1 - b1**count) / root
    return loss, params, {"count": count, "first": first, "second": second}, buffers


class Ordinary:
    """Without jit."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.compilations = settings, 0

    def step(self, *trees: Any) -> tuple[Any, ...]:
        return _step(*trees, self.settings)


class ClosedOver(Ordinary):
    """jax.jit of a step that reads the settings of the script."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)

        @jax.jit
        def step(*trees: Any) -> tuple[Any, ...]:
            self.compilations += 1
            return _step(*trees, settings)

        self.step = step  # type: ignore[method-assign]


class Passed(Ordinary):
    """jax.jit of a step that is given the settings."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)

        @functools.partial(jax.jit, static_argnames="switches")
        def step(*trees: Any, numbers: Mapping[str, Any], switches: tuple[Any, ...]) -> tuple[Any, ...]:
            self.compilations += 1
            return _step(*trees, Settings(**numbers, **dict(zip(_SWITCHES, switches, strict=True))))

        self._step = step

    def step(self, *trees: Any) -> tuple[Any, ...]:
        return tuple(self._step(*trees, numbers=self.settings.numbers, switches=self.settings.switches))


WAYS: dict[str, type[Ordinary]] = {"jax.jit, settings closed over": ClosedOver, "jax.jit, settings passed": Passed}


# ---- traps, by the names they have in `benchmarks.step_traps` --------------------------------------------------------


@dataclass
class Run:
    """What a trap may change before each step."""

    settings: Settings
    params: Tree
    state: Tree


Change = Callable[[Run, int], None]


def _once(**changed: Any) -> Change:
    """Before the fourth step."""

    def change(run: Run, number: int) -> None:
        if number == 3:
            for name, value in changed.items():
                setattr(run.settings, name, value)

    return change


def _lower_rate(run: Run, number: int) -> None:
    run.settings.lr = dict.fromkeys(run.settings.lr, 0.05 / (number + 1))


def _load_state(run: Run, number: int) -> None:
    if number == 3:
        run.state = jax.tree.map(np.array, run.state)


def _other_memory(run: Run, number: int) -> None:
    if number == 3:
        run.params["first"] = np.ones((6, 8))


TRAPS: dict[str, Change] = {
    "nothing changes": lambda run, number: None,
    "another learning rate in each step": _lower_rate,
    "other betas and eps": _once(betas=(0.5, 0.6), eps=1e-3),
    "another weight decay": _once(weight_decay=0.5),
    "the optimizer's state is loaded": _load_state,
    "another learning rate for some parameters": _once(lr={"first": 0.05, "norm": 0.05, "spare": 0.05, "last": 0.3}),
    "a parameter is frozen": _once(frozen=frozenset({"first"})),
    "other memory of a parameter": _other_memory,
    "eval()": _once(is_training=False),
    "a number of the loss, another in each step": lambda run, number: setattr(run.settings, "weight", 1.0 + number),
    "a number that forward reads": _once(temperature=2.0),
    "a part is used later": _once(uses_spare=True),
    "a last, smaller batch": lambda run, number: None,  # see `_taken`
    "dropout, a key for each step": lambda run, number: setattr(run.settings, "key", number),
}


def _taken(way: type[Ordinary], trap: str) -> tuple[list[Any], int]:
    """Losses and parameters behind each step; and how often it has compiled."""
    draw = np.random.default_rng(0)
    shapes = {"first": (6, 8), "norm": (8,), "spare": (8, 8), "last": (8, 1)}
    params: Tree = {name: draw.standard_normal(shape) for name, shape in shapes.items()}
    zeros = jax.tree.map(np.zeros_like, params)
    run = Run(Settings(), params, {"count": np.zeros(()), "first": zeros, "second": zeros})
    buffers: Tree = {"norm": np.stack((np.zeros(8), np.ones(8)))}
    taking, seen = way(run.settings), []
    for number in range(STEPS):
        rows = 3 if "smaller" in trap and number == STEPS - 1 else 5
        TRAPS[trap](run, number)
        batch = draw.standard_normal((rows, 6)), draw.standard_normal(rows)
        loss, run.params, run.state, buffers = taking.step(run.params, run.state, buffers, batch)
        seen.append(jax.tree.map(np.array, (loss, run.params, buffers)))
    return seen, taking.compilations


def _are_close(ours: Any, theirs: Any) -> bool:
    return bool(jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)))


def main() -> None:
    print("| trap |", " | ".join(WAYS), "|\n|---|" + "---|" * len(WAYS))
    for trap in TRAPS:
        found = scores(WAYS.values(), trap, taken=_taken, ordinary=Ordinary, are_close=_are_close)
        print("|", " | ".join([trap, *found]), "|", flush=True)


if __name__ == "__main__":
    main()
