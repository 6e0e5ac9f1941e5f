"""Run a program on reused ranks, and end it if it hangs."""

from fuzz.description import Program
from fuzz.source import source_of
from fuzz.training import train
from ranks import RankError, RankPool

# A collective that nobody joins fails first and names itself; what hangs otherwise is ended with every rank's stacks.
# Long enough for a machine with other work, where one rank compiles for tens of seconds while another one waits for it.
COLLECTIVE_TIMEOUT_SECONDS = 60.0
TIMEOUT_SECONDS = 240.0
INDUCTOR_TIMEOUT_SECONDS = 600.0  # g++ runs for every kernel


def compare(pool: RankPool, program: Program, wrappers: tuple[str, ...]) -> None:
    """Raise AssertionError, with the program and its source, unless each wrapper trains it as autograd by hand does.

    The pool resets Dynamo after every run, so that no program finds another's graphs or uses up its recompile limit,
    and spawns new ranks after one that failed or hung.
    """
    slow = "inductor" in wrappers
    try:
        differences = pool.run(
            train,
            program,
            wrappers,
            timeout_seconds=INDUCTOR_TIMEOUT_SECONDS if slow else TIMEOUT_SECONDS,
            collective_timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS * (3 if slow else 1),
        )
    except RankError as error:
        raise AssertionError(f"failed on {pool.world_size} ranks\n{_describe(program)}\n{error}") from None
    found = [f"rank {rank}: {line}" for rank, lines in enumerate(differences) for line in lines]
    if found:
        raise AssertionError("\n".join([f"differs on {pool.world_size} ranks", *found, _describe(program)]))


def _describe(program: Program) -> str:
    return "\n".join([repr(program), *(source_of(model) for model in program.models)])
