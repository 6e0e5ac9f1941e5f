"""`compiled-ddp simulate`."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.step_model import Job, Mode
from compiled_ddp.tools.command_line.target import check_target
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.simulation import chart, jobs, measured, table
from compiled_ddp.tools.simulation.algorithms import Hop, Network
from compiled_ddp.tools.simulation.simulate import RANKS, Step, simulate, told_of_overlap

_UNKNOWN = Hop(0.0, float("inf"))  # until a calibration says more


def run(options: argparse.Namespace) -> int:
    """Print the table; returns the exit status, 2 where there is nothing to simulate, with the reason on stderr."""
    try:
        _check_plot(options)
        network = _network(options)
        ranks = options.ranks or _that_fill_their_hosts(network)
        job = _job(options)
        steps = simulate(job, network, ranks, overlap=not options.no_overlap, mode=options.mode)
        _write(options, job, network, steps)
    except (OSError, TypeError, ValueError) as error:
        sys.stderr.write(f"simulate: {error}\n")
        return 2
    return 0


def _check_plot(options: argparse.Namespace) -> None:
    if options.plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'compiled-ddp[compare]'")
    if options.plot.suffix not in chart.KINDS:
        raise ValueError(f"--plot must be one of {', '.join(chart.KINDS)}, found {options.plot}")


def _that_fill_their_hosts(network: Network) -> list[int]:
    """Those of RANKS; where a host has no power of two, so many hosts instead."""
    inside = network.ranks_per_host
    if inside & (inside - 1) == 0:
        return [*RANKS]
    return [number * inside for number in (1, *RANKS) if 2 <= number * inside <= RANKS[-1]]


def _job(options: argparse.Namespace) -> Job:
    if options.model is not None:
        check_target(options.model)
        return _as_told(measured.measure(options.model, options.steps), options)
    forward, backward = options.forward_ms / 1e3, options.backward_ms / 1e3
    optimizer = (options.optimizer_ms or 0.0) / 1e3
    if options.sizes is not None:
        return jobs.load(options.sizes, forward, backward, optimizer)
    nbytes = jobs.transformer(options.parameters, options.layers, options.element_bytes, options.embedding)
    return Job(nbytes, jobs.ready_by_sizes(nbytes, backward), forward, optimizer)


def _as_told(job: Job, options: argparse.Namespace) -> Job:
    """With those times that were given, as of another device, in place of measured ones."""
    if options.backward_ms is not None:
        job = job.scaled(options.backward_ms / 1e3)
    if options.forward_ms is not None:
        job = replace(job, forward_seconds=options.forward_ms / 1e3)
    if options.optimizer_ms is not None:
        job = replace(job, optimizer_seconds=options.optimizer_ms / 1e3)
    return job


def _network(options: argparse.Namespace) -> Network:
    if options.algorithm != "hierarchical":
        network = Network(options.algorithm, _hop(options.startup_us, options.gbit))
        return network if options.calibration is None else _fitted(network, options.calibration)
    network = Network(
        options.between or "ring",
        _hop(options.startup_us, options.gbit),
        within=_hop(options.within_startup_us, options.within_gbit),
        ranks_per_host=options.ranks_per_host,
        links_per_host=options.links_per_host or 1,
    )
    if options.within_calibration is not None:
        calibration = Calibration.load(options.within_calibration)
        if calibration.world_size > options.ranks_per_host:
            raise ValueError(f"{options.within_calibration} is of {calibration.world_size} ranks, more than a host has")
        network = _fitted(network, options.within_calibration)
    if options.calibration is None:
        return network
    if Calibration.load(options.calibration).world_size <= options.ranks_per_host:
        raise ValueError(f"{options.calibration} says nothing of links between hosts: its ranks would all be on one")
    return _fitted(network, options.calibration)


def _fitted(network: Network, path: Path) -> Network:
    calibration = Calibration.load(path)
    if calibration.world_size < 2:
        raise ValueError(f"{path} is of one rank, which reduces nothing: calibrate with two or more")
    return network.fitted(calibration.link, calibration.world_size)


def _hop(startup_us: float | None, gbit: float | None) -> Hop:
    return _UNKNOWN if startup_us is None or gbit is None else Hop(startup_us / 1e6, gbit * 1e9 / 8)


def _write(options: argparse.Namespace, job: Job, network: Network, steps: Sequence[Step]) -> None:
    title = _title(job, network, options.mode)
    told = told_of_overlap(steps, overlap=not options.no_overlap, mode=options.mode)
    sys.stdout.write(f"{title}\n\n{table.render(steps)}\n\n{told}\n{table.NOTES}\n")
    if options.json is not None:
        data = {
            "recipe": recipe(Path.cwd()),
            "job": asdict(job),
            "network": {name: value for name, value in asdict(network).items() if name != "besides"},
            "overlap": not options.no_overlap,
            "mode": options.mode,
            "steps": [asdict(step) | _derived(step) for step in steps],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(data, indent=1, allow_nan=False), encoding="utf-8")
        sys.stdout.write(f"Recipe and all figures: {options.json}\n")
    if options.plot is not None:
        chart.draw(steps, options.plot, f"{title} {told}")
        sys.stdout.write(f"Picture: {options.plot}\n")


def _derived(step: Step) -> dict[str, Any]:
    names = ("exposed_seconds", "efficiency", "ratio_to_fixed", "is_link_bound")
    return {name: getattr(step, name) for name in names}


_MODES = {
    "all-reduced": "",
    "sharded": " updated by shares",
    "pipelined": " updated by shares, gathered in the next step",
    "deferred": " gathered and updated in the next step",
}


def _title(job: Job, network: Network, mode: Mode) -> str:
    """What is simulated, in one sentence or two."""
    hop = network.between
    link = f"{network.algorithm}, {hop.startup_seconds * 1e6:.3g} us and {hop.bytes_per_second * 8e-9:.4g} Gbit/s a hop"
    if network.within is not None:
        link += (
            f" between hosts of {network.ranks_per_host} ranks, {network.within.startup_seconds * 1e6:.3g} us and "
            f"{network.within.bytes_per_second * 8e-9:.4g} Gbit/s inside"
        )
    return (
        f"Predicted: {sum(job.nbytes) / 2**20:.1f} MiB in {len(job.nbytes)} gradients{_MODES[mode]}, ready "
        f"{job.readiness.source}; "
        f"{1e3 * job.compute_seconds:.4g} ms of computation, of which {1e3 * job.readiness.backward_seconds:.4g} "
        f"backward; {link}."
    )
