"""How ranks agree at construction: all wrap the same model in the same way, or all raise the same error.

Everything goes through the store: rank 0 publishes what it has, every other rank compares and publishes a verdict,
rank 0 publishes the sum of the verdicts. No collective is issued, so a rank that found its own arguments bad cannot
leave the others hanging in one.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from compiled_ddp.communicator import RankGroup

Description = dict[str, list[object]]  # what there is to compare -> its properties, in order


def agree_on_description(ranks: RankGroup, describe: Callable[[], Description]) -> None:
    """Raise the same error on every rank unless `describe()` succeeds everywhere and returns the same everywhere.

    An error that `describe` raises is raised as it is on the rank it came from, and as a RuntimeError that quotes it
    on the others. Differences are a RuntimeError that names them.
    """
    own_error: Exception | None = None
    description: Description = {}
    try:
        description = describe()
    except (TypeError, ValueError, RuntimeError) as error:
        own_error = error
    own_problem = f"{type(own_error).__name__}: {own_error}" if own_error else None
    problems = _exchange(ranks, description, own_problem)
    if own_error is not None:
        raise own_error
    if problems:
        raise RuntimeError("the model was not wrapped, on any rank:\n" + "\n".join(problems))


def _exchange(ranks: RankGroup, description: Description, own_problem: str | None) -> Sequence[str]:
    """Every rank's problems, one line each, the same on every rank."""
    purpose = "to compare the models of all ranks"
    if ranks.rank == 0:
        ranks.publish("description", json.dumps([description, own_problem]))
        verdicts = {0: own_problem}
        for rank in range(1, ranks.world_size):
            verdicts[rank] = json.loads(ranks.read(f"verdict/{rank}", writer=rank, purpose=purpose))
        problems = [f"- rank {rank}: {problem}" for rank, problem in verdicts.items() if problem]
        ranks.publish("problems", json.dumps(problems))
        return problems
    expected, problem_on_0 = json.loads(ranks.read("description", writer=0, purpose=purpose))
    verdict = own_problem
    if verdict is None and problem_on_0 is None:
        verdict = first_difference(expected, json.loads(json.dumps(description)))
    ranks.publish(f"verdict/{ranks.rank}", json.dumps(verdict))
    problems = json.loads(ranks.read("problems", writer=0, purpose=purpose))
    assert isinstance(problems, list)
    return problems


def first_difference(expected: Mapping[str, object], found: Mapping[str, object]) -> str | None:
    """The first entry in which two descriptions differ, in words; None if they are equal."""
    missing = [name for name in expected if name not in found]
    if missing:
        return f"{_listed(missing)} missing here, found on rank 0. Build the same model on every rank."
    extra = [name for name in found if name not in expected]
    if extra:
        return f"{_listed(extra)} found here, missing on rank 0. Build the same model on every rank."
    for name, value in expected.items():
        if found[name] != value:
            return f"{name} is {_words(found[name])} here, {_words(value)} on rank 0. Make them equal on every rank."
    if list(expected) != list(found):
        return "the same parameters in another order. Build the model in the same order on every rank."
    return None


def _words(properties: object) -> str:
    return ", ".join(map(str, properties)) if isinstance(properties, list) else str(properties)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
