"""`compiled-ddp`, or `python -m compiled_ddp`: the commands. torch is imported once the arguments have been read."""

import argparse
import re
import sys
from collections.abc import Sequence

import compiled_ddp
from compiled_ddp.keywords import suggestion
from compiled_ddp.tools.calibration import arguments as calibration
from compiled_ddp.tools.comparison import arguments as comparison
from compiled_ddp.tools.explanation import arguments as explanation
from compiled_ddp.tools.parity import arguments as parity
from compiled_ddp.tools.precompile import arguments as precompile
from compiled_ddp.tools.simulation import arguments as simulation


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)
    if options.command == "env":
        from compiled_ddp.tools.comparison.env_command import run as tell

        return tell()
    if options.command == "compare":
        from compiled_ddp.tools.comparison.command import run as compare

        return compare(options)
    if options.command == "precompile":
        from compiled_ddp.tools.precompile.command import run as precompile

        return precompile(options)
    if options.command == "explain":
        from compiled_ddp.tools.explanation.command import run as explain

        return explain(options)
    if options.command == "calibrate":
        from compiled_ddp.tools.calibration.command import run as calibrate

        return calibrate(options)
    if options.command == "simulate":
        from compiled_ddp.tools.simulation.command import run as simulate

        return simulate(options)
    from compiled_ddp.tools.parity.command_line import run as verify

    return verify(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options. Ends the process, with what to write, where they cannot be used."""
    parser = argparse.ArgumentParser(
        prog="compiled-ddp", description="Data-parallel training in the compiled graph: commands for your own model."
    )
    parser.add_argument("--version", action="version", version=f"compiled-ddp {compiled_ddp.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    comparison.add_to(commands)
    parity.add_to(commands)
    precompile.add_to(commands)
    calibration.add_to(commands)
    explanation.add_to(commands)
    simulation.add_to(commands)
    told = "print what a bug report needs: versions, hardware, the environment"
    commands.add_parser("env", help=told, description=f"{told[0].upper()}{told[1:]}.")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        meant = _meant(unknown, commands.choices[options.command])
        parser.error(f"unrecognized arguments: {' '.join(unknown)}.{meant}")
    problem = None if options.command == "env" else _problem(options)
    if problem is not None:
        parser.error(problem)
    return options


def _problem(options: argparse.Namespace) -> str | None:
    if options.command == "simulate":
        return simulation.problem(options)
    if options.command == "calibrate":
        return calibration.problem(options)
    if ":" not in options.target:
        return f"{options.target!r} has no colon: write SCRIPT:FUNCTION, for example train.py:make"
    if options.command == "precompile":
        return precompile.problem(options)
    if options.command == "explain":
        return explanation.problem(options)
    return comparison.problem(options) if options.command == "compare" else parity.problem(options)


def _meant(unknown: Sequence[str], command: argparse.ArgumentParser) -> str:
    known = set(re.findall(r"(?<![\w-])--[\w-]+", command.format_help()))
    return "".join(suggestion(name.partition("=")[0], known) for name in unknown if name.startswith("--"))


if __name__ == "__main__":
    sys.exit(main())
