"""The simulated steps as a table."""

from collections.abc import Sequence
from types import SimpleNamespace

from compiled_ddp.tools.comparison.table import tabulate_rows
from compiled_ddp.tools.simulation.simulate import Step

COLUMNS = {
    "ranks": ("ranks", ",d"),
    "startup_us": ("start-up\nus", ",.0f"),
    "mb_per_s": ("link\nMB/s", ",.0f"),
    "communication_ms": ("commu-\nnication ms", ",.1f"),
    "buckets": ("buckets", "d"),
    "step_ms": ("step\nms", ",.1f"),
    "exposed_ms": ("exposed\nms", ",.1f"),
    "efficiency": ("effi-\nciency", ".1%"),
    "limit_ms": ("limit\nms", ",.1f"),
    "fixed_ms": ("DDP's\nbuckets ms", ",.1f"),
    "ratio_to_fixed": ("x DDP's\nbuckets", ".3f"),
    "bound_by": ("longer", "s"),
}

NOTES = (
    "start-up, link: of one all-reduce of all ranks; communication: of all gradients in one\n"
    "limit: no plan has a shorter step; DDP's buckets: 1 MiB, then 25 MiB\n"
    "longer: communication, or what could hide it"
)


def row(step: Step) -> SimpleNamespace:
    """A step in the units of COLUMNS."""
    return SimpleNamespace(
        ranks=step.ranks,
        startup_us=1e6 * step.link.startup_seconds,
        mb_per_s=step.link.bytes_per_second / 1e6,
        communication_ms=1e3 * step.communication_seconds,
        buckets=step.buckets,
        step_ms=1e3 * step.seconds,
        exposed_ms=1e3 * step.exposed_seconds,
        efficiency=step.efficiency,
        limit_ms=1e3 * step.limit_seconds,
        fixed_ms=1e3 * step.fixed_seconds,
        ratio_to_fixed=step.ratio_to_fixed,
        bound_by="communication" if step.is_link_bound else step.hidden_behind,
    )


def render(steps: Sequence[Step], tablefmt: str = "simple") -> str:
    """One row for each number of ranks, whichever plan is better there; `tablefmt` is tabulate's."""
    return tabulate_rows([row(step) for step in steps], COLUMNS, tablefmt=tablefmt, missing="-")
