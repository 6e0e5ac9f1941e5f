"""What generated CUDA code does to the memory of buckets, at real sizes, read without a GPU: see `bucket_memory`.

Templates are chosen by pretended timings, as there is nothing to time: what autotuning may choose is read, not what it
does choose on some device. Kernels of users' own and the C++ wrapper are not in it.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiled_ddp.torch_private import compiler_options, packing

pytest.importorskip("triton", reason="Inductor needs triton to write CUDA code; a CUDA build of torch brings it")

from bucket_memory import faults_of
from cuda_code import CudaCode, cuda_code
from cuda_zoo import ROWS, WIDTH, ZOO

WORLD_SIZE = 7  # whose reciprocal is a factor of nothing but the mean
BUCKET_BYTES = 3e6

REPLAYED = {"fold": True, "mode": "reduce-overhead"}
TEMPLATES = {"mode": "max-autotune", "templates": True}
DTYPES = ("float32", "bfloat16", "autocast")


def code_of_zoo(name: str, dtype: str, **how: Any) -> CudaCode:
    model, batch = ZOO[name].model_and_batch(dtype)
    return cuda_code(model, batch, capacity_bytes=BUCKET_BYTES, world_size=WORLD_SIZE, **how)


# ---- the zoo ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "how"),
    [
        ("norms", "bfloat16", {**TEMPLATES, "dynamic": True}),
        ("post-norm, tied", "autocast", REPLAYED),
        ("convolutions", "float32", {}),
        ("experts", "float32", {"dynamic": True}),
    ],
)
def test_every_element_of_every_bucket_is_written_once_before_its_launch(
    name: str, dtype: str, how: dict[str, Any]
) -> None:
    assert code_of_zoo(name, dtype, **how).faults() == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(ZOO))
def test_it_is_so_for_the_whole_zoo(name: str, dtype: str) -> None:
    """Static and dynamic, folding or not, in each mode: each network and each dtype in each of the three ways that
    differ most, and none of what is read above once more."""
    ways = [{}, {**REPLAYED, "dynamic": dtype == "float32"}, TEMPLATES]
    how = ways[(list(ZOO).index(name) + DTYPES.index(dtype) + 1) % len(ways)]
    assert code_of_zoo(name, dtype, **how).faults() == [], how


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"combo_kernels": True},
        # Together they end in an assertion of Inductor's (torch 2.13).
        {"triton.force_cooperative_reductions": True, "triton.mix_order_reduction": False},
        {"triton.nested_reduction": True},
        {"coordinate_descent_tuning": True},
        {"memory_planning": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_it_is_so_with_options_that_make_other_kernels(options: dict[str, bool]) -> None:
    try:
        compiler_options.inductor_options(None, options, None)
    except ValueError as unknown:
        pytest.skip(str(unknown))
    assert code_of_zoo("norms", "float32", options=options).faults() == []


# ---- planted faults --------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(500, WIDTH), nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return self.second(self.norm(self.first(self.words(words)))).square().mean()


def small() -> CudaCode:
    words = torch.zeros(ROWS, dtype=torch.int64)
    return cuda_code(Small(), [words], capacity_bytes=BUCKET_BYTES, world_size=WORLD_SIZE)


@pytest.fixture(scope="module")
def code() -> CudaCode:
    return small()


def kinds(code: CudaCode, source: str) -> set[str]:
    assert source != code.source, "nothing is planted"
    return {fault.partition(":")[0] for fault in faults_of(source, code.expected, mean=code.mean)}


def edited(source: str, pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> str:
    """The first statement of the wrapper that matches is another."""
    at = source.index("def call(self")
    return source[:at] + re.sub(pattern, replacement, source[at:], count=1)


# Up to torch 2.14 a kernel copies a sum over many rows into the bucket; from 2.15 on `copy_` does.
COPY_OF_A_SUM = (
    r"( +)(?:triton_poi_fused_\w+\.run\(buf\d+, (?P<by_kernel>buf\d+), 768, .*"
    r"|(?P<by_copy>buf\d+)\.copy_\((?P<sum>.*)\))\n"
)
SUM = r" +triton_per_fused_sum\w*\.run\(buf\d+, buf\d+, 768, .*\n"
PRODUCT = r"extern_kernels\.mm\((.*), out=(buf\d+)\)"
LAUNCH = r"( +)torch\.ops\._c10d_functional\.all_reduce_\.default\((buf\d+),.*\n"


def places_of_the_norm(source: str) -> tuple[str, list[str]]:
    """Its bucket, and the offsets of its two gradients, which are sums that are copied."""
    views = [copy["by_kernel"] or copy["by_copy"] for copy in re.finditer(COPY_OF_A_SUM, source)]
    found = [
        re.search(rf"{view} = reinterpret_tensor\((buf\d+), \(768, \), \(1, \), (\d+)\)", source) for view in views
    ]
    bucket, other = (place[1] for place in found if place is not None)
    assert bucket == other
    return bucket, [place[2] for place in found if place is not None]


def exchanged(source: str, behind: str) -> str:
    """The offsets of both, where they are followed by this."""
    bucket, offsets = places_of_the_norm(source)
    first, second = (f"reinterpret_tensor({bucket}, (768, ), (1, ), {offset}){behind}" for offset in offsets)
    assert first in source
    assert second in source
    return source.replace(first, "the first").replace(second, first).replace("the first", second)


def launched_too_early(source: str) -> str:
    bucket, _ = places_of_the_norm(source)
    launch = re.search(rf" +torch\.ops\._c10d_functional\.all_reduce_\.default\({bucket},.*\n", source)
    assert launch is not None
    return edited(source.replace(launch[0], ""), COPY_OF_A_SUM, lambda copy: launch[0] + copy[0])


def without_copy(copy: re.Match[str]) -> str:
    return f"{copy[1]}{copy['by_copy']} = {copy['sum']}\n" if copy["by_copy"] else ""


PLANTED: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "a product that is bound": (
        "bound instead of written",
        lambda source: edited(source, PRODUCT, r"\2 = torch.ops.aten.mm.default(\1)"),
    ),
    "a copy of a sum that is left out": (
        "bound instead of written",
        lambda source: edited(source, COPY_OF_A_SUM, without_copy),
    ),
    "a copy of an input that is left out": (
        "never written",
        lambda source: edited(source, r" +triton_poi_fused_\w+\.run\(riders, .*\n", ""),
    ),
    "a kernel that stores one element less": (
        "never written",
        lambda source: edited(source, SUM, lambda line: line[0].replace(" 768,", " 767,")),
    ),
    "a view that is one element shorter": (
        "never written",
        lambda source: edited(
            source,
            r"reinterpret_tensor\((buf\d+), \(768, 768\), \(768, 1\), (\d+)\)  # alias",
            r"reinterpret_tensor(\1, (767, 768), (768, 1), \2)  # alias",
        ),
    ),
    "a mask that leaves one element out": (
        "never written",
        lambda source: re.sub(
            r"(def triton_per_fused_sum\w*\(in_ptr0, out_ptr\d.*\n +xnumel = )768\n", r"\g<1>767\n", source
        ),
    ),
    "a read in flight": (
        "in flight",
        lambda source: edited(source, LAUNCH, r"\g<0>\1late = torch.ops.aten.sum.default(\2)\n"),
    ),
    "a launch before the last gradient": ("in flight", lambda source: launched_too_early(source)),
    "no wait": ("in flight", lambda source: edited(source, r" +torch\.ops\._c10d_functional\.wait_tensor.*\n", "")),
    "two gradients in each other's place": ("exchanged", lambda source: exchanged(source, "  # alias")),
    "two outputs exchanged": ("returned from elsewhere", lambda source: exchanged(source, ",")),
    "a mean that is taken twice": ("mean", lambda source: edited(source, LAUNCH, r"\1\2.mul_(1 / 7)\n\g<0>")),
    "a mean that is not taken": ("mean", lambda source: source.replace(repr(1 / 7), "1.0")),
    "a gradient that is written twice": (
        "written twice",
        lambda source: edited(source, f"( +){PRODUCT}\n", r"\g<0>\g<0>"),
    ),
    "an embedding's gradient without zeros below it": (
        "added to nothing",
        lambda source: edited(source, r" +triton_poi_fused_embedding_dense_backward\w*\.run\(buf\d+, 384000.*\n", ""),
    ),
}


@pytest.mark.parametrize("planted", list(PLANTED))
def test_a_planted_fault_is_found(code: CudaCode, planted: str) -> None:
    kind, plant = PLANTED[planted]
    assert kind in kinds(code, plant(code.source))


def test_a_sum_over_many_rows_is_not_bound(code: CudaCode, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Call mix order reduction kernel" in code.source, "these are not the sizes that Inductor does so at"
    assert code.faults() == []
    if torch.__version__ >= "2.15":
        return
    monkeypatch.setattr(packing, "_may_be_bound", lambda _: False)
    lost = [fault for fault in small().faults() if fault.startswith("bound instead of written")]
    assert len(lost) == 2
    assert all("workspace_0[" in fault for fault in lost)
