"""Tables for people: what is reduced in which bucket, by whom, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from compiled_ddp.plan import ReductionSequence

Row = tuple[int, str, int, int, str, str]  # order, launched by, gradients, bytes, parameters, why hooks


@dataclass(frozen=True)
class Explanation:
    """Rows of the bucket table, and the reasons for which hooks do what a graph could not. Printable."""

    rows: tuple[Row, ...]
    fallback_reasons: tuple[str, ...]

    def __str__(self) -> str:
        if not self.rows:
            return "No plan yet: it comes about in the first synchronised backward."
        headers = ("order", "launched by", "gradients", "bytes", "parameters", "why hooks")
        table = str(tabulate(self.rows, headers=headers, tablefmt="simple"))
        notes = "".join(f"\nAt run time some buckets went by hooks: {reason}." for reason in self.fallback_reasons)
        return table + notes


def explain_sequence(sequence: ReductionSequence | None, fallback_reasons: Sequence[str]) -> Explanation:
    """Describe a sequence, bucket by bucket in launch order."""
    if sequence is None:
        return Explanation((), tuple(fallback_reasons))
    rows: list[Row] = []
    for section in sequence.sections:
        for bucket in section.plan.buckets:
            names = [sequence.parameter_names[index] for index in bucket.indices]
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            rows.append((len(rows), section.origin, len(names), bucket.nbytes, shown or "(riders)", section.reason))
    planned = {section.reason for section in sequence.sections}
    return Explanation(tuple(rows), tuple(reason for reason in fallback_reasons if reason not in planned))
