"""Random programs under lossy communication hooks, with a model that changes and runs that are resumed.

Held is, after every step, that what is in .grad plus what is still owed is the mean of what the ranks have computed.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from hypothesis import strategies as st
from ledger import Ledger, owed_here
from models import gradient_copies, wrappers
from torch import Tensor

from compiled_ddp.comm_hooks import PowerSGD, Ranks, StatefulHook, TopK
from fuzz.description import Model, Program, Step, parameters_of, walk
from fuzz.ensemble import loss_of_output, values_of
from fuzz.source import build, source_of
from fuzz.strategy import programs
from fuzz.training import BFLOAT16_TOLERANCE, ROUNDED_TOLERANCE, change_parameters
from ranks import RankError, RankPool

POWER_TOLERANCE = 1e-4  # of factors in float32
COLLECTIVE_TIMEOUT_SECONDS, TIMEOUT_SECONDS = 60.0, 240.0  # wrapped and compiled up to three times


@dataclass(frozen=True)
class InBfloat16(StatefulHook):
    """A hook as users write them: 8 bits of each gradient, and the rest in the next step."""

    owed: ClassVar[tuple[int, ...]] = (0,)

    def initial_state(self, gradients: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(gradients),)

    def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> tuple[Tensor, ...]:
        (error,) = state
        error.add_(gradients)
        sent = error.to(torch.bfloat16)
        everyone = ranks.all_gather(sent).view(ranks.size, -1).to(gradients.dtype)
        return everyone.sum(0) / ranks.size, error.sub_(sent.to(gradients.dtype))


HOOKS: dict[str, StatefulHook] = {
    "top-k": TopK(0.3),
    "all": TopK(1.0),
    "power": PowerSGD(1),
    "bfloat16": InBfloat16(),
}


@dataclass(frozen=True)
class Event:
    """What happens on every rank between two steps."""

    kind: Literal["convert", "freeze", "train", "load", "resume"]
    key: int = 0  # of a layer
    dtype: str = "float32"
    wrapper: str = "EagerDDP"
    bucket_cap_mb: float = 1e-4


@dataclass(frozen=True)
class Compressed:
    program: Program
    hook: str = "top-k"
    wrapper: str = "compile_ddp"
    events: tuple[tuple[Event, ...], ...] = ()  # before each step


# ---- which are drawn -------------------------------------------------------------------------------------------------


def events() -> st.SearchStrategy[Event]:
    return st.builds(
        Event,
        st.sampled_from(["convert", "convert", "freeze", "train", "load", "resume"]),
        st.integers(0, 3),
        st.sampled_from(["float32", "float64"]),
        st.sampled_from(["EagerDDP", "compile_ddp"]),
        st.sampled_from([1.0, 1e-4, 5e-5]),
    )


def compressed_programs() -> st.SearchStrategy[Compressed]:
    """Of three steps at least, so that what is owed is sent."""

    def longer(program: Program, steps: list[Step]) -> Program:
        return replace(
            program, steps=(*program.steps, *(replace(program.steps[-1], eager_on=s.eager_on) for s in steps))
        )

    eager = st.sampled_from([(), (), (0, 1, 2), (1,), (0,)])
    turns = st.lists(eager.map(lambda ranks: Step(eager_on=ranks)), min_size=2, max_size=4)
    return st.builds(
        Compressed,
        st.builds(longer, programs(), turns),
        st.sampled_from(sorted(HOOKS)),
        st.sampled_from(["EagerDDP", "compile_ddp", "compile_ddp"]),
        st.lists(st.one_of(st.just(()), st.lists(events(), max_size=2).map(tuple)), max_size=6).map(tuple),
    )


# ---- one rank --------------------------------------------------------------------------------------------------------


class Run:
    """A compressed program on one rank, beside a twin of its model without a wrapper."""

    def __init__(self, compressed: Compressed, rank: int) -> None:
        self.compressed, self.rank = compressed, rank
        model = compressed.program.model
        self.twin = build(model, rank)
        self.ddp = self._wrap(compressed.wrapper, build(model, rank), 1e-4)
        self.ledger = Ledger(self.ddp, tolerance=self._tolerance(model))

    def _tolerance(self, model: Model) -> float:
        if "bfloat16" in model.dtypes:
            return BFLOAT16_TOLERANCE
        return POWER_TOLERANCE if self.compressed.hook == "power" else ROUNDED_TOLERANCE

    def _wrap(self, wrapper: str, module: torch.nn.Module, bucket_cap_mb: float) -> Any:
        sizes = {"bucket_cap_mb": bucket_cap_mb, "first_bucket_mb": 5e-5}
        return wrappers([wrapper])[wrapper](module, comm_hook=HOOKS[self.compressed.hook], **sizes)

    def run(self) -> Iterator[str]:
        """What goes wrong, in words."""
        for number, step in enumerate(self.compressed.program.steps):
            for event in self.compressed.events[number] if number < len(self.compressed.events) else ():
                self._happen(event)
                for change in self.ledger.changes(self.ddp):
                    yield f"before step {number}, {event}: {change}"
            for difference in self._step(step, number):
                yield f"step {number}: {difference}"
            for module in (self.ddp.module, self.twin):
                change_parameters(module)
        self.ddp.unwrap()

    def _happen(self, event: Event) -> None:
        layer = f"linear{event.key}"
        if event.kind == "load":
            self.ddp.load_comm_hook_state_dict(self.ddp.comm_hook_state_dict())
        elif event.kind == "resume":
            state = self.ddp.comm_hook_state_dict()
            self.ddp = self._wrap(event.wrapper, self.ddp.unwrap(), event.bucket_cap_mb)
            self.ddp.load_comm_hook_state_dict(state)
        elif hasattr(self.twin, layer) and (event.kind == "convert" or self._may_be_frozen(event.key)):
            for module in (self.ddp.module, self.twin):
                part = module.get_submodule(layer)
                if event.kind == "convert" and part.weight.dtype != torch.bfloat16:
                    part.to(getattr(torch, event.dtype))
                elif event.kind != "convert":
                    part.requires_grad_(event.kind == "train")

    def _may_be_frozen(self, key: int) -> bool:
        """Not what a graph and eager code read: docs/limits/refused.md, "A gradient from outside its graph"."""
        model = self.compressed.program.model
        readers = Counter(parameters_of(op) for op, _ in walk(model.ops))
        others = [name for name, p in self.twin.named_parameters() if p.requires_grad and f"linear{key}." not in name]
        within = [outer for op, outers in walk(model.ops) if parameters_of(op) == ("linear", key) for outer in outers]
        return readers["linear", key] == 1 and not within and key not in model.hooked and bool(others)

    def _step(self, step: Step, number: int) -> list[str]:
        def of_rank(values: tuple[int, ...]) -> int:
            return values[self.rank % len(values)]

        batches = [
            values_of(10 * number + n, self.rank, of_rank(step.rows))
            for n in range(of_rank(step.local) + step.forwards)
        ]
        local, synchronised = batches[: of_rank(step.local)], batches[of_rank(step.local) :]
        self.ddp.module.active = self.twin.active = self.rank in step.active_on
        if step.zero != "keep":
            self.ddp.zero_grad(set_to_none=step.zero == "none")
        used: set[str] = set()
        stance = torch.compiler.set_stance("force_eager") if self.rank in step.eager_on else contextlib.nullcontext()
        with stance:
            for x in local:
                used.update(name for name, gradient in self._of_twin([x]).items() if gradient is not None)
                with self.ddp.no_sync():
                    loss_of_output(self.ddp(x)).backward()
            before, owed = gradient_copies(self.ddp.module), owed_here(self.ddp)
            skips, here = self.rank in step.skipped_on, {}
            losses = [loss_of_output(self.ddp(x)) for x in synchronised] if not skips or step.skip_after_forward else []
            if skips:
                self.ddp.skip_step()
            else:
                torch.stack(losses).sum().backward()
                here = self._of_twin(synchronised)
        return self.ledger.differences(self.ddp, before, here, owed, used)

    def _of_twin(self, batches: list[Tensor]) -> dict[str, Tensor | None]:
        """This rank's gradients of one backward."""
        self.twin.zero_grad()
        torch.stack([loss_of_output(self.twin(x.detach().clone().requires_grad_())) for x in batches]).sum().backward()
        return gradient_copies(self.twin)


def train_compressed(rank: int, compressed: Compressed) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(Run(compressed, rank).run())


# ---- all ranks -------------------------------------------------------------------------------------------------------


def conserve(pool: RankPool, compressed: Compressed) -> None:
    """Raise AssertionError, with the program and its source, unless nothing is lost or counted twice in it."""
    try:
        found = pool.run(
            train_compressed,
            compressed,
            timeout_seconds=TIMEOUT_SECONDS,
            collective_timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS,
        )
    except RankError as error:
        raise AssertionError(f"failed on {pool.world_size} ranks\n{_describe(compressed)}\n{error}") from None
    lines = [f"rank {rank}: {line}" for rank, lines in enumerate(found) for line in lines]
    if lines:
        raise AssertionError("\n".join([f"loses on {pool.world_size} ranks", *lines, _describe(compressed)]))


def _describe(compressed: Compressed) -> str:
    return f"{compressed!r}\n{source_of(compressed.program.model)}"
