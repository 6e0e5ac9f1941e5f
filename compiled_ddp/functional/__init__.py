"""Functional data parallelism: gradients of plain functions, whose mean over ranks is part of the graph."""

from compiled_ddp.functional.communicator import Communicator
from compiled_ddp.functional.compiled import compile
from compiled_ddp.functional.transforms import grad, grad_and_value

__all__ = ["Communicator", "compile", "grad", "grad_and_value"]
