"""How ranks agree at construction: all wrap the same model in the same way, or all raise the same error.

Everything goes through the store: rank 0 publishes what it has, every other rank compares and publishes a verdict,
rank 0 publishes the sum of the verdicts. No collective is issued, so a rank that found its own arguments bad cannot
leave the others hanging in one.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from compiled_ddp.formatting import format_names
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.ranks.store import LONGEST_VALUE

Description = dict[str, list[object]]  # what there is to compare -> its properties, in order
Differing = dict[int, tuple[str, int]]  # global rank -> the first of what it has otherwise than rank 0; how many


def agree_on_description(
    ranks: RankGroup,
    describe: Callable[[], Description],
    *,
    occasion: str = "construction",
    purpose: str = "to compare the models of all ranks",
    failure: str,
    checksums: Callable[[], Mapping[str, int]] = dict,
) -> Differing:
    """Raise the same error on every rank unless `describe()` succeeds everywhere and returns the same everywhere.

    Each `occasion` is agreed on once; `purpose` says what a wait is for, `failure` what did not happen, on any rank.
    An error that `describe` raises is raised as it is on the rank it came from, and as a RuntimeError that quotes it
    on the others. Differences are a RuntimeError that names them.

    Returns, on every rank, where `checksums()` are not those of rank 0, which is no error.
    """
    own_error: Exception | None = None
    description: Description = {}
    own_checksums: Mapping[str, int] = {}
    try:
        description, own_checksums = describe(), checksums()
    except Exception as error:  # raised below, when the other ranks have been told
        own_error = error
    own_problem = f"{type(own_error).__name__}: {own_error}" if own_error else None
    try:
        problems, differing = _exchange(ranks, occasion, purpose, description, own_checksums, own_problem)
    except RuntimeError as silence:
        raise own_error or silence from silence
    if problems:
        ranks.outlast(occasion)
    if own_error is not None:
        raise own_error
    if problems:
        raise RuntimeError(f"{failure}, on any rank:\n" + "\n".join(problems))
    return differing


def _exchange(
    ranks: RankGroup,
    occasion: str,
    purpose: str,
    description: Description,
    checksums: Mapping[str, int],
    own_problem: str | None,
) -> tuple[Sequence[str], Differing]:
    """Every rank's problems, one line each, and which checksums differ: the same on every rank.

    Ranks are called by their global numbers.
    """
    if ranks.rank == 0:
        _publish_in_parts(ranks, f"{occasion}/description", json.dumps([description, checksums, own_problem]))
        problems, differing = _collect_verdicts(ranks, occasion, purpose, own_problem)
        ranks.publish(f"{occasion}/problems", json.dumps([problems, [*differing.items()]]))
        return problems, differing
    expected, checksums_on_0, problem_on_0 = json.loads(_read_parts(ranks, f"{occasion}/description", purpose))
    verdict = own_problem
    if verdict is None and problem_on_0 is None:
        verdict = first_difference(expected, json.loads(json.dumps(description)), reference_rank=ranks.ranks[0])
    others = [name for name, value in checksums.items() if checksums_on_0.get(name, value) != value]
    ranks.publish(f"{occasion}/verdict/{ranks.rank}", json.dumps([verdict, others[:1], len(others)]))
    # Rank 0 may itself be waiting for a silent rank, and has to be outwaited to learn which one.
    problems, found = json.loads(ranks.read(f"{occasion}/problems", writer=0, purpose=purpose, patience=2.0))
    assert isinstance(problems, list)
    return problems, {rank: (name, number) for rank, (name, number) in found}


def _publish_in_parts(ranks: RankGroup, key: str, text: str) -> None:
    first, *others = [text[start : start + LONGEST_VALUE] for start in range(0, len(text), LONGEST_VALUE)]
    for number, part in enumerate(others, start=1):
        ranks.publish(f"{key}/{number}", part)
    ranks.publish(key, f"{len(others)} {first}")


def _read_parts(ranks: RankGroup, key: str, purpose: str) -> str:
    """What rank 0 has published in parts."""
    others, _, first = ranks.read(key, writer=0, purpose=purpose).partition(" ")
    numbers = range(1, int(others) + 1)
    return "".join([first, *(ranks.read(f"{key}/{number}", writer=0, purpose=purpose) for number in numbers)])


def _collect_verdicts(
    ranks: RankGroup, occasion: str, purpose: str, own_problem: str | None
) -> tuple[Sequence[str], Differing]:
    verdicts, differing = {0: own_problem}, Differing()
    try:
        texts = ranks.read_all(f"{occasion}/verdict", purpose=purpose)
    except RuntimeError as error:
        ranks.publish(f"{occasion}/problems", json.dumps([[f"- {error}"], []]))
        ranks.outlast(occasion)
        raise
    for rank, text in enumerate(texts, start=1):
        verdicts[rank], first, number = json.loads(text)
        if first:
            differing[ranks.ranks[rank]] = first[0], number
    return [f"- rank {ranks.ranks[rank]}: {problem}" for rank, problem in verdicts.items() if problem], differing


def first_difference(
    expected: Mapping[str, object], found: Mapping[str, object], *, reference_rank: int = 0
) -> str | None:
    """The first entry in which two descriptions differ, in words; None if they are equal.

    `expected` is that of global rank `reference_rank`. A difference in the value of the very first entry explains all
    others.
    """
    there = f"on rank {reference_rank}"
    head = next(iter(expected), None)
    if head is not None and head == next(iter(found), None) and expected[head] != found[head]:
        return _other_value(head, expected, found, there)
    missing = [name for name in expected if name not in found]
    if missing:
        return f"{_listed(missing)} missing here, found {there}. Build the same model on every rank."
    extra = [name for name in found if name not in expected]
    if extra:
        return f"{_listed(extra)} found here, missing {there}. Build the same model on every rank."
    for name, value in expected.items():
        if found[name] != value:
            return _other_value(name, expected, found, there)
    elsewhere = next(((name, other) for name, other in zip(found, expected, strict=True) if name != other), None)
    if elsewhere is not None:
        name, other = elsewhere
        return (
            f"{other} stands {there} where {name} stands here: the same parameters and buffers, "
            "registered in another order. Build the model in the same order on every rank."
        )
    return None


def _other_value(name: str, expected: Mapping[str, object], found: Mapping[str, object], there: str) -> str:
    return f"{name} is {_words(found[name])} here, {_words(expected[name])} {there}. Make them equal on every rank."


def _words(properties: object) -> str:
    return ", ".join(map(str, properties)) if isinstance(properties, list) else str(properties)


def _listed(names: Sequence[str]) -> str:
    return f"{format_names(names)} {'is' if len(names) == 1 else 'are'}"
