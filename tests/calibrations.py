"""Calibrations that nobody measured."""

from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.cost_model import Compute, Link


def calibration(
    *, startup_seconds: float = 1e-4, bytes_per_second: float = 1e9, world_size: int = 2, hosts: int = 1
) -> Calibration:
    """Of a link like this one, and of a core of a CPU."""
    link = Link(startup_seconds, bytes_per_second, host_seconds=2e-5)
    return Calibration("gloo", world_size, hosts, "cpu", link, Compute(5e10, 1e10))
