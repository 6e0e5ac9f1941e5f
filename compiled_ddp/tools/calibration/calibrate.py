"""`calibrate()`: the measurement of `ranks/calibration.py`, on a communicator of its own."""

import math

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.errors import NotInitialisedError
from compiled_ddp.keywords import suggests_keywords
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.ranks.agreement import Description, agree_on_description
from compiled_ddp.ranks.calibration import SECONDS, measure
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.rank_group import RankGroup


@suggests_keywords
@torch_private.dynamo.untraced
def calibrate(
    process_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    seconds: float = SECONDS,
) -> Calibration:
    """Measure what an all-reduce of these ranks takes by its size, and how fast they compute: the same on every rank.

    A collective: every rank of the group calls it, and nothing else should run meanwhile. The model, what each number
    means and its limits are on the page "Calibration". Draws no random numbers, and leaves no process group behind.

    Args:
        process_group: the ranks; None is all of them.
        device: where tensors are; None is the CPU for a gloo group, and the current accelerator for others.
        seconds: how long it takes, about. A slow link is measured with smaller all-reduces.

    Returns:
        A `Calibration`, which `save` writes as JSON. That of one rank alone has a link that is infinitely fast.

    Raises:
        RuntimeError: torch.distributed is not initialised, ranks ask for different things, or one does not answer
            within the group's timeout.
        TypeError: an argument is of none of these types.
        ValueError: the group reduces no tensors of `device`, `seconds` is not positive, or this rank is not in the
            group. On one rank it is an error on every rank.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise NotInitialisedError(
            "torch.distributed is not initialised, so there is no link to measure: call "
            "torch.distributed.init_process_group() first and start the script with torchrun, or run "
            "`compiled-ddp calibrate --ranks 2`, which starts ranks on this machine."
        )
    ranks = RankGroup(process_group)
    place = torch.device("cpu")

    def describe() -> Description:
        nonlocal place
        _check_seconds(seconds)
        place = _place(ranks, device)
        return {"device": [place.type], "seconds": [seconds]}

    agree_on_description(
        ranks, describe, purpose="to compare what ranks want to measure", failure="nothing was measured"
    )
    communicator = Communicator(ranks, remedy="call calibrate() in new processes")
    try:
        return measure(communicator, place, seconds=seconds)
    finally:
        communicator.close()


def _check_seconds(seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"seconds must be a number, found {seconds!r}.")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be positive and finite, found {seconds!r}.")


def _place(ranks: RankGroup, given: torch.device | str | None) -> torch.device:
    """The device of the tensors. Raises ValueError where the group reduces none of its kind."""
    if given is None:
        accelerator = None if ranks.is_gloo else torch.accelerator.current_accelerator(check_available=True)
        given = accelerator or "cpu"
    elif not isinstance(given, torch.device | str):
        raise TypeError(f"device must be a torch.device, a str or None, found {given!r}.")
    try:
        place = torch.device(given)
        if place.type != "cpu" and str(place) == place.type:  # without a number
            place = torch.device(place.type, torch.accelerator.current_device_index())
        torch_private.groups.check_backends(ranks.process_group, [place])
    except (RuntimeError, ValueError) as error:
        config = dist.get_backend_config(ranks.process_group)
        raise ValueError(
            f"device must be one whose tensors the process group ({config}) reduces on this machine, found {given!r}."
        ) from error
    return place
