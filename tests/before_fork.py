"""What ranks are forked with: `ranks` has a process import this module and nothing else, for each rank number.

What is imported here is imported once for all pools of a session. Frozen, it is left alone by the collector of each
rank, which would walk through it and so copy its memory: a rank starts in a third of a second instead of two. Nothing
is computed here, and no thread started, which a fork would not take along.
"""

import gc
import importlib

for name in ("torch", "torch.distributed", "torch._inductor.compile_fx", "compiled_ddp.public"):
    importlib.import_module(name)
gc.collect()
gc.freeze()
