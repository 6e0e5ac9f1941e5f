"""Tables for people: what is reduced in which bucket, by whom, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from compiled_ddp.comm_hooks import CommHook
from compiled_ddp.formatting import format_names
from compiled_ddp.options import Options
from compiled_ddp.plan import ReductionSequence
from compiled_ddp.planning.assignment import MEBIBYTE

Row = tuple[int, str, int, int, str, str]  # order, launched by, gradients, bytes, parameters, why hooks


@dataclass(frozen=True)
class Explanation:
    """The table of buckets, with the reasons why hooks reduce what graphs do not. `print` it."""

    rows: tuple[Row, ...]
    fallback_reasons: tuple[str, ...]
    bucket_size: str  # how large a bucket may be, and why
    unused: tuple[str, ...] = ()  # parameters that no rank has used, and that are not reduced until one does
    sparse: tuple[str, ...] = ()  # parameters with sparse gradients, which are averaged at the end of each backward
    left_alone: tuple[str, ...] = ()  # parameters to ignore, or of a wrapper inside
    reduction: str = ""  # what a bucket is reduced to, where that is not the mean by an all-reduce
    chosen: str = ""  # what a warm-up has chosen, and by which times
    compiled: str = ""  # what was compiled here, and what was found in the cache, by whom
    proof: str = ""  # how many parameters are proven to be reduced, and what is pending; empty on one rank

    def __str__(self) -> str:
        chosen = f"\n{self.chosen}" if self.chosen else ""
        compiled = f"\n{self.compiled}" if self.compiled else ""
        if not self.rows:
            return f"No plan yet: it is made in the first synchronised backward. {self.bucket_size}{chosen}{compiled}"
        headers = ("order", "launched by", "gradients", "bytes", "parameters", "why hooks")
        table = str(tabulate(self.rows, headers=headers, tablefmt="simple"))
        notes = "".join(f"\nAt run time some buckets went by hooks: {reason}." for reason in self.fallback_reasons)
        if self.unused:
            notes += f"\nNot reduced, because no rank has used them so far: {', '.join(self.unused)}."
        if self.sparse:
            notes += (
                f"\nSparse gradients, which have no place in a bucket and in a graph, are averaged at the end of each "
                f"backward: {', '.join(self.sparse)}."
            )
        if self.left_alone:
            notes += f"\nLeft alone, to be ignored or of a wrapper inside: {format_names(self.left_alone, 5)}."
        proof = f"\n{self.proof}" if self.proof else ""
        reduction = f"\n{self.reduction}" if self.reduction else ""
        return f"{table}\n{self.bucket_size}{reduction}{chosen}{compiled}{notes}{proof}"


def explain_sequence(
    sequence: ReductionSequence | None,
    fallback_reasons: Sequence[str],
    options: Options,
    link_bytes_per_second: float | None,
    proof: str,
    sparse: tuple[str, ...],
    left_alone: tuple[str, ...],
    chosen: str,
    compiled: str,
) -> Explanation:
    """Describe a sequence, bucket by bucket in launch order.

    `link_bytes_per_second` is what the bucket size was chosen for; None if it was not measured. `chosen` is what a
    warm-up has chosen, `compiled` what was compiled here and what was not.
    """
    bucket_size = _format_bucket_size(options, link_bytes_per_second)
    reduction = _format_reduction(options)
    if sequence is None:
        nothing = (), tuple(fallback_reasons), bucket_size, (), sparse, left_alone, reduction
        return Explanation(*nothing, chosen, compiled, proof)
    rows: list[Row] = []
    for section in sequence.launched:
        for bucket in section.plan.buckets:
            names = [sequence.parameter_names[index] for index in bucket.indices]
            shown = format_names(names, 3) or "(riders)"
            rows.append((len(rows), section.origin, len(names), bucket.nbytes, shown, section.reason))
    planned = {section.reason for section in sequence.sections}
    at_run_time = tuple(reason for reason in fallback_reasons if reason not in planned)
    unused = (sequence.parameter_names[index] for section in sequence.unused for index in section.plan.indices)
    return Explanation(
        tuple(rows), at_run_time, bucket_size, tuple(unused), sparse, left_alone, reduction, chosen, compiled, proof
    )


def hook_name(hook: CommHook) -> str:
    """What tables call a hook of `comm_hook=`: a function's name, or an object with its settings."""
    return getattr(hook, "__name__", repr(hook))


def _format_reduction(options: Options) -> str:
    if options.comm_hook is not None:
        name = hook_name(options.comm_hook)
        return f"The communication hook {name} reduces each bucket; in graphs the proof does not see what it launches."
    if options.reduction == "sum":
        return "Gradients are summed over ranks."
    return "Gradients are averaged by each rank's weight." if options.reduction == "weighted" else ""


def _format_bucket_size(options: Options, link_bytes_per_second: float | None) -> str:
    if options.bucket_rule is not None:
        return str(options.bucket_rule)
    if options.naive:
        return "The naive program: an all-reduce for each gradient."
    if options.bucket_cap_mb_list:
        listed = ", ".join(f"{size:g}" for size in options.bucket_cap_mb_list)
        return f"Buckets close at {listed} MiB, in order, and all further ones at the last of these."
    why = "" if link_bytes_per_second is None else f", for a link that reduces {link_bytes_per_second / 1e6:.0f} MB/s"
    first = options.bucket_capacities_bytes[0] / MEBIBYTE
    return f"A bucket closes at {options.bucket_cap_mb:g} MiB{why}; the first one at {first:g} MiB."
