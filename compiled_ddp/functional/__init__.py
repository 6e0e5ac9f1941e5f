"""Functional data parallelism: gradients of plain functions, averaged over ranks inside the graph."""

from typing import TYPE_CHECKING, NoReturn

from compiled_ddp.functional.checkpointing import checkpoint
from compiled_ddp.functional.collectives import all_gather, all_reduce, broadcast, fold_in_rank, rank, world_size
from compiled_ddp.functional.communicator import Communicator
from compiled_ddp.functional.compiled import compile
from compiled_ddp.functional.operator import overlap
from compiled_ddp.functional.transforms import grad, grad_and_value

__all__ = ["Communicator", "all_gather", "all_reduce", "broadcast", "checkpoint", "compile", "fold_in_rank", "grad"]
__all__ += ["grad_and_value", "overlap", "rank", "world_size"]

# Names that other libraries have for what is here.
_HERE = {
    "value_and_grad": "grad_and_value, which returns the gradients first",
    "jit": "compile",
    "pmean": 'all_reduce(tensor, "mean")',
    "psum": 'all_reduce(tensor, "sum")',
    "pmap": "grad, whose mean over ranks is part of it, and compile: each rank is a process of its own",
}


if not TYPE_CHECKING:  # or type checkers would take any name to be there

    def __getattr__(name: str) -> NoReturn:
        here = f": here it is {_HERE[name]}" if name in _HERE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{here}", name=name)
