"""Pytrees: nested containers of tensors, as torch.func takes them."""

import functools
from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree, and its structure."""
    leaves, structure = _pytree.tree_flatten(tree)
    return leaves, structure


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    return _pytree.tree_unflatten(leaves, structure)


def open_user_dicts(leaves: Sequence[Any]) -> bool:
    """From now on those of their classes are containers, as batches of transformers; returns whether there are any."""
    kinds = {type(leaf) for leaf in leaves if isinstance(leaf, UserDict)}
    for kind in kinds:
        _pytree.register_pytree_node(
            kind,
            lambda tree: ([*tree.data.values()], (*tree.data,)),
            functools.partial(_user_dict, kind),
            flatten_with_keys_fn=lambda tree: (
                [(_pytree.MappingKey(key), value) for key, value in tree.data.items()],
                (*tree.data,),
            ),
        )
    return bool(kinds)


def _user_dict(kind: type[UserDict[Any, Any]], values: Iterable[Any], keys: Any) -> UserDict[Any, Any]:
    return kind(dict(zip(keys, values, strict=True)))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The tree with what comes of its tensors in their place."""
    return _pytree.tree_map_only(torch.Tensor, function, tree)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Each leaf with its path, as "['head']['weight']"; with its number where a container has not told its keys."""
    try:
        return [(_pytree.keystr(path), leaf) for path, leaf in _pytree.tree_flatten_with_path(tree)[0]]
    except ValueError:
        return [(f"[leaf {number}]", leaf) for number, leaf in enumerate(_pytree.tree_leaves(tree))]
