"""What Inductor writes for a backward on CUDA, read without a GPU: see `cuda_code`."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from generated_code import Statement, body_of, launches_and_waits, placed, read_statements
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from compiled_ddp.comm_hooks import CommHook, PowerSGD, TopK, bf16_compress, fp16_compress
from compiled_ddp.torch_private import inductor

pytest.importorskip("triton", reason="Inductor needs triton to write CUDA code; a CUDA build of torch brings it")

from cuda_code import CudaCode, cuda_code

pytestmark = pytest.mark.product

SMALL_BUCKET_BYTES = 40_000.0


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Block(nn.Module):
    """Of a GPT. Attention is written out, as the CPU's fused kernel exists on no other device."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        with sdpa_kernel(SDPBackend.MATH):
            attended = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        x = x + self.narrow(F.gelu(self.widen(self.after(x))))
        return x.square().mean()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.norms, self.head = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(32)]), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(x)))
        x = F.relu(self.norms[1](self.second(x)))
        return self.head(x.mean((2, 3))).square().mean()


class TwoDtypes(Perceptron):
    """The layer in the middle has parameters of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        first, gelu, second, _, third = self.layers
        y = second(gelu(first(x)).to(torch.bfloat16))
        return third(gelu(y).float()).square().mean()


class Autocast(Perceptron):
    """In `dtype`, with parameters of 32 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            y = self.layers(x)
        return y.float().square().mean()


ROWS, TOKENS, IMAGES = torch.randn(16, 64), torch.randn(2, 8, 64), torch.randn(4, 3, 8, 8)
BATCHES: dict[type[nn.Module], Tensor] = {Perceptron: ROWS, Block: TOKENS, Convolutions: IMAGES}
SYNCHRONISES = re.compile(r"synchronize|\.item\(|\.cpu\(|\.tolist\(|device='cpu'|empty_strided_cpu|_local_scalar")


@functools.cache
def code_of(model: type[nn.Module], *, capacity_bytes: float = SMALL_BUCKET_BYTES, **options: Any) -> CudaCode:
    """`cuda_code` of this model, which takes seconds: once for all tests that read the same."""
    return cuda_code(model(), [BATCHES[model]], capacity_bytes=capacity_bytes, **options)


def statements_of(code: CudaCode) -> tuple[list[Statement], dict[str, str]]:
    """What the code does, when it has been seen that it launches early, waits late and never waits for the device."""
    statements, aliases = read_statements(code.source)
    launches, waits = launches_and_waits(statements)
    assert len(launches) == len(waits) == len(code.plan.buckets) > 1
    ready = -1  # when all gradients of the buckets launched so far are there
    for n in launches:
        bucket = statements[n].buffers[0]
        ready = max([ready, *(n for n, _ in writers(statements[:n], aliases, bucket))])
        since = {statement.kind for statement in statements[ready + 1 : n]}
        assert since <= {"launch"}, f"{bucket} is not launched right after its last gradient"
    body = body_of(code.source)
    assert not SYNCHRONISES.search(body), "the host waits for the device"
    allocated = 2 if code.plan.reduction == "hook" else 1  # for what a hook sends, and what it makes of what comes back
    for bucket in code.plan.buckets:  # a lent one is an input
        assert body.count(f"empty_strided_cuda(({bucket.numel}, )") <= allocated, "a bucket was allocated to be copied"
    return statements, aliases


def before_the_first_wait(statements: Sequence[Statement]) -> Sequence[Statement]:
    return statements[: [statement.kind for statement in statements].index("wait")]


def writers(statements: Sequence[Statement], aliases: Mapping[str, str], bucket: str) -> list[tuple[int, Statement]]:
    """What names this bucket, or a part of it, before it is launched, and where."""
    found = [(n, s) for n, s in enumerate(statements) if bucket in {aliases.get(name, name) for name in s.buffers}]
    assert found, f"nothing fills {bucket}"
    return found


STATIC_AND_DYNAMIC = pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])


@pytest.mark.parametrize("fold", [False, True], ids=["synchronised", "folding"])
@STATIC_AND_DYNAMIC
def test_gradients_of_linear_layers_are_produced_inside_of_their_bucket(fold: bool, dynamic: bool | None) -> None:
    code = code_of(Perceptron, fold=fold, dynamic=dynamic)
    statements, aliases = statements_of(code)
    of_inputs = [False, False]  # their gradients are products, too
    if fold:
        assert placed(statements, aliases, "extern_kernels.addmm(") == [True, True, True]
        assert placed(statements, aliases, "extern_kernels.mm(") == of_inputs
    else:
        assert sorted(placed(statements, aliases, "extern_kernels.mm(")) == [*of_inputs, True, True, True]


def test_a_product_reads_what_earlier_backwards_left_and_scales_it_itself() -> None:
    code = code_of(Perceptron, fold=True, dynamic=None)
    products = re.findall(r"extern_kernels\.addmm\((pending_\d+), .*alpha=1\.0, beta=0\.125,", code.source)
    assert len(products) == 3
    others = [line for line in body_of(code.source).splitlines() if "triton_" in line]
    assert not any(name in line for name in products for line in others), "a kernel of its own reads it as well"


@STATIC_AND_DYNAMIC
def test_a_gpt_block_launches_early_and_copies_no_weight_gradient(dynamic: bool | None) -> None:
    code = cuda_code(Block(), [TOKENS], capacity_bytes=SMALL_BUCKET_BYTES, dynamic=dynamic)
    statements, aliases = statements_of(code)
    assert sum(placed(statements, aliases, "extern_kernels.mm(")) == 4


def test_convolutions_with_batch_norm_launch_early() -> None:
    statements, _ = statements_of(cuda_code(Convolutions(), [IMAGES], capacity_bytes=5_000.0))
    launches, _ = launches_and_waits(statements)
    convolutions = [n for n, statement in enumerate(statements) if "convolution_backward" in statement.text]
    assert len(convolutions) == 2
    assert min(launches) < max(convolutions), "nothing is reduced while the backward goes on"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_gradients_of_autocast_are_widened_into_their_bucket(dtype: torch.dtype) -> None:
    code = cuda_code(Autocast(dtype), [ROWS], capacity_bytes=SMALL_BUCKET_BYTES)
    statements_of(code)
    assert {bucket.dtype for bucket in code.plan.buckets} == {torch.float32}


def test_buckets_of_two_dtypes_are_launched_in_one_order() -> None:
    code = cuda_code(TwoDtypes(), [ROWS], capacity_bytes=8_000.0)
    dtypes = [bucket.dtype for bucket in code.plan.buckets]
    assert dtypes == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    statements, aliases = statements_of(code)
    assert sorted(placed(statements, aliases, "extern_kernels.mm(")) == [False, False, True, True, True]


# ---- modes -----------------------------------------------------------------------------------------------------------

MODELS = pytest.mark.parametrize(("model", "linear_layers"), [(Perceptron, 3), (Block, 4)], ids=["perceptron", "gpt"])
WITHOUT_CUDA_GRAPHS = "max-autotune-no-cudagraphs"


@MODELS
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_the_graph_for_cuda_graphs_is_one_partition(mode: str, model: type[nn.Module], linear_layers: int) -> None:
    code = code_of(model, mode=mode)
    assert "def partition_0(" in code.source
    statements, aliases = statements_of(code)
    assert sum(placed(statements, aliases, "extern_kernels.mm(")) == linear_layers


@MODELS
@pytest.mark.parametrize("fold", [False, True], ids=["synchronised", "folding"])
def test_templates_that_autotuning_chooses_write_into_the_bucket(
    fold: bool, model: type[nn.Module], linear_layers: int
) -> None:
    code = code_of(model, fold=fold, mode=WITHOUT_CUDA_GRAPHS, templates=True)
    assert "extern_kernels.mm(" not in body_of(code.source)
    statements, aliases = statements_of(code)
    assert sum(placed(statements, aliases, "triton_tem_")) == linear_layers


# ---- compression -----------------------------------------------------------------------------------------------------

COMPRESSIONS = pytest.mark.parametrize(
    ("hook", "dtype"),
    [(bf16_compress, torch.bfloat16), (fp16_compress, torch.float16)],
    ids=["bfloat16", "float16"],
)


@COMPRESSIONS
@pytest.mark.parametrize("model", [Perceptron, Block, Convolutions], ids=["perceptron", "gpt", "convolutions"])
def test_compressed_buckets_carry_16_bits_and_each_gradient_is_cast_as_it_is_put_there(
    model: type[nn.Module], hook: CommHook, dtype: torch.dtype
) -> None:
    code = code_of(model, capacity_bytes=8_000.0, hook=hook)
    statements, aliases = statements_of(code)
    launches, waits = launches_and_waits(statements)
    for n, bucket in zip(launches, code.plan.buckets, strict=True):
        sent = statements[n].buffers[0]
        if bucket.riders is not None:
            continue
        assert f"{sent} = empty_strided_cuda(({bucket.numel}, ), (1, ), {dtype})" in code.source
        filled = writers(statements[:n], aliases, sent)
        assert len(filled) <= len(bucket.gradients), "a gradient is written more than once"
    after = statements[waits[0] :]
    widened = [s.text for s in after if s.kind != "wait"]
    assert len(widened) == len(launches) - 1, "what has come back is more than widened, in one kernel for a bucket"


@COMPRESSIONS
def test_casts_are_no_kernels_of_their_own_but_for_what_products_write(hook: CommHook, dtype: torch.dtype) -> None:
    """A product's gradient is cast by a kernel, as Inductor fuses nothing into its template that lies in other memory.

    cuBLAS writes no 16 bits of factors of 32.
    """
    sizes = {}
    for templates in (False, True):
        options = {"mode": WITHOUT_CUDA_GRAPHS, "templates": templates}
        plain, compressed = code_of(Perceptron, fold=False, **options), code_of(Perceptron, hook=hook, **options)
        kernels = [
            sum(s.kind in ("kernel", "mm") for s in before_the_first_wait(read_statements(code.source)[0]))
            for code in (plain, compressed)
        ]
        sizes[templates] = kernels[1] - kernels[0]
    assert sizes == {False: 3, True: 3}


def test_a_sparse_compression_gathers_early_and_waits_late() -> None:
    code = cuda_code(Perceptron(), [ROWS], capacity_bytes=8_000.0, hook=TopK(0.01))
    body = body_of(code.source)
    assert not SYNCHRONISES.search(body), "the host waits for the device"
    sent = [match.start() for match in re.finditer(r"(?m)^[\w ]+(= )?torch\.ops\._c10d_functional\.all_", body)]
    assert len(sent) == 2 * (len(code.plan.buckets) - 1) + 1, "values and indices of each bucket, and the riders"
    assert body.index("wait_tensor") > sent[-1]
    assert body.count(".mm(") == 5
    assert sent[0] < body.rindex(".mm("), "nothing is sent while the backward goes on"


def test_a_compression_in_two_rounds_never_waits_on_the_host() -> None:
    code = cuda_code(Perceptron(), [ROWS], capacity_bytes=8_000.0, hook=PowerSGD())
    body = body_of(code.source)
    assert not SYNCHRONISES.search(body), "the host waits for the device"
    launched, awaited = (
        re.findall(rf"_c10d_functional\.{name}\.default\((buf\d+)", body) for name in ("all_reduce_", "wait_tensor")
    )
    assert len(launched) == 2 * (len(code.plan.buckets) - 1) + 1
    assert sorted(launched) == sorted(awaited), "an all-reduce is not in place"


def test_what_was_pretended_is_gone_afterwards() -> None:
    def found() -> list[object]:
        return [torch.cuda.is_available(), torch.cuda.device_count(), torch.version.cuda, dist.is_initialized()]

    before = found()
    cuda_code(Perceptron(), [ROWS], capacity_bytes=SMALL_BUCKET_BYTES)
    assert found() == before
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), fullgraph=True)
    compiled(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in compiled.parameters())


def test_torchs_own_scheduling_moves_nothing_of_this(monkeypatch: pytest.MonkeyPatch) -> None:
    options = inductor.reducing_options()
    if inductor.MOVES_COLLECTIVES not in options:
        pytest.skip(f"torch {torch.__version__} moves no collectives by itself, 2.14 does")
    ours = cuda_code(Perceptron(), [ROWS], capacity_bytes=SMALL_BUCKET_BYTES)
    monkeypatch.setattr(inductor, "reducing_options", lambda: {**options, inductor.MOVES_COLLECTIVES: True})
    moved = cuda_code(Perceptron(), [ROWS], capacity_bytes=SMALL_BUCKET_BYTES)
    assert body_of(moved.source) == body_of(ours.source)
