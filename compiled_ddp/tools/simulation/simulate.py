"""A step on each of many numbers of ranks: its buckets planned for that link, and what the model says of it.

Beside each plan stand DDP's buckets, which are the same on every link, and the limit that no plan passes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compiled_ddp.plan import GradientSpec
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.planning.cost_model import Link
from compiled_ddp.planning.optimal import optimal_buckets, predict_plan
from compiled_ddp.planning.step_model import GATHERED_LATER, Job, Mode, link_in_mode, predict_step
from compiled_ddp.tools.simulation.algorithms import Network

RANKS = tuple(2**power for power in range(1, 17))  # 2 to 65,536
DDPS_CAPACITIES_BYTES = (2**20, 25 * 2**20)  # of DDP's first bucket and of all others, unless it is told otherwise


@dataclass(frozen=True)
class Step:
    """What a step takes on so many ranks, as the model has it; all times in seconds."""

    ranks: int
    link: Link  # of all of them
    buckets: int
    seconds: float
    compute_seconds: float  # of it, without any communication
    communication_seconds: float  # of one all-reduce of all gradients: no plan keeps the link for less
    window_seconds: float  # of what computes beside it: the backward, from when the first gradient is ready
    limit_seconds: float  # no plan has a shorter step
    fixed_buckets: int
    fixed_seconds: float  # of a step with DDP's buckets
    hidden_behind: str = "backward"  # what communication could be hidden behind

    @property
    def exposed_seconds(self) -> float:
        """How much longer the step is than its computation."""
        return self.seconds - self.compute_seconds

    @property
    def efficiency(self) -> float:
        """The share of the step that computes: how much of the ranks is used."""
        return self.compute_seconds / self.seconds

    @property
    def ratio_to_fixed(self) -> float:
        """Above 1 DDP's buckets are better. The planner takes fewer buckets where they lose up to half a percent."""
        return self.seconds / self.fixed_seconds

    @property
    def is_link_bound(self) -> bool:
        """Whether communication is longer than what it could be hidden behind, so that some is exposed in any plan."""
        return self.communication_seconds > self.window_seconds


def simulate(
    job: Job, network: Network, ranks: Sequence[int] = RANKS, *, overlap: bool = True, mode: Mode = "all-reduced"
) -> list[Step]:
    """A step of `job` on each of these numbers of ranks, each of which has as much to compute.

    The other modes are those of `compile_step`, of which DDP's step beside them has none.
    Without `overlap` communication begins when the backward has ended, whatever the plan. So it is where something
    holds all of it back: one all-reduce behind accumulated gradients, a first bucket that waits for a tied embedding,
    or a link whose transfers take the memory or the cores that the backward needs. Raises ValueError for ranks that do
    not fill their hosts.
    """
    held = job if overlap else job.without_overlap()
    fixed = ddps_buckets(held.nbytes)
    return [_step(held, network.link(number), number, fixed, mode) for number in ranks]


def ddps_buckets(nbytes: Sequence[int]) -> list[int]:
    """How many gradients each bucket has in DDP."""
    gradients = [
        GradientSpec(index, (size,), (1,), torch.uint8, torch.device("cpu")) for index, size in enumerate(nbytes)
    ]
    plan = assign_buckets(gradients, capacities_bytes=DDPS_CAPACITIES_BYTES, world_size=2)
    return [len(bucket.gradients) for bucket in plan.buckets if bucket.gradients]


def _step(job: Job, link: Link, ranks: int, fixed: Sequence[int], mode: Mode) -> Step:
    ddps_others = job.forward_seconds + job.optimizer_seconds
    own = job.in_mode(mode, ranks)
    lengths = optimal_buckets(job.nbytes, job.readiness, link_in_mode(mode, link))
    ends = [*itertools.accumulate(lengths)]
    buckets = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    predicted = predict_step(mode, buckets, own, link)
    window = job.readiness.backward_seconds - job.readiness.seconds[0]
    return Step(
        ranks=ranks,
        link=link,
        buckets=len(lengths),
        seconds=predicted.seconds,
        compute_seconds=own.compute_seconds,
        communication_seconds=link.seconds(sum(job.nbytes)),
        window_seconds=window + job.forward_seconds if mode in GATHERED_LATER else window,
        limit_seconds=predicted.bound_seconds,
        fixed_buckets=len(fixed),
        fixed_seconds=ddps_others + predict_plan(fixed, job.nbytes, job.readiness, link).seconds,
        hidden_behind=_hidden_behind(mode),
    )


def _hidden_behind(mode: Mode) -> str:
    return "forward and backward" if mode in GATHERED_LATER else "backward"


def told_of_overlap(steps: Sequence[Step], *, overlap: bool, mode: Mode = "all-reduced") -> str:
    """One sentence: from where on communication cannot be hidden, or that it is not."""
    if not overlap:
        return "Communication is not overlapped: it begins when the backward has ended."
    if mode == "sharded":
        return "The half of it that scatters sums is hidden behind the backward, as far as that goes; the other is not."
    what = _hidden_behind(mode)
    bound = [step for step in steps if step.is_link_bound]
    if not bound:
        return f"On each of these numbers of ranks communication is shorter than the {what} that could hide it."
    least = min(bound, key=lambda step: step.ranks)
    return (
        f"On {least.ranks:,} ranks communication alone takes {1e3 * least.communication_seconds:.4g} ms, and there are "
        f"{1e3 * least.window_seconds:.4g} ms of {what} to hide it behind: no plan hides all of it."
    )
