"""The table of real models: what is counted in the first steps, and what is derived from the samples."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import real_model_rank, real_models
from benchmarks.zoo import SMALL, TINY, ZOO
from benchmarks.zoo.by_hand import Difference, Loop, difference, train_beside
from compiled_ddp.tools.comparison.ranks import Rank
from ranks import RankError, RankPool

FOUND: dict[str, Any] = {
    "model": "GPT-2",
    "size": "tiny",
    "backend": "aot_eager",
    "parameters": 2_000_000,
    "captured": {
        "compile_ddp": {"graphs": 2, "breaks": 3, "recompilations": 1},
        "plain compiled": {"graphs": 2, "breaks": 3, "recompilations": 0},
    },
    "reduced": {"share_run": 0.75, "by_hooks": ["too small"], "sparse": ["table.weight"]},
    "samples_s": {
        "compile_ddp": [0.2, 0.3, 0.9],
        "torch DDP": [0.1, 0.2, 0.3],
        "plain eager": [0.1, 0.1, 0.1],
        "plain compiled": [0.2, 0.2, 0.2],
    },
    "failed": {"torch.compile(DDP)": "RuntimeError: no"},
    "choice": "",
}


def test_ratios_are_taken_round_by_round() -> None:
    row = real_models.row_of_steps(FOUND)
    assert (row.ddp_ms, row.ours, row.plain) == (pytest.approx(200), pytest.approx(2.0), pytest.approx(0.5))
    assert row.floor == pytest.approx(3.0)  # to the better of the floors, which is the eager one
    assert row.compiled_ddp is None
    assert row.note == "torch.compile(DDP): RuntimeError: no"


def test_what_was_captured_stands_beside_what_torch_compile_captures() -> None:
    row = real_models.row_of_captures(FOUND)
    assert (row.graphs, row.breaks, row.breaks_plain, row.again, row.again_plain) == (2, 3, 3, 1, 0)
    assert (row.share, row.why) == (0.75, "too small; sparse: table.weight")
    assert "75%" in real_models.tables([FOUND])


def test_a_model_that_was_measured_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"models": [FOUND]}))
    real_models.main(["--model", "GPT-2", "--keep", "--json", str(path)])
    assert "75%" in capsys.readouterr().out


def test_what_a_warm_up_has_chosen_is_what_explain_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    part = SimpleNamespace(warmup=lambda *_, **__: None, explain=lambda: SimpleNamespace(chosen="Chosen: graphs."))
    trainer = real_model_rank.Trainer.__new__(real_model_rank.Trainer)
    trainer.parts, trainer._size, trainer._rank = {"model": part}, TINY, SimpleNamespace(index=0)
    trainer._model = SimpleNamespace(batch_of=lambda *_: None)
    monkeypatch.setattr(real_model_rank, "_first_calls", lambda *_: {"model": ((), {})})
    assert trainer.warm_up() == "Chosen: graphs."


def test_bytes_are_counted_in_each_step_by_the_plan_that_it_had() -> None:
    part = SimpleNamespace(plan=SimpleNamespace(nbytes=100), iterations=0)
    part.stats = lambda: {"iteration": part.iterations}
    launched = real_model_rank.LaunchedBytes([part])
    for nbytes, backwards in ((100, 1), (150, 2), (150, 0)):
        part.plan.nbytes, part.iterations = nbytes, part.iterations + backwards
        launched.note_step()
    assert launched.of_steps == [100, 300, 0]


def test_models_are_the_same_for_a_seed_and_batches_differ_between_ranks_and_steps() -> None:
    for model in ZOO.values():
        if model.package is not None:
            continue
        one, other = (
            dict(model.parts(TINY)["model" if "model" in model.losses else "generator"].state_dict()) for _ in "12"
        )
        assert all(torch.equal(value, other[name]) for name, value in one.items())
        batches = [model.batch_of(TINY, rank, step) for rank, step in ((0, 0), (1, 0), (0, 1))]
        first = [next(iter(b.values() if isinstance(b, dict) else b)) for b in batches]
        assert not torch.equal(first[0], first[1])
        assert not torch.equal(first[0], first[2])


def test_a_small_model_is_larger_than_a_tiny_one() -> None:
    sizes = [
        sum(p.numel() for part in ZOO["LSTM"].parts(size).values() for p in part.parameters()) for size in (TINY, SMALL)
    ]
    assert sizes[0] < sizes[1]


def _measure(index: int, name: str, only: Sequence[str] = (), warmup: bool = False) -> dict[str, Any]:
    rank = Rank(index, 2, torch.device("cpu"), dist.new_group(backend="gloo"))
    return real_model_rank.measure(
        name, size="tiny", backend="aot_eager", only=only, rounds=2, warmup=warmup, rank=rank
    )


# torch 2.11: both of torch's wrappers modify in place what a backward needs, where two forwards come before it.
FAILS_WITH_A_GAN = set() if torch.__version__ >= (2, 12) else {"torch DDP", "torch.compile(DDP)"}


def test_a_model_is_measured_on_every_rank(ranks2: RankPool) -> None:
    for found in ranks2.run(_measure, "GAN"):
        assert set(found["failed"]) == FAILS_WITH_A_GAN
        ours, plain = found["captured"]["compile_ddp"], found["captured"]["plain compiled"]
        assert (ours["breaks"], plain["breaks"]) == (0, 0)
        assert ours["graphs"] == plain["graphs"] == 3  # the discriminator has a second one, of an input with gradient
        assert found["reduced"]["by_hooks"] == []
        assert found["reduced"]["share_run"] == 1.0
        assert {len(samples) for samples in found["samples_s"].values()} == {2}
        assert len(found["samples_s"]) == 6 - len(FAILS_WITH_A_GAN)


def test_sparse_gradients_are_no_part_of_the_share(ranks2: RankPool) -> None:
    first, second = ranks2.run(_measure, "DLRM, sparse embeddings", ["compile_ddp"])
    assert first["reduced"] == second["reduced"]
    assert first["reduced"]["sparse"] == [f"tables.{number}.weight" for number in range(4)]


@pytest.mark.parametrize("name", ["DLRM, sparse embeddings", pytest.param("GAN", marks=pytest.mark.slow), "LSTM"])
def test_a_warm_up_is_called_as_a_step_calls_the_model(ranks2: RankPool, name: str) -> None:
    for found in ranks2.run(_measure, name, ["compile_ddp"], True):
        assert found["failed"] == {}
        assert len(found["samples_s"]["compile_ddp"]) == 2


class Local(nn.Module):
    """Looks like a wrapper, and reduces nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), src=0)

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def _train_locally(rank: int, name: str) -> list[Difference]:
    return list(train_beside(ZOO[name], TINY, Local, Loop(steps=1), rank=rank))


def test_gradients_that_were_not_reduced_are_seen(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match="after the optimizer's step ranks have other values of") as failure:
        ranks2.run(_train_locally, "LSTM")
    assert "rank 0 failed" in str(failure.value)


def test_differences_are_told_by_the_largest_element() -> None:
    expected = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([1e-9]), "c": None, "d": torch.ones(1)}
    found = {"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([2e-9]), "c": torch.zeros(1), "d": None}
    seen = difference(2, "model", 0.5, found, expected)
    assert (seen.relative, seen.parameter, seen.missing) == (0.25, "a", ("c", "d"))
    assert difference(0, "model", 0.5, {"a": expected["a"]}, {"a": expected["a"]}).relative == 0
