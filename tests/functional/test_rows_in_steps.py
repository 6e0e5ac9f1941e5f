"""compile_step with embeddings whose gradients are sent by rows: it trains as the loop does, and sends no zeros."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import assert_equal_on_all_ranks
from test_whole_step import OPTIMIZERS, Loop, assert_same
from torch import Tensor, nn
from words import VOCABULARY, WIDTH, Words, words

from compiled_ddp import Calibration, EagerDDP, SavedPlan, comm_hooks, compile_step
from compiled_ddp.functional import agreements
from compiled_ddp.planning.cost_model import Compute, Link
from ranks import RankPool

TOKENS, BAGS = (VOCABULARY * WIDTH, WIDTH), (40 * 4, 4)


def _both(make: Callable[[], nn.Module] = Words, clip: float | None = None, **options: Any) -> tuple[Any, Loop]:
    torch.manual_seed(0)
    model = make()
    loop = Loop(model, OPTIMIZERS["AdamW"], clip)
    given = {"backend": "aot_eager", "embedding_rows": True, "clip_grad_norm": clip, **options}
    return compile_step(model, OPTIMIZERS["AdamW"](model.parameters()), **given), loop


def _counted(step: Any) -> dict[tuple[int, int], list[int]]:
    """How many rows each rank had in the latest sums, by elements and width."""
    return dict(step._graph.reduction.communicator.made.counted_rows)


# ---- what comes out --------------------------------------------------------------------------------------------------


def _trains(rank: int, dtype: torch.dtype, backend: str, accumulate: int) -> None:
    step, loop = _both(lambda: Words(dtype), 0.5, backend=backend, accumulate=accumulate)
    for number in range(4):
        batches = [words(rank, 10 * number + n, batch=1 + (number + rank) % 3) for n in range(accumulate)]
        for x in batches:
            step(x)
            (loop.model(x) / accumulate).backward()
        loop.update()
        assert_same(step, loop)
        assert_equal_on_all_ranks([p.tolist() for p in step.model.parameters()])
        x = torch.cat([batch.flatten() for batch in batches])
        assert _counted(step)[TOKENS][rank] == len(x.unique())
        assert _counted(step)[BAGS][rank] == len((x % 40).unique())
    assert "token.weight; in the latest step a rank had up to" in step.explain()


@pytest.mark.parametrize(("dtype", "accumulate"), [(torch.float32, 1), (torch.float64, 2)], ids=str)
def test_a_step_by_rows_trains_as_the_loop_does(ranks3: RankPool, dtype: torch.dtype, accumulate: int) -> None:
    ranks3.run(_trains, dtype, "aot_eager", accumulate)


@pytest.mark.inductor
def test_inductors_step_sends_rows(ranks2: RankPool) -> None:
    ranks2.run(_trains, torch.float32, "inductor", 1)


class Failing(Words):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ZeroDivisionError
        return super().forward(x)


def _circumstances(rank: int) -> None:
    step, loop = _both(lambda: Failing(padding=3))

    def takes(x: Tensor) -> None:
        torch.testing.assert_close(step(x), loop.step(x))
        assert_same(step, loop)

    takes(words(rank))
    # More words on one rank than are worth gathering: all is sent, and the next step goes by rows again.
    takes(words(rank, 1, batch=40 if rank else 1, length=8))
    assert "all were sent" in step.explain()
    takes(words(rank, 2))
    assert "these were gathered" in step.explain()
    # One rank does not use the bag, and then none does, whose weights stay as they are.
    for number, uses in enumerate((rank == 0, False, True)):
        step.model.uses_bag = loop.model.uses_bag = uses
        takes(words(rank, 3 + number))
    # Nothing but the word that is not trained.
    takes(torch.full((2, 3), 3))
    assert max(_counted(step)[TOKENS]) == 0
    # A step that raises on one rank raises on all, and changes nothing; in the one behind it rows are sent again.
    step.model.fails = rank == 1
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        step(words(rank, 7))
    step.model.fails = False
    takes(words(rank, 8))
    assert _counted(step)[TOKENS][rank] == len({*words(rank, 8).flatten().tolist()} - {3})
    assert_equal_on_all_ranks([p.tolist() for p in step.model.parameters()])


def test_whatever_a_batch_uses_the_step_is_the_loops(ranks2: RankPool) -> None:
    ranks2.run(_circumstances)


# ---- where it is chosen ----------------------------------------------------------------------------------------------


def _large() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8192, 64), nn.Linear(64, 2))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _made(rank: int, model: nn.Module, **options: Any) -> Any:
    step = compile_step(model, OPTIMIZERS["AdamW"](model.parameters()), _loss, backend="aot_eager", **options)
    step(words(rank))
    return step


def _is_by_rows(rank: int, **options: Any) -> bool:
    return bool(_counted(_made(rank, _large(), **options)))


@contextlib.contextmanager
def _on_a_link(bytes_per_second: float) -> Iterator[Calibration]:
    found = Calibration("gloo", 2, 1, "cpu", Link(1e-4, bytes_per_second), Compute(5e10, 8e9))

    def measured(communicator: Any, device: torch.device) -> Calibration:
        communicator.all_reduce(torch.ones(1)).wait()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreements, "calibration_for", measured)
        yield found


def _not_on_a_fast_link(rank: int) -> bool:
    with _on_a_link(3e9):
        return _is_by_rows(rank)


def test_nothing_is_looked_for_where_that_takes_as_long_as_to_send_all(ranks2: RankPool) -> None:
    assert not any(ranks2.run(_not_on_a_fast_link))


def _chosen(rank: int, folder: str) -> None:
    with _on_a_link(120e6) as slow:
        assert _is_by_rows(rank)
        assert not _is_by_rows(rank, embedding_rows=False)
        assert not _is_by_rows(rank, bucket_cap_mb=25)  # nothing is planned
        assert _is_by_rows(rank, bucket_cap_mb=25, embedding_rows=True)
        assert not _is_by_rows(rank, shard_optimizer=True)
        assert not _is_by_rows(rank, pipeline_updates=True)
        assert not _is_by_rows(rank, comm_hook=comm_hooks.bf16_compress)
        # What a plan has by rows, of a step or of a wrapper, is sent by rows where it is given.
        step = _made(rank, _large())
        ddp = EagerDDP(_large(), calibration=slow)
        _loss(ddp, words(rank)).backward()
        for number, plan in enumerate((step.plan, ddp.plan)):
            path = f"{folder}/{rank} {number}.json"
            plan.save(path)
            assert SavedPlan.load(path).by_rows == ("0.weight",)
            assert _is_by_rows(rank, plan=SavedPlan.load(path))
    for options in ({"shard_optimizer": True}, {"pipeline_updates": True}, {"comm_hook": comm_hooks.bf16_compress}):
        with pytest.raises(ValueError, match="leave out embedding_rows=True"):
            _made(rank, _large(), embedding_rows=True, **options)
    with pytest.raises(ValueError, match="embedding_rows must be True, False or None, found 'yes'"):
        _made(rank, _large(), embedding_rows="yes")
    with pytest.raises(RuntimeError, match="embedding_rows"):
        _made(rank, _large(), embedding_rows=rank == 0)


def test_the_plan_and_the_options_decide(ranks2: RankPool, tmp_path: Any) -> None:
    ranks2.run(_chosen, str(tmp_path))
