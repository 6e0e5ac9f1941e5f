"""A step of a small model under torch.profiler: where each bucket is launched, and where it is waited for.

    torchrun --nproc-per-node 2 docs/examples/profile_step.py step.json

Rank 0 writes the trace, which https://ui.perfetto.dev opens. The ranges of this package are called
"compiled_ddp: launch bucket 0 (...)" and "compiled_ddp: wait for bucket 0 (...)"; docs/guides/profile.md explains them.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from compiled_ddp import compile_ddp

torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = [nn.Sequential(nn.Linear(768, 768), nn.GELU()) for _ in range(6)]
ddp = compile_ddp(nn.Sequential(*layers), bucket_cap_mb=5, first_bucket_mb=2)
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

# The first steps compile and are proven; a later one is what training looks like.
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=3, warmup=1, active=1)) as profiler:
    for _ in range(5):
        loss = ddp(torch.randn(256, 768)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()

if dist.get_rank() == 0:
    profiler.export_chrome_trace(sys.argv[1])
dist.destroy_process_group()
