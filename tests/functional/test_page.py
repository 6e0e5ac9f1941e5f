"""What the snippets of docs/functional.md compute on two ranks is equal on both where the page says so."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchrun
from test_documentation import Snippet, run_snippet, snippets

from compiled_ddp import torch_private
from ranks import RankPool

PAGE = Path(__file__).parents[2] / "docs" / "functional.md"


def _computes(rank: int, blocks: list[Snippet], port: int) -> list[dict[str, Any]]:
    """The results after each snippet, each named as on the page."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = []
    with torchrun.environment(rank, 2, port):
        for block in blocks:
            run_snippet(str(PAGE), block, namespace)
            names = [name for name in ("params", "gradients", "value", "values", "x") if name in namespace]
            found.append({name: namespace.pop(name) if name == "gradients" else namespace[name] for name in names})
    return found


def _is_same(one: Any, other: Any) -> bool:
    (flat, structure), (others, other_structure) = (torch_private.trees.flatten(tree) for tree in (one, other))
    return structure == other_structure and all(map(torch.equal, flat, others))


@pytest.mark.inductor
def test_snippets_on_two_ranks_give_both_the_same_gradients_and_parameters() -> None:
    blocks = [snippet for snippet in snippets(PAGE.read_text()) if snippet.runs]
    with RankPool(2) as pool:
        first, second = pool.run(_computes, blocks, torchrun.free_port(), process_group=False, timeout_seconds=240.0)
    assert len(first) == len(second) == len(blocks) >= 4
    for one, other in zip(first, second, strict=True):
        assert _is_same(one["params"], other["params"])
        assert not _is_same(one["x"], other["x"]) and not _is_same(one["value"], other["value"])
    differentiated = [(one, other) for one, other in zip(first, second, strict=True) if "gradients" in one]
    assert len(differentiated) >= 3
    for one, other in differentiated:
        assert one["gradients"]["first"].any()
        assert _is_same(one["gradients"], other["gradients"])
