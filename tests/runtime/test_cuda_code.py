"""What Inductor writes for a backward on CUDA, read without a GPU: see `cuda_code`."""

import re

import pytest
import torch
import torch.nn.functional as F
from generated_code import Statement, body_of, launches_and_waits, placed, read_statements
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("triton", reason="Inductor needs triton to write CUDA code; a CUDA build of torch brings it")

from cuda_code import CudaCode, cuda_code

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
SYNCHRONISES = re.compile(r"synchronize|\.item\(|\.cpu\(|\.tolist\(|device='cpu'|empty_strided_cpu|_local_scalar")


def statements_of(code: CudaCode) -> tuple[list[Statement], dict[str, str]]:
    """What the code does, when it has been seen that it launches early, waits late and never waits for the device."""
    statements, aliases = read_statements(code.source)
    launches, waits = launches_and_waits(statements)
    assert len(launches) == len(waits) == len(code.plan.buckets) > 1
    for n in launches:
        bucket = statements[n].buffers[0]
        writers = [s for s in statements[:n] if bucket in {aliases.get(name, name) for name in s.buffers}]
        since = statements[statements.index(writers[-1]) + 1 : n]
        assert {s.kind for s in since} <= {"launch"}, f"{bucket} is not launched right after its last gradient"
    body = body_of(code.source)
    assert not SYNCHRONISES.search(body), "the host waits for the device"
    for bucket in code.plan.buckets:  # a lent one is an input
        assert body.count(f"empty_strided_cuda(({bucket.numel}, )") <= 1, "a bucket was allocated twice, to be copied"
    return statements, aliases


@pytest.mark.parametrize("fold", [False, True], ids=["synchronised", "folding"])
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_gradients_of_linear_layers_are_produced_inside_of_their_bucket(fold: bool, dynamic: bool | None) -> None:
    code = cuda_code(Perceptron(), [ROWS], capacity_bytes=SMALL_BUCKET_BYTES, fold=fold, dynamic=dynamic)
    statements, aliases = statements_of(code)
    kernel, of_inputs = ("addmm", []) if fold else ("mm", [False, False])  # the inputs' gradients are products, too
    assert sorted(placed(statements, aliases, kernel)) == [*of_inputs, True, True, True]


def test_a_gpt_block_launches_early_and_copies_no_weight_gradient() -> None:
    statements, aliases = statements_of(cuda_code(Block(), [TOKENS], capacity_bytes=SMALL_BUCKET_BYTES))
    assert sum(placed(statements, aliases, "mm")) == 4


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


def test_the_graph_for_cuda_graphs_is_one_partition() -> None:
    code = cuda_code(
        Perceptron(),
        [ROWS],
        capacity_bytes=SMALL_BUCKET_BYTES,
        replayed=True,
        options={"triton.cudagraphs": True, "graph_partition": True},
    )
    assert "def partition_0(" in code.source
    statements_of(code)
