"""A process that nobody has launched as one of several is the only rank: a migrated script runs without torchrun."""

import logging
import os

import torch.distributed as dist

from compiled_ddp.telling import log

_logger = logging.getLogger(__name__)

# What torchrun, and whoever sets up ranks by hand, leaves in the environment.
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
# How many processes other launchers have started.
_COUNTS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def begin_alone() -> None:
    """Initialise torch.distributed for one rank, and say so in a line, where nothing tells of other ranks.

    Nothing happens where torch.distributed is initialised, or a launcher has told this process of others: that is a
    script that forgot `init_process_group()`, and an error.
    """
    if not dist.is_available() or dist.is_initialized() or _is_launched():
        return
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    log.tell(
        _logger,
        "no process group, and nothing in the environment that tells of other ranks: this process trains alone, as "
        "under plain torch.compile. To train on several ranks start the script with torchrun, and call "
        "torch.distributed.init_process_group() before wrapping the model.",
    )


def _is_launched() -> bool:
    counts = (os.environ.get(name, "1") for name in _COUNTS)
    return any(name in os.environ for name in _OF_RANKS) or any(count != "1" for count in counts)
