"""What ranks are forked with: `ranks` has a process import this module and nothing else, for each rank number.

What is imported here is imported once for all pools of a session. Frozen, it is left alone by the collector of each
rank, which would walk through it and so copy its memory: a rank starts in a third of a second instead of two. Nothing
is computed here, and no thread started, which a fork would not take along.
"""

import gc

import torch
import torch._inductor.compile_fx
import torch.distributed

import compiled_ddp.public

__all__ = ["compiled_ddp", "torch"]

gc.collect()
gc.freeze()
