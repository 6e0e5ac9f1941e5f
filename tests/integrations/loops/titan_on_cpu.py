"""Makes torchtitan use the CPU: to be imported before its other modules, which read the device at their import.

It has no option for that: without an accelerator it takes CUDA for the device. The backend is that of the device.
"""

import types

import torch
import torch.distributed as dist
from torchtitan.tools import utils

utils.device_type = "cpu"
# torch.cpu, and what torchtitan asks torch.cuda for besides.
utils.device_module = types.SimpleNamespace(
    set_device=torch.cpu.set_device,
    synchronize=torch.cpu.synchronize,
    device_count=torch.cpu.device_count,
    current_device=lambda: 0,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=2**30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)

if not hasattr(dist, "set_timeout"):  # torch 2.14 has it, and torchtitan 0.3.0 calls it after the first step
    dist.set_timeout = lambda timeout, group: None
