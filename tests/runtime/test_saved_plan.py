"""A plan as a file: what one run has, the next one pins; a plan of another model is refused on every rank."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import wrappers
from torch import nn

from compiled_ddp import Calibration, EagerDDP, SavedPlan, comm_hooks, compile_ddp
from compiled_ddp.planning.cost_model import Compute, Link
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def model(*, width: int = 8, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def trained(ddp: Any, rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    for _ in range(2):
        ddp(torch.randn(4, 8)).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()}


def launched(ddp: Any) -> list[list[str]]:
    names = ddp.plan.parameter_names
    return [[names[index] for index in bucket.indices] for bucket in ddp.plan.buckets]


def _pinned(rank: int, kind: str, path: Path) -> tuple[list[list[str]], list[list[str]], str]:
    wrap = wrappers([kind])[kind]
    first = wrap(model(), bucket_cap_mb=4e-4, first_bucket_mb=1e-4)
    expected = trained(first, rank)
    if rank == 0:
        first.plan.save(path)
    torch.distributed.barrier()
    second = wrap(model(), plan=SavedPlan.load(path))
    found = trained(second, rank)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    return launched(first), launched(second), str(second.explain())


@pytest.mark.parametrize("kind", BOTH)
def test_a_pinned_plan_has_the_buckets_of_the_run_that_saved_it(ranks2: RankPool, kind: str, tmp_path: Path) -> None:
    for before, after, told in ranks2.run(_pinned, kind, tmp_path / "plan.json"):
        assert len(before) > 1
        assert after == before
        assert "Buckets are those of the plan that was given." in told


def _by_graphs_what_hooks_have_saved(rank: int, path: Path) -> str:
    hooks = EagerDDP(model(), bucket_cap_mb=1e-5)
    trained(hooks, rank)
    if rank == 0:
        hooks.plan.save(path)
    torch.distributed.barrier()
    graphs = compile_ddp(model(), backend="aot_eager", plan=SavedPlan.load(path))
    trained(graphs, rank)
    assert launched(graphs) == launched(hooks)
    return str(graphs.explain())


def test_graphs_take_the_plan_of_hooks(ranks2: RankPool, tmp_path: Path) -> None:
    for told in ranks2.run(_by_graphs_what_hooks_have_saved, tmp_path / "plan.json"):
        assert re.search(r"\n\s+0\s+graph ", told)


def _equal_blocks(rank: int, path: Path) -> bool:
    """Three calls of one graph, with other buckets each: a graph for each of them."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
                torch._dynamo.graph_break()
            return x

    document = {
        "plan": 1,
        "world_size": 2,
        "buckets": [
            ["blocks.2.bias", "blocks.2.weight"],
            ["blocks.1.weight"],
            ["blocks.1.bias"],
            ["blocks.0.weight", "blocks.0.bias"],
        ],
        "parameters": {
            f"blocks.{n}.{kind}": f"float32 {[8, 8] if kind == 'weight' else [8]}"
            for n in range(3)
            for kind in ("weight", "bias")
        },
    }
    if rank == 0:
        path.write_text(json.dumps(document))
    torch.distributed.barrier()
    torch.manual_seed(0)
    plan = SavedPlan.load(path)
    ddp = compile_ddp(Blocks(), backend="aot_eager", plan=plan, smallest_graph_mb=0)
    trained(ddp, rank)
    return launched(ddp) == [list(bucket) for bucket in plan.buckets]


def test_equal_blocks_have_the_buckets_that_the_plan_gives_each(ranks2: RankPool, tmp_path: Path) -> None:
    assert all(ranks2.run(_equal_blocks, tmp_path / "plan.json"))


def _of_another_model(rank: int, path: Path, changed: dict[str, int]) -> str:
    first = EagerDDP(model())
    trained(first, rank)
    if rank == 0:
        first.plan.save(path)
    torch.distributed.barrier()
    with pytest.raises(ValueError, match="plan= does not fit") as caught:
        EagerDDP(model(**changed), plan=SavedPlan.load(path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"layers": 4}, "it has no bucket for 3.weight"),
        ({"layers": 2}, "2.weight is not trained here"),
        ({"width": 9}, r"0.weight is float32 \[9, 9\], float32 \[8, 8\] there"),
    ],
)
def test_a_plan_of_another_model_is_refused_with_the_first_difference(
    ranks2: RankPool, tmp_path: Path, changed: dict[str, int], difference: str
) -> None:
    for message in ranks2.run(_of_another_model, tmp_path / "plan.json", changed):
        assert re.search(difference, message), message


def _different_plans(rank: int, path: Path) -> str:
    first = EagerDDP(model(), bucket_cap_mb=1e-5)
    trained(first, rank)
    own = path.with_suffix(f".{rank}")
    first.plan.save(own)
    document = json.loads(own.read_text())
    if rank == 1:
        document["buckets"].reverse()
    own.write_text(json.dumps(document))
    with pytest.raises(RuntimeError, match="rank 1: option plan is") as caught:
        EagerDDP(model(), plan=SavedPlan.load(own))
    return str(caught.value)


def test_ranks_with_different_plans_are_told_so(ranks2: RankPool, tmp_path: Path) -> None:
    for message in ranks2.run(_different_plans, tmp_path / "plan.json"):
        here, there = re.findall(r"SavedPlan\(6 parameters in 6 buckets, (\w+)\)", message)
        assert here != there


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "holds no plan"),
        ("[]", "expected a JSON object"),
        ('{"plan": 99}', "expected a JSON object with plan: 1"),
        ('{"plan": 1, "world_size": 2, "buckets": [["a"]]}', "holds no plan: 'parameters'"),
        (
            '{"plan": 1, "world_size": 2, "buckets": [["a"], ["a"]], "parameters": {"a": "x"}}',
            "a stands in two buckets",
        ),
        ('{"plan": 1, "world_size": 2, "buckets": [["a"]], "parameters": {"a": "", "b": ""}}', "b stands in no bucket"),
        ('{"plan": 1, "world_size": 2, "buckets": [["a", "b"]], "parameters": {"a": ""}}', "b stands in a bucket, and"),
    ],
)
def test_a_file_without_a_plan_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"plan.json .*{told}"):
        SavedPlan.load(path)


# ---- for what was measured -------------------------------------------------------------------------------------------


class Pause(torch.autograd.Function):
    """Lets the backward wait here for 20 ms."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return gradient


class Slow(nn.Sequential):
    """Layers whose gradients are ready one after the other, as nothing but a measurement can tell."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = Pause.apply(layer(x)) if not torch.compiler.is_compiling() else layer(x)
        return x


def _measured(rank: int, kind: str) -> list[list[str]]:
    wrap = wrappers([kind])[kind]
    link = Calibration("gloo", 2, 1, "cpu", Link(1e-4, 1e4), Compute(1e9, 1e9))  # 30 ms for each layer
    ddp = wrap(Slow(*model()), bucket_cap_mb=25, calibration=link)
    with pytest.raises(RuntimeError, match="a rank has not measured the buckets that are launched now"):
        ddp.measured_plan()
    trained(ddp, rank)
    if rank == 0:
        ddp.profile(3)
    trained(ddp, rank)
    trained(ddp, rank)
    with pytest.raises(RuntimeError, match="a rank has not measured"):  # on rank 0, which has, too
        ddp.measured_plan()
    ddp.profile(3)
    trained(ddp, rank)
    expected = trained(ddp, rank)
    plan = ddp.measured_plan()
    again = wrap(ddp.unwrap(), plan=plan)
    again.zero_grad()
    for _ in range(2):  # gradients add up from call to call, as they did before
        found = trained(again, rank)
    assert launched(again) == [[*bucket] for bucket in plan.buckets]
    assert found.keys() == expected.keys()
    return [[*bucket] for bucket in plan.buckets]


@pytest.mark.parametrize("kind", BOTH)
def test_a_measured_plan_is_the_same_on_all_ranks_and_can_be_pinned(ranks2: RankPool, kind: str) -> None:
    first, second = ranks2.run(_measured, kind)
    assert first == second
    assert kind == "compile_ddp" or len(first) > 1  # hooks know no more than sizes without it


def _not_measurable(rank: int) -> None:
    with pytest.raises(RuntimeError, match="needs to know the link: pass calibration="):
        EagerDDP(model(), bucket_cap_mb=25).measured_plan()
    hooked = EagerDDP(model(), comm_hook=comm_hooks.bf16_compress)
    trained(hooked, rank)
    with pytest.raises(RuntimeError, match="a communication hook reduces"):
        hooked.measured_plan()


def test_what_cannot_be_measured_is_refused(ranks2: RankPool) -> None:
    ranks2.run(_not_measurable)
