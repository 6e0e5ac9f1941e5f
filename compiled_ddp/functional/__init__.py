"""Functional data parallelism: gradients of plain functions, whose mean over ranks is part of the graph."""

from compiled_ddp.functional.checkpointing import checkpoint
from compiled_ddp.functional.collectives import all_gather, all_reduce, broadcast, fold_in_rank, rank, world_size
from compiled_ddp.functional.communicator import Communicator
from compiled_ddp.functional.compiled import compile
from compiled_ddp.functional.overlap import overlap
from compiled_ddp.functional.transforms import grad, grad_and_value

__all__ = ["Communicator", "all_gather", "all_reduce", "broadcast", "checkpoint", "compile", "fold_in_rank", "grad"]
__all__ += ["grad_and_value", "overlap", "rank", "world_size"]
