"""What Inductor makes of the passes' graphs, read from the code it generates, and what its caches keep."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from generated_code import launches_and_waits, placed, read_statements, reads_in_flight
from models import Mlp, TokenModel, assert_gradients, expected_mean, token_batch
from torch import Tensor, nn

from compiled_ddp import compile_ddp, torch_private
from ranks import RankPool

pytestmark = pytest.mark.inductor

LIMITS = {"timeout_seconds": 400, "collective_timeout_seconds": 120}  # ranks wait for each other's compiler


def small() -> nn.Module:
    """A kernel in the forward and few in the backward."""
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh())


# ---- the generated code ----------------------------------------------------------------------------------------------


def _backward_source(rank: int) -> tuple[str, list[int], int]:
    model = TokenModel()
    ddp = compile_ddp(model, bucket_cap_mb=0.004, first_bucket_mb=0.002, fullgraph=True)
    x, y = token_batch(rank)
    expected = expected_mean(model, lambda module: module(x, y))
    sources = torch_private.for_tests.generated_code(lambda: ddp(x, y).backward())
    assert_gradients(model, expected, rtol=1e-4, atol=1e-6)
    (backward,) = [source for source in sources if "all_reduce_" in source]
    assert not any("all_reduce" in source or "wait_tensor" in source for source in sources if source is not backward)
    linear_layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    return backward, [bucket.numel for bucket in ddp.plan.buckets], linear_layers


def test_generated_backward_launches_early_waits_late_and_copies_nothing(ranks2: RankPool) -> None:
    (source, numels, linear_layers), (other_source, _, _) = ranks2.run(
        _backward_source, timeout_seconds=300, collective_timeout_seconds=120
    )
    code, other_code = (text[text.index("def call(") :] for text in (source, other_source))  # the head numbers graphs
    assert code == other_code, "the code depends on the rank"
    statements, aliases = read_statements(source)
    launches, waits = launches_and_waits(statements)
    assert len(launches) == len(waits) == len(numels) > 3

    buckets = [statements[n].buffers[0] for n in launches]
    given = [int(re.search(rf"{bucket} = flat_buffer_(\d+)  # alias", source)[1]) for bucket in buckets]
    assert given == list(range(len(numels))), "launches are not in the plan's order"
    assert all("'sum'" in statements[n].text for n in launches)

    for n, bucket in zip(launches, buckets, strict=True):
        before = [statement for statement in statements[:n] if statement.kind in ("mm", "kernel")]
        writers = [s for s in before if bucket in {aliases.get(name, name) for name in s.buffers}]
        assert statements[n - 1] is writers[-1], f"{bucket} is not launched right after its last gradient"

    assert sum(placed(statements, aliases, "extern_kernels.mm(")) == linear_layers, (
        "a weight gradient was not written straight into its bucket"
    )
    assert "copy_" not in source
    assert "cat" not in source.replace("allocat", "")
    allocated = [int(n) for n in re.findall(r"empty_strided_cpu\(\((\d+), \)", source)]
    assert all(n < min(numels) for n in allocated), "a bucket was copied"


class Noisy(nn.Module):
    """Of the two matrices the gradient of one is the other's, times noise: "Noisy Networks for Exploration"."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.deviation = (nn.Parameter(torch.randn(6, 5) * scale) for scale in (0.5, 0.1))
        self.register_buffer("noise", torch.randn(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mean + self.deviation * self.noise)


class Added(nn.Module):
    """The gradient of what is added to an activation is the activation's, from which the weight's is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.position, self.low, self.high = (
            nn.Linear(5, 6),
            nn.Parameter(torch.randn(1, 3, 6)),
            nn.Parameter(torch.randn(2, 5)),
            nn.Parameter(torch.randn(6, 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x) + self.position)
        return F.linear(x, self.first.weight + self.high @ self.low) * y


def _shared_gradients(rank: int, keep_buffers: bool, reduction: str) -> list[str]:
    model = nn.Sequential(Added(), nn.Linear(6, 5), Noisy(), nn.Flatten())
    options = {"keep_buffers": keep_buffers, "reduction": reduction}
    ddp = compile_ddp(model, bucket_cap_mb=1e-6, first_bucket_mb=1e-6, **options)
    read = []
    for step in range(3):
        x = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        expected = expected_mean(model, lambda module: module(x).square().sum())  # noqa: B023
        ddp.zero_grad()
        sources = torch_private.for_tests.generated_code(lambda: ddp(x).square().sum().backward())  # noqa: B023
        read += [
            text for source in sources if "all_reduce_" in source for text in reads_in_flight(*read_statements(source))
        ]
        factor = 2.0 if reduction == "sum" else 1.0
        assert_gradients(model, {name: factor * value for name, value in expected.items()}, rtol=1e-3, atol=1e-5)
        assert step or sources
    return read


@pytest.mark.parametrize(("keep_buffers", "reduction"), [(True, "mean"), (False, "mean"), (True, "sum")])
def test_a_gradient_that_others_are_computed_from_is_not_read_from_a_bucket_in_flight(
    ranks2: RankPool, keep_buffers: bool, reduction: str
) -> None:
    """[Note: read in flight]"""
    assert ranks2.run(_shared_gradients, keep_buffers, reduction, **LIMITS) == [[], []]


def _keeps_its_flat_buffers(rank: int) -> None:
    model = Mlp()
    ddp = compile_ddp(model, bucket_cap_mb=0.0001, first_bucket_mb=0.0001)

    def step(number: int) -> list[Tensor]:
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * number + rank))
        expected = expected_mean(model, lambda module: module(x).square().sum())
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        assert_gradients(model, expected, rtol=1e-4, atol=1e-6)
        return [parameter.grad for parameter in model.parameters()]

    first = [gradient.data_ptr() for gradient in step(0)]
    kept = step(1)
    assert [gradient.data_ptr() for gradient in kept] == first, "a flat buffer was allocated again"
    values = [gradient.clone() for gradient in kept]
    assert not {gradient.data_ptr() for gradient in step(2)} & set(first)
    assert all(torch.equal(*pair) for pair in zip(kept, values, strict=True)), "a gradient that the user keeps changed"
    del kept  # what was the user's memory stays it: the allocator has it, which may give it to anyone
    third = [gradient.data_ptr() for gradient in step(3)]
    assert [gradient.data_ptr() for gradient in step(4)] == third, "a flat buffer was allocated again"
    assert not ddp._runtime.reduction.proof.unverified, "launches of generated code are seen"


def test_flat_buffers_are_kept_from_step_to_step_unless_the_user_keeps_a_gradient(ranks2: RankPool) -> None:
    ranks2.run(_keeps_its_flat_buffers, **LIMITS)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.conv(x))).square().sum()


def _trains(rank: int) -> None:
    """A no_sync step, a folding one and plain ones, with Inductor."""
    model = ConvNet()
    ddp = compile_ddp(model, bucket_cap_mb=0.001, first_bucket_mb=0.0005)
    batches = [torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * n + rank)) for n in range(3)]
    for first, second in ((0, 1), (1, 2)):
        expected = expected_mean(model, lambda module: module(batches[first]) + module(batches[second]))  # noqa: B023
        with ddp.no_sync():
            ddp(batches[first]).backward()
        before = {name: parameter.grad for name, parameter in model.named_parameters()}
        ddp(batches[second]).backward()
        assert_gradients(model, expected, rtol=1e-3, atol=1e-5)
        assert all(parameter.grad is before[name] for name, parameter in model.named_parameters())
        ddp.zero_grad()
    expected = expected_mean(model, lambda module: module(batches[0]))
    ddp(batches[0]).backward()
    assert_gradients(model, expected, rtol=1e-3, atol=1e-5)
    assert {section.origin for section in ddp.plan.sections} == {"graph"}


def test_convolution_accumulates_and_folds_under_inductor(ranks2: RankPool) -> None:
    ranks2.run(_trains, **LIMITS)


def _with_users_passes(rank: int) -> dict[str, list[bool]]:
    """For every kind of custom pass: of each graph it was given, whether it has a collective."""
    seen: list[bool] = []
    found = {}
    passes = torch_private.for_tests.custom_graph_passes(lambda graph: seen.append("all_reduce" in str(graph)))
    for kind, users_pass in passes.items():
        model = small()
        ddp = compile_ddp(model, options={"post_grad_custom_pre_pass": users_pass, "fx_graph_cache": False})
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
        expected = expected_mean(model, lambda module: module(x).square().sum())  # noqa: B023
        ddp(x).square().sum().backward()
        assert_gradients(model, expected, rtol=1e-4, atol=1e-6)
        found[kind], seen[:] = seen.copy(), ()
    return found


def test_a_users_custom_pass_of_any_kind_is_given_the_forward_and_the_rewritten_backward(ranks2: RankPool) -> None:
    for found in ranks2.run(_with_users_passes, **LIMITS):
        several = found.pop("several", None)
        assert found and all(graphs == [False, True] for graphs in found.values()), found
        assert several in (None, [False] * len(found) + [True] * len(found))


# ---- the caches ------------------------------------------------------------------------------------------------------


def _cache_counts() -> dict[str, int]:
    counters = torch_private.for_tests.compiler_counters()
    names = ("autograd_cache_hit", "autograd_cache_miss"), ("fxgraph_cache_hit", "fxgraph_cache_miss")
    groups = counters.get("aot_autograd", {}), counters.get("inductor", {})
    return {name: group.get(name, 0) for group, pair in zip(groups, names, strict=True) for name in pair}


def _first_step(
    rank: int, directories: list[str], bucket_cap_mb: float = 1e-6, earlier_wrappers: int = 0
) -> dict[str, int]:
    """Cache hits and misses of a first step, and that explain() and gradients are right in it."""
    before = _cache_counts()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TORCHINDUCTOR_CACHE_DIR", directories[rank])
        for _ in range(earlier_wrappers):
            compile_ddp(Mlp(), backend="aot_eager")
        model = small()
        caps = {"bucket_cap_mb": bucket_cap_mb, "first_bucket_mb": bucket_cap_mb}
        ddp = compile_ddp(model, compile_once=False, **caps)  # else ranks send each other what they compile
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
        expected = expected_mean(model, lambda module: module(x).square().sum())
        ddp(x).square().sum().backward()
    assert_gradients(model, expected, rtol=1e-4, atol=1e-6)
    buckets = ddp.plan.buckets
    assert [row[1] for row in ddp.explain().rows] == ["graph"] * len(buckets)
    return {**{name: count - before[name] for name, count in _cache_counts().items()}, "buckets": len(buckets)}


def test_caches_serve_a_second_start_and_every_rank_and_nothing_else(
    ranks2: RankPool, ranks3: RankPool, tmp_path: Path
) -> None:
    """The cache that rank 0 has filled serves rank 1 of a second start, where rank 0 is the one that compiles."""
    shared, empty = str(tmp_path / "shared"), str(tmp_path / "empty")
    cold = ranks2.run(_first_step, [shared, str(tmp_path / "own")], **LIMITS)
    assert [result["autograd_cache_miss"] for result in cold] == [1, 1]
    with RankPool(2) as fresh_processes:
        compiles, warm = fresh_processes.run(_first_step, [empty, shared], **LIMITS)
    assert (compiles["autograd_cache_hit"], compiles["autograd_cache_miss"]) == (0, 1)
    assert warm["autograd_cache_hit"] == 1
    assert warm["fxgraph_cache_miss"] == warm["autograd_cache_miss"] == 0
    assert warm["buckets"] == cold[0]["buckets"] > 1

    def copies(name: str, ranks: int) -> list[str]:
        """For each rank one of its own, so that none finds what another has compiled just now."""
        return [str(shutil.copytree(shared, tmp_path / name / str(rank))) for rank in range(ranks)]

    changes = {
        "bucket size": ranks2.run(_first_step, copies("bucket_size", 2), 1.0, **LIMITS),
        "world size": ranks3.run(_first_step, copies("world_size", 3), **LIMITS),
    }
    for change, results in changes.items():
        assert all(result["autograd_cache_hit"] == 0 for result in results), (change, results)
    of_another_group = ranks2.run(_first_step, copies("another_group", 2), 1e-6, 1, **LIMITS)
    assert [result["autograd_cache_hit"] for result in of_another_group] == [1, 1]
