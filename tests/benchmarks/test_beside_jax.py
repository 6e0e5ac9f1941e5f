"""The comparison with JAX, as far as it goes without: what is handed over, processes, the optimizer, the table."""

import math
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import beside_jax
from benchmarks.beside_jax import COLUMNS, JAX, OPTIMIZER, Group, Turns
from benchmarks.step_rank import adamw
from benchmarks.tasks import GPT
from compiled_ddp.tools.comparison.table import tabulate_rows

BATCHES = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("handed over")
    beside_jax._hand_over(path, BATCHES)
    return path


def test_every_contender_begins_with_the_same_weights(folder: Path) -> None:
    model = GPT.build_model("another", torch.device("cpu"))
    with np.load(folder / "weights.npz") as weights:
        assert set(weights.files) == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            assert np.array_equal(weights[name], parameter.detach().numpy()), name


def test_ranks_have_the_batches_that_torch_trains_on_and_each_its_own(folder: Path) -> None:
    given = []
    for rank in range(beside_jax.RANKS):
        expected = GPT.batches(rank, beside_jax.RANKS)
        with np.load(folder / f"batches{rank}.npz") as saved:
            for x, y in zip(saved["x"], saved["y"], strict=True):
                for found, wanted in zip((x, y), next(expected), strict=True):
                    assert np.array_equal(found, wanted.numpy())
            assert len(saved["x"]) == BATCHES
            given.append(saved["x"])
    assert not np.array_equal(*given)


def test_the_optimizer_that_is_part_of_the_graph_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(5, 3, generator=generator) for name in ("a", "b")}
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    reference = torch.optim.AdamW(leaves.values(), lr=OPTIMIZER["lr"], weight_decay=OPTIMIZER["decay"])
    zeros = [{name: torch.zeros_like(value) for name, value in params.items()} for _ in range(2)]
    state = {"count": torch.zeros(()), "first": zeros[0], "second": zeros[1]}
    for _ in range(5):
        gradients = {name: torch.randn(5, 3, generator=generator) for name in params}
        params, state = adamw(params, gradients, state, **OPTIMIZER)
        for name, leaf in leaves.items():
            leaf.grad = gradients[name].clone()
        reference.step()
        for name, leaf in leaves.items():
            torch.testing.assert_close(params[name], leaf.detach(), rtol=1e-5, atol=1e-6)


# ---- processes -------------------------------------------------------------------------------------------------------

RANK = """
    import json, os, sys

    folder, optimizer = sys.argv[1], json.loads(sys.argv[2])
    print("a line of a library's")
    for line in sys.stdin:
        name, steps = line.rsplit(maxsplit=1)
        if name == "ends":
            sys.exit(3)
        told = [[optimizer["lr"], float(os.environ["RANK"]) + n] for n in range(int(steps))]
        print("@" + json.dumps(told), flush=True)
"""


@pytest.fixture
def group(tmp_path: Path) -> Group:
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    return Group([sys.executable, str(script)], tmp_path, port=0)


def test_ranks_take_steps_when_they_are_asked_to(group: Group) -> None:
    try:
        first, second = group.take("functional, compiled", 2)
        assert first == [[OPTIMIZER["lr"], 0.0], [OPTIMIZER["lr"], 1.0]]
        assert second == [[OPTIMIZER["lr"], 1.0], [OPTIMIZER["lr"], 2.0]]
        assert len(group.take("torch DDP", 1)[0]) == 1
    finally:
        group.end()
    assert all(process.returncode == 0 for process in group._processes)


def test_a_rank_that_has_ended_is_an_error(group: Group) -> None:
    try:
        with pytest.raises(RuntimeError, match="a rank has ended with status 3"):
            group.take("ends", 1)
    finally:
        group.end()


# ---- the table -------------------------------------------------------------------------------------------------------


def turns(step_s: float, *, loss: float = 2.0) -> Turns:
    """A turn that warms up, and two of three steps, of which the first one is slow; rank 1 is the slower one."""
    found = Turns()
    for number in range(3):
        seconds = [9.0, step_s * (number + 1), step_s * (number + 1)]
        found.add([[(s / 2, loss - 0.5) for s in seconds], [(s, loss + 0.5) for s in seconds]])
    return found


def test_a_turn_takes_as_long_as_its_slower_rank_and_its_loss_is_the_mean() -> None:
    assert turns(0.25).step_s == [0.25, 0.5, 0.75]
    assert turns(0.25).losses == [2.0] * 9


def test_rows_are_compared_with_compile_ddp_turn_by_turn() -> None:
    found = {JAX: turns(0.5, loss=2.25), "torch DDP": turns(0.25), "compile_ddp": turns(0.25)}
    rows = {row.name: row for row in beside_jax._rows(found)}
    assert rows["compile_ddp"].ratio == rows["torch DDP"].ratio == 1.0 and rows[JAX].ratio == 2.0
    assert rows["compile_ddp"].step_ms == 625.0 and rows["compile_ddp"].fastest_ms == 500.0  # the first one warms up
    assert (rows[JAX].first_loss, rows[JAX].last_loss) == (2.25, 2.25)
    assert math.isclose(rows[JAX].distance, 0.25) and rows["torch DDP"].distance == 0.0
    table = tabulate_rows([*rows.values()], COLUMNS, tablefmt="github", missing="-")
    assert JAX in table and "2.000" in table and "625.0" in table


def test_the_interpreter_that_has_jax_must_be_named() -> None:
    with pytest.raises(SystemExit):
        beside_jax.parse([])
    assert beside_jax.parse(["--jax", "python"]).jax == "python"
