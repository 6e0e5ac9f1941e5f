"""What gradients are taken of, by name, and which have none that can be reduced."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.formatting import format_names


def named_tensors(args: Sequence[Any], argnums: int | tuple[int, ...], function: str) -> dict[str, Tensor]:
    """The leaves of these arguments. Raises ValueError where there are none, or one is no tensor of numbers."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    found = {
        f"argument {number}{path}": leaf
        for number in numbers
        if -len(args) <= number < len(args)
        for path, leaf in torch_private.trees.named_leaves(args[number])
    }
    if not found:
        raise ValueError(
            f"{function} finds no tensor in argument {argnums} to take gradients of, among {len(args)} that are passed "
            "by position."
        )
    beyond = [number for number in numbers if not -len(args) <= number < len(args)]
    if beyond:
        raise ValueError(
            f"argnums={argnums} of {function} names argument {beyond[0]}, and {len(args)} are passed by position."
        )
    for name, leaf in found.items():
        is_tensor = isinstance(leaf, Tensor)
        if not is_tensor or not (leaf.is_floating_point() or leaf.is_complex()) or leaf.dtype.itemsize == 1:  # float8
            kind = leaf.dtype if is_tensor else type(leaf).__name__
            raise ValueError(
                f"{function} cannot take the gradient of {name}, of {kind}: pass what is not trained as "
                "another argument."
            )
    return found


def refuse_sparse(names: Sequence[str], gradients: Sequence[Tensor], function: str) -> None:
    """Raise ValueError for gradients that no bucket can hold."""
    sparse = [name for name, gradient in zip(names, gradients, strict=True) if gradient.layout != torch.strided]
    if sparse:
        raise ValueError(
            f"{function} does not reduce sparse gradients, as those of {format_names(sparse)} are: leave out "
            "sparse=True."
        )
