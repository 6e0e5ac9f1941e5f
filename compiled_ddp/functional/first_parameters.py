"""Whether ranks begin with the same parameters, which nothing in a functional step sends.

[Note: parameters that differ at first] Where ranks agree on a reduction that they do not know yet, they compare a
checksum of each parameter too, in the same exchange through the store: a later call of the same shapes costs nothing.
What differs is a warning and no error: ranks may mean it, as where each has adapted its parameters before it asks for
gradients, or keeps a head of its own.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from compiled_ddp import torch_private
from compiled_ddp.checks.sums import batched
from compiled_ddp.formatting import format_names
from compiled_ddp.ranks.agreement import Differing
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.users_code import warn_user


class FirstParameters:
    """Compares the initial parameters of reductions across ranks: [Note: parameters that differ at first]."""

    def __init__(self, of_reductions: Sequence[Mapping[str, Tensor | None]]) -> None:
        """What each is taken with respect to, by name; None for what only a graph computes."""
        self._of_reductions = of_reductions
        self._found: list[tuple[RankGroup, Differing]] = []

    def checksums(self, functions: Mapping[int, str]) -> dict[str, int]:
        """A checksum of each parameter of these reductions, `functions` by their number. Reads from the device."""
        named = {  # the number first, as a function may be called with several trees
            f"{number}/{name} of {function}": parameter
            for number, function in functions.items()
            for name, parameter in self._of_reductions[number].items()
        }
        return checksums_of(named)

    def note(self, ranks: RankGroup, differing: Differing) -> None:
        """What these ranks have found."""
        if differing:
            self._found.append((ranks, differing))

    def warn(self) -> None:
        """On rank 0, and on ranks whose parameters are others; a no-op where none are."""
        for ranks, differing in self._found:
            reference, here = ranks.ranks[0], ranks.global_rank
            if here != reference and here not in differing:
                continue
            name, number = differing[min(differing) if here == reference else here]
            name = name.partition("/")[2]
            others = f" and {number - 1} more" if number > 1 else ""
            listed = format_names([str(rank) for rank in sorted(differing)])
            warn_user(
                f"the parameters differ between ranks at the first call: {name}{others} on rank {listed} is not what "
                f"it is on rank {reference}. Only gradients are reduced, so each rank goes on with its own weights: "
                "begin with params = compiled_ddp.functional.broadcast(params), or make them from one seed. Where "
                'ranks are meant to differ: warnings.filterwarnings("ignore", "the parameters differ between ranks").'
            )


def checksums_of(parameters: Mapping[str, Tensor | None]) -> dict[str, int]:
    """One of each whose values can be read. Reads from the device."""
    names, found = [*parameters], dict[str, int]()
    with torch_private.tracing.outside_of_traces():
        for numbers, batch in batched(_rows([*parameters.values()])):
            found |= zip((names[number] for number in numbers), batch.checksums().tolist(), strict=True)
    return found


def _rows(parameters: Sequence[Tensor | None]) -> Iterator[tuple[int, Tensor]]:
    """The parameters whose values can be read, flattened, with their places; copies what is not contiguous."""
    for number, parameter in enumerate(parameters):
        if parameter is not None:
            plain = torch_private.autograd.without_transforms(parameter).detach()
            if type(plain) in (Tensor, nn.Parameter) and plain.layout == torch.strided and not plain.is_meta:
                yield number, plain.resolve_conj().resolve_neg().contiguous().view(-1)
