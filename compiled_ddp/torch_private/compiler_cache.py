"""Inductor's cache on disk: where it is, whether it keeps what is compiled, and what a graph is there."""

import contextlib
import functools
import hashlib
import platform
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule


def folder() -> Path:
    """Inductor's cache: `TORCHINDUCTOR_CACHE_DIR`, or a folder of the user's own below that of temporary files."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def own_folder(inductors: Path | None = None) -> Path:
    """What this package keeps beside that: below the folder in use, or another one of Inductor's."""
    return (folder() if inductors is None else inductors) / "compiled_ddp"


def write_whole(file: Path, content: bytes, mode: int | None = None) -> None:
    """Put `content` there at once: whoever reads meanwhile finds what was there before, or all of it.

    Where that fails, as on a full disk, what was there before stays. Raises OSError. `mode` is the new file's, by
    default as the umask has it.
    """
    new = file.with_name(f"{file.name}.{uuid.uuid4().hex}")  # pods that share a file system have equal process numbers
    try:
        new.write_bytes(content)
        if mode is not None:
            new.chmod(mode)
        new.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


# A pass of the user's that has no identity (`CustomGraphPass.uuid`) keeps whatever it rewrites out of the cache.
_USERS_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)


def keeps_graphs(options: Mapping[str, Any]) -> bool:
    """Whether another process finds there what is compiled with these config patches.

    Not what it cannot keep for what stands in the graph: that is known when it has been compiled.
    """
    from torch._inductor import config

    with config.patch(dict(options)):
        users = [getattr(config, name, None) for name in _USERS_PASSES]
        return bool(config.fx_graph_cache) and not config.force_disable_caches and all(map(_has_identity, users))


def _has_identity(passes: Any) -> bool:
    every = passes if isinstance(passes, Sequence) else [passes]
    return all(one is None or (hasattr(one, "uuid") and one.uuid() is not None) for one in every)


def identity_of(graph_module: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> dict[str, str]:
    """Equal in two processes whose caches have the same key for the graph: that of a graph is made as it is compiled.

    By what has an influence on the key, in words for users.
    """
    from torch._inductor import config

    described = [_described(value) for value in inputs]
    autocast = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in sorted({value.device.type for value in inputs if isinstance(value, torch.Tensor)})
    ]
    with config.patch(dict(options)):
        settings = sorted((name, _shown(value)) for name, value in config.save_config_portable().items())
    return {
        "graph": digest(_without_places(graph_module.print_readable(print_output=False))),
        "inputs": digest(described),
        "compiler's options": digest(settings),
        "modes": f"gradients {torch.is_grad_enabled()}, autocast {autocast}",
        "torch": torch.__version__,
        "processor": processor(inputs),
        "number of threads": str(torch.get_num_threads()),
    }


def _without_places(text: str) -> list[str]:
    """The lines of a graph but for comments, which say where in the sources it comes from."""
    return [line for line in text.splitlines() if not line.lstrip().startswith("#")]


def digest(value: object) -> str:
    """The same for values of equal repr."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


class Lookups:
    """How many graphs this process has found in the cache since this was made, and how many it has compiled."""

    def __init__(self) -> None:
        self._before = _counts()

    @property
    def found(self) -> int:
        return _counts()[0] - self._before[0]

    @property
    def missed(self) -> int:
        return _counts()[1] - self._before[1]


def _counts() -> tuple[int, int]:
    from torch._dynamo.utils import counters

    of_inductor = counters["inductor"]
    missed = of_inductor["fxgraph_cache_miss"] + of_inductor["fxgraph_cache_bypass"]
    return of_inductor["fxgraph_cache_hit"], missed


def processor(inputs: Sequence[Any] = ()) -> str:
    """What code for these inputs is written for; nothing of it is in the keys of torch's caches (2.13).

    C++ compilers write for all instructions of this very processor (`-march=native`).
    """
    gpus = {value.device for value in inputs if isinstance(value, torch.Tensor) and value.device.type == "cuda"}
    of_gpus = sorted({torch.cuda.get_device_name(gpu) for gpu in gpus})
    return ", ".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), _instructions(), *of_gpus])


@functools.cache
def _instructions() -> str:
    try:
        of_linux = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return platform.processor()
    return f"instructions {digest(instruction_sets(of_linux))[:8]}"


# What compilers write for a kind of processor. Linux names much besides as a flag that comes and goes with kernel,
# microcode and hypervisor (`ibrs`, `md_clear`, `arat`, `ssbs`): on an equal processor code runs all the same.
_INSTRUCTION_SET = re.compile(
    # x86; `pni` is SSE3, `abm` has lzcnt
    r"cmov|cx16|lahf_lm|pni|s?sse\w*|avx\w*|amx_\w+|fma4?|f16c|xop|tbm|bmi[12]|adx|abm|popcnt|movbe|gfni"
    r"|v?aes|v?pclmulqdq|sha_ni"
    # ARM
    r"|fp|fphp|asimd\w*|sve\w*|sme\w*|bf16|i8mm|jscvt|fcma|frint|flagm2?|i?lrcpc|atomics|crc32|pmull"
    # both
    r"|sha\d+|sm[34]"
)


def instruction_sets(cpuinfo: str) -> list[str]:
    """Those of the first processor that this text of Linux, `/proc/cpuinfo`, tells of."""
    flags = next((line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))), "")
    return sorted(set(filter(_INSTRUCTION_SET.fullmatch, flags.partition(":")[2].split())))


def _shown(value: object) -> str:
    """A repr that is equal in every process: without the addresses of functions."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


# Where Inductor's settings have one of these, all ranks ask each other something as they compile.
_ASKS_OTHERS: tuple[str, ...] = (
    "distributed_max_autotune_gemm",
    "runtime_estimations_mms_benchmark",
    "runtime_estimations_align_across_all_distributed_ranks",
)
_ASKS_OTHERS_OF_COLLECTIVES = ("aten_distributed_optimizations.spmd_check",)


def asks_other_ranks(graph_module: GraphModule, options: Mapping[str, Any]) -> bool:
    """Whether Inductor waits for other ranks in the middle of compiling this graph."""
    from torch._inductor import config

    names = _ASKS_OTHERS
    if any("c10d" in str(node.target) for node in graph_module.graph.nodes):
        names += _ASKS_OTHERS_OF_COLLECTIVES
    with config.patch(dict(options)):
        settings = config.get_config_copy()
    estimated = settings.get("aten_distributed_optimizations.collective_estimator") == "benchmark"
    return estimated or any(settings.get(name) for name in names)


def _described(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return str(value)
    stride = value.stride() if value.layout == torch.strided else ()
    return str(value.shape), str(stride), value.dtype, str(value.device), value.requires_grad, type(value).__name__
