"""Pytrees: nested containers of tensors, as torch.func takes them."""

from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree, and its structure."""
    leaves, structure = _pytree.tree_flatten(tree)
    return leaves, structure


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    return _pytree.tree_unflatten(leaves, structure)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Each leaf with its path, as "['head']['weight']"."""
    return [(_pytree.keystr(path), leaf) for path, leaf in _pytree.tree_flatten_with_path(tree)[0]]
