"""`compiled-ddp`, or `python -m compiled_ddp`: the commands. torch is imported once the arguments have been read."""

import argparse
import sys
from collections.abc import Sequence

from compiled_ddp.comparison import arguments as comparison
from compiled_ddp.parity import arguments as parity


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)
    if options.command == "compare":
        from compiled_ddp.comparison.command import run as compare

        return compare(options)
    from compiled_ddp.parity.command_line import run as verify

    return verify(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options. Ends the process, with what to write, where they cannot be used."""
    parser = argparse.ArgumentParser(
        prog="compiled-ddp", description="Data-parallel training in the compiled graph: commands for your own model."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    comparison.add_to(commands)
    parity.add_to(commands)
    options = parser.parse_args(arguments)
    problem = (comparison if options.command == "compare" else parity).problem(options)
    if ":" not in options.target:
        problem = f"{options.target!r} has no colon: write SCRIPT:FUNCTION, for example train.py:make"
    if problem is not None:
        parser.error(problem)
    return options


if __name__ == "__main__":
    sys.exit(main())
