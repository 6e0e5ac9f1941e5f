"""Steps that others have published, and what `compiled-ddp simulate` makes of them: `python -m benchmarks.published`.

Nothing is measured here. In each group one bandwidth (or start-up and bandwidth) is FITTED on the row that says so, and
the others are PREDICTED from it: for more to compute, for larger models, more ranks, smaller gradients. What a source
leaves open is an assumption, and stands in the group's text. A miss, above 10 %, keeps its row and has a reason.
"""

import argparse
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from compiled_ddp.planning.cost_model import Link, Readiness
from compiled_ddp.planning.step_model import Job
from compiled_ddp.tools.comparison.table import tabulate_rows
from compiled_ddp.tools.simulation.algorithms import Hop, Network
from compiled_ddp.tools.simulation.jobs import ready_by_sizes, transformer
from compiled_ddp.tools.simulation.simulate import Step, simulate

MISS = 0.1  # of what was measured
BACKWARDS_SHARE = 2 / 3  # of a step alone, assumed: it matters only where communication overlaps


@dataclass(frozen=True)
class Row:
    """A published time, and what the model says."""

    case: str
    measured_ms: float
    predicted_ms: float
    alone_ms: float = 0.0  # of it, without communication
    overlapped_ms: float | None = None  # what the model says if communication overlaps, of its own fit on the same row
    is_fitted: bool = False
    reason: str = ""  # of a miss

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def error_of_exposed(self) -> float | None:
        """Relative to the communication that was measured, which may be a small part of the step."""
        if not self.alone_ms:
            return None
        return (self.predicted_ms - self.measured_ms) / (self.measured_ms - self.alone_ms)

    @property
    def error_if_overlapped(self) -> float | None:
        return None if self.overlapped_ms is None else self.overlapped_ms / self.measured_ms - 1

    @property
    def is_miss(self) -> bool:
        return abs(self.error) > MISS


@dataclass(frozen=True)
class Group:
    """Rows of one source."""

    title: str
    source: str
    text: str  # what was assumed, and why
    rows: tuple[Row, ...]


def _job(nbytes: Sequence[int], alone_ms: float) -> Job:
    backward = BACKWARDS_SHARE * alone_ms / 1e3
    return Job(tuple(nbytes), ready_by_sizes(nbytes, backward), alone_ms / 1e3 - backward)


def _step_ms(job: Job, network: Network, ranks: int, *, overlap: bool) -> float:
    """With DDP's buckets, as sources had them."""
    (step,) = simulate(job, network, [ranks], overlap=overlap)
    return 1e3 * step.fixed_seconds


def _flat(bytes_per_second: float) -> Network:
    return Network("ring", Hop(0.0, bytes_per_second))


def _fitted_bandwidth(job: Job, ranks: int, measured_ms: float, *, overlap: bool) -> float:
    """Of a hop of a ring without start-up, such that the step takes what was measured: by bisection."""
    slow, fast = 1e6, 1e13
    for _ in range(60):
        middle = math.sqrt(slow * fast)
        if _step_ms(job, _flat(middle), ranks, overlap=overlap) > measured_ms:
            slow = middle
        else:
            fast = middle
    return math.sqrt(slow * fast)


# ---- two GPUs, with and without NVLink -------------------------------------------------------------------------------

GPT2 = {  # parameters, of them the token embedding, layers
    "gpt2": (124_439_808, 38_597_376, 12),
    "gpt2-medium": (354_823_168, 51_463_168, 24),
    "gpt2-large": (774_030_080, 64_328_960, 36),
}
TWO_GPUS = {  # model, sequence: ms a step on one GPU, two with NVLink, two without
    ("gpt2", 128): (48.9, 67.7, 150.1),
    ("gpt2", 256): (76.1, 93.5, 177.1),
    ("gpt2", 512): (145.2, 161.8, 246.0),
    ("gpt2-medium", 128): (123.5, 167.2, 375.0),
    ("gpt2-medium", 256): (199.2, 238.8, 446.8),
    ("gpt2-medium", 512): (381.6, 411.0, 620.6),
    ("gpt2-large", 128): (246.5, 329.0, 761.1),
}
NVLINK, NO_NVLINK = 1, 2  # columns of TWO_GPUS
_WHY_NOT_OVERLAPPED = (
    "Assumed: float32, and no overlap. That has a reason, though one that was looked for with the figures at hand. "
    "torch's DDP of January 2021 had a tied parameter twice (pytorch pull request 51929 ended that), so that GPT-2's "
    "embedding is sent twice; as lm_head it was in the first bucket, and it is ready last. The Trainer always set "
    "find_unused_parameters (transformers issue 9802), with which DDP does not sort its buckets anew, and it sends "
    "them in order: nothing was sent before the backward had ended. "
)


@dataclass(frozen=True)
class _TwoGpus:
    """How GPT-2 is modelled, and what comes out for one of the links."""

    column: int
    copies: int  # of the embedding among what is sent
    overlap: bool

    def job(self, model: str, alone_ms: float) -> Job:
        parameters, embedding, layers = GPT2[model]
        *matrices, last = transformer(parameters, layers, 4, embedding)
        return _job((*matrices, *[last] * self.copies), alone_ms)

    def bandwidth(self) -> float:
        """Fitted on gpt2 128."""
        times = TWO_GPUS["gpt2", 128]
        return _fitted_bandwidth(self.job("gpt2", times[0]), 2, times[self.column], overlap=self.overlap)

    def predicted_ms(self) -> dict[tuple[str, int], float]:
        network = _flat(self.bandwidth())
        return {
            (model, sequence): _step_ms(self.job(model, times[0]), network, 2, overlap=self.overlap)
            for (model, sequence), times in TWO_GPUS.items()
        }

    def largest_error(self) -> float:
        return max(abs(ms / TWO_GPUS[case][self.column] - 1) for case, ms in self.predicted_ms().items())


def _two_gpus(column: int, title: str, why: str) -> Group:
    held, overlapped = _TwoGpus(column, 2, overlap=False), _TwoGpus(column, 1, overlap=True)
    if_overlapped = overlapped.predicted_ms()
    rows = tuple(
        Row(
            " ".join(map(str, case)),
            TWO_GPUS[case][column],
            predicted,
            TWO_GPUS[case][0],
            if_overlapped[case],
            is_fitted=case == ("gpt2", 128),
        )
        for case, predicted in held.predicted_ms().items()
    )
    once = _TwoGpus(column, 1, overlap=False).largest_error()
    text = (
        f"Fitted: one bandwidth, on gpt2 128; {held.bandwidth() / 1e9:.3g} GB/s came out. {why}With the embedding sent "
        f"once the largest error is {once:.1%}. The last columns have it once, and overlapped, with a fit of their own."
    )
    return Group(title, "https://github.com/huggingface/transformers/issues/9371", text, rows)


# ---- BERT-large ------------------------------------------------------------------------------------------------------

BERTS_SOURCE = "https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/LanguageModeling/BERT"
BERT_LARGE = (336_226_108, 31_254_528, 24)  # parameters, of them the token embedding, layers
BERT = {  # sequence, batch: ms a step on 1, 4 and 8 GPUs, and in the table of several nodes on 1, 4 and 16
    (128, 16): (127.6, 139.7, 139.3, 146.4, 165.7, 168.6),
    (512, 4): (150.2, 162.9, 164.5, 163.3, 182.8, 186.4),
}


def _bert_job(alone_ms: float) -> Job:
    parameters, embedding, layers = BERT_LARGE
    return _job(transformer(parameters, layers, 2, embedding), alone_ms)


def _bert_of_one_host() -> tuple[Group, float]:
    """Besides, the bandwidth inside of a host that came out."""
    one, four = BERT[128, 16][:2]
    held = _fitted_bandwidth(_bert_job(one), 4, four, overlap=False)
    overlapped = _fitted_bandwidth(_bert_job(one), 4, four, overlap=True)
    rows = tuple(
        Row(
            f"sequence {sequence}, {ranks} GPUs",
            times[column],
            _step_ms(_bert_job(times[0]), _flat(held), ranks, overlap=False),
            times[0],
            _step_ms(_bert_job(times[0]), _flat(overlapped), ranks, overlap=True),
            is_fitted=(sequence, ranks) == (128, 4),
        )
        for (sequence, _), times in BERT.items()
        for column, ranks in ((1, 4), (2, 8))
    )
    text = (
        f"Fitted: {held / 1e9:.3g} GB/s of a rank inside of a host, on 128 with 4 GPUs. Assumed: gradients of 2 bytes, "
        "no gradient accumulation, and one all-reduce behind the backward, which run_pretraining.py has as "
        "--allreduce_post_accumulation."
    )
    return Group("BERT-large on one host of 8 V100", BERTS_SOURCE, text, rows), held


def _bert_of_several_hosts(within: float) -> Group:
    def alone(sequence_and_batch: tuple[int, int]) -> float:
        """The row of one node of that table, without the communication inside of it."""
        of_host = _step_ms(_bert_job(0.0), _flat(within), 8, overlap=False)
        return BERT[sequence_and_batch][3] - of_host

    first = BERT[128, 16]
    volume = 2 * 3 / 4 * sum(_bert_job(0.0).nbytes)  # of a ring of 4 hosts
    between = volume / ((first[4] - first[3]) / 1e3)
    network = Network("ring", Hop(0.0, between), Hop(0.0, within), ranks_per_host=8)
    rows = tuple(
        Row(
            f"sequence {key[0]}, {hosts} hosts",
            BERT[key][column],
            _step_ms(_bert_job(alone(key)), network, 8 * hosts, overlap=False),
            alone(key),
            is_fitted=(key[0], hosts) == (128, 4),
        )
        for key in BERT
        for column, hosts in ((4, 4), (5, 16))
    )
    text = (
        f"Hierarchical, with the hop inside from above. Fitted: {between / 1e9:.3g} GB/s between hosts, on 128 with 4 "
        "hosts; its row of one host is what the others add to."
    )
    return Group("BERT-large on several hosts of 8 V100", BERTS_SOURCE, text, rows)


# ---- links by start-up and byte --------------------------------------------------------------------------------------

MG_WFBP = {  # ms and ns a byte of an all-reduce of 8 and of 16 workers
    "10 GbE": (Link(0.523e-3, 1e9 / 0.857), Link(0.908e-3, 1e9 / 0.740)),
    "56 Gbit/s": (Link(0.0975e-3, 1e9 / 0.306), Link(0.236e-3, 1e9 / 0.406)),
}
_MG_WFBP_REASONS = {
    "10 GbE": "a byte takes less time with 16 workers than with 8, which no algorithm has",
    "56 Gbit/s": "a byte takes a third more time with 16 workers than with 8, where a ring has 7 % more",
}


def _mg_wfbp() -> Group:
    rows = []
    for name, (of_8, of_16) in MG_WFBP.items():
        for algorithm in ("ring", "tree"):
            link = Network(algorithm, Hop(0.0, 1.0)).fitted(of_8, 8).link(16)
            for mebibytes in (1, 25):
                nbytes = mebibytes * 2**20
                row = Row(
                    f"{name}, {algorithm}, {mebibytes} MiB",
                    1e3 * of_16.seconds(nbytes),
                    1e3 * link.seconds(nbytes),
                    reason=_MG_WFBP_REASONS[name],
                )
                rows.append(row)
    text = (
        "All-reduces, not steps. Start-up and bandwidth of 8 workers are the fit, 16 are predicted. Start-ups grow by "
        "1.74 and 2.42, a ring's by 2.14 and a tree's by 1.33, so that they are nearer to a ring's; what a byte "
        "takes changes against any algorithm. Which hosts the workers shared is not said."
    )
    return Group("MG-WFBP's links, 8 to 16 workers", "https://github.com/HKBU-HPML/MG-WFBP", text, tuple(rows))


# ---- single hosts whose link is slower than the backward -------------------------------------------------------------

EGOVERSE = (1.2e9, 1400.0, 6400.0, 3600.0)  # parameters; ms alone, under DDP, with gradients sent in bfloat16
LOONGFORGE = (557.0, 336.0)  # ms of all-reduce, of backward


def _egoverse() -> Group:
    parameters, alone, measured, in_bfloat16 = EGOVERSE

    def job(element_bytes: int) -> Job:
        return _job(transformer(parameters, 24, element_bytes), alone)

    networks = {overlap: _flat(_fitted_bandwidth(job(4), 8, measured, overlap=overlap)) for overlap in (False, True)}
    rows = tuple(
        Row(
            case,
            time,
            _step_ms(job(element_bytes), networks[False], 8, overlap=False),
            alone,
            _step_ms(job(element_bytes), networks[True], 8, overlap=True),
            is_fitted=element_bytes == 4,
        )
        for case, time, element_bytes in (("float32", measured, 4), ("bfloat16", in_bfloat16, 2))
    )
    text = "Fitted: one bandwidth, on float32. What it takes to cast gradients is not in it."
    title = "A policy of 1.2 billion parameters, 8 A40"
    return Group(title, "https://github.com/GaTech-RL2/EgoVerse/pull/667", text, rows)


def loongforge() -> Step:
    """The backward of https://github.com/baidu-baige/LoongForge/pull/223, as if all gradients were ready at its start.

    Only these two times are published.
    """
    all_reduce, backward = (ms / 1e3 for ms in LOONGFORGE)
    nbytes, ranks = 10**9, 8
    volume = 2 * (ranks - 1) / ranks * nbytes
    job = Job((nbytes,), Readiness((0.0,), backward), 0.0)
    (step,) = simulate(job, _flat(volume / all_reduce), [ranks])
    return step


# ---- the tables ------------------------------------------------------------------------------------------------------

COLUMNS = {
    "case": ("", "s"),
    "measured": ("measured\nms", ",.1f"),
    "predicted": ("model\nms", ",.1f"),
    "error": ("error", "+.1%"),
    "exposed": ("of what is\nexposed", "+.0%"),
    "overlapped": ("if over-\nlapped ms", ",.1f"),
    "overlapped_error": ("its\nerror", "+.1%"),
    "what": ("", "s"),
}


def groups() -> list[Group]:
    """All of them, computed."""
    of_host, within = _bert_of_one_host()
    return [
        _two_gpus(NO_NVLINK, "GPT-2, two GPUs without NVLink", _WHY_NOT_OVERLAPPED),
        _two_gpus(NVLINK, "GPT-2, two GPUs with NVLink", ""),
        of_host,
        _bert_of_several_hosts(within),
        _mg_wfbp(),
        _egoverse(),
    ]


def _cells(row: Row) -> SimpleNamespace:
    what = "fitted" if row.is_fitted else "predicted"
    return SimpleNamespace(
        case=row.case,
        measured=row.measured_ms,
        predicted=row.predicted_ms,
        error=row.error,
        exposed=row.error_of_exposed,
        overlapped=row.overlapped_ms,
        overlapped_error=row.error_if_overlapped,
        what=f"miss: {row.reason}" if row.is_miss else what,
    )


def text_of(group: Group, tablefmt: str) -> str:
    """Title, source, assumptions and table; `tablefmt` is tabulate's."""
    cells = [_cells(row) for row in group.rows]
    columns = {name: column for name, column in COLUMNS.items() if any(getattr(c, name) is not None for c in cells)}
    table = tabulate_rows(cells, columns, tablefmt=tablefmt, missing="-")
    heading = f"[{group.title}]({group.source})" if tablefmt == "github" else f"{group.title} ({group.source})"
    return f"{_wrapped(f'{heading}. {group.text}')}\n\n{table}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def text_of_all(tablefmt: str = "simple") -> str:
    """All groups, and what they come to."""
    found = groups()
    predicted = [row for group in found for row in group.rows if not row.is_fitted]
    misses = [row for row in predicted if row.is_miss]
    steps = [row for row in predicted if row.alone_ms]
    backward = loongforge()
    exposed_ms = 1e3 * (backward.limit_seconds - backward.compute_seconds)
    ends = [
        f"{len(predicted)} rows are predicted, {len(predicted) - len(misses)} of them within 10 %. The steps among "
        f"them, {len(steps)}, are off by {max(abs(row.error) for row in steps):.1%} at most.",
        f"LoongForge (https://github.com/baidu-baige/LoongForge/pull/223, 8 GPUs without NVLink) has published "
        f"{LOONGFORGE[0]:.0f} ms of all-reduce beside a backward of {LOONGFORGE[1]:.0f} ms, and no step: "
        f"communication is longer, and any plan exposes {exposed_ms:.0f} ms of it.",
    ]
    return "\n\n".join([*(text_of(group, tablefmt) for group in found), *map(_wrapped, ends)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="as docs/simulate.md has it")
    print(text_of_all("github" if parser.parse_args(arguments).markdown else "simple"))


if __name__ == "__main__":
    main()
