"""A process that nobody has launched as one of several is the only rank: a migrated script runs without torchrun."""

import logging
import os
import weakref

import torch.distributed as dist

from compiled_ddp.telling import log

_logger = logging.getLogger(__name__)

# What torchrun, and whoever sets up ranks by hand, leaves in the environment.
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
# How many processes other launchers have started.
_COUNTS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


# The process that has made a group of one here, and that group, for as long as it is there.
_made: tuple[int, "weakref.ref[dist.ProcessGroup]"] | None = None


def begin_alone() -> None:
    """Initialise torch.distributed for one rank, and say so in a line, where nothing tells of other ranks.

    Nothing happens where torch.distributed is initialised, or a launcher has told this process of others: that is a
    script that forgot `init_process_group()`, and an error.

    Raises RuntimeError where what is initialised is such a group of one and this process is one of several by now: a
    notebook has trained alone, and its launcher forks, or has this process be rank 0.
    """
    global _made
    if not dist.is_available():
        return
    if dist.is_initialized():
        _refuse_one_of_several()
        return
    if _is_launched():
        return
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    if dist.group.WORLD is not None:
        _made = os.getpid(), weakref.ref(dist.group.WORLD)
    log.tell(
        _logger,
        "no process group, and nothing in the environment that tells of other ranks: this process trains alone, as "
        "under plain torch.compile. To train on several ranks start the script with torchrun, and call "
        "torch.distributed.init_process_group() before wrapping the model.",
    )


def _refuse_one_of_several() -> None:
    if _made is None:
        return
    process, group = _made
    if group() is dist.group.WORLD and (process != os.getpid() or _is_one_of_several()):
        raise RuntimeError(
            f"this process inherited a process group of one rank, which process {process} made when it trained alone, "
            "so each rank would train by itself: restart the kernel, or call torch.distributed.destroy_process_group() "
            "before launching."
        )


def _is_launched() -> bool:
    return any(name in os.environ for name in _OF_RANKS) or _is_one_of_several()


def _is_one_of_several() -> bool:
    """Whether a launcher has started several: some set an address, and rank 0, for a single process too."""
    counts = (os.environ.get(name, "1") for name in ("WORLD_SIZE", *_COUNTS))
    return any(count != "1" for count in counts)
