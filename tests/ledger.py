"""What a lossy communication hook has sent and what it still owes, held against plain autograd averaged by hand."""

import copy
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from models import gradient_copies, local_gradients
from torch import Tensor, nn

Loss = Callable[[nn.Module], Tensor]


def mean_of(tensor: Tensor) -> Tensor:
    """Over ranks, in float64 or complex128."""
    total = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True).contiguous()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def owed_here(ddp: Any, state: Mapping[str, list[Tensor]] | None = None) -> dict[str, Tensor]:
    """What this rank owes to each parameter, in the parameter's shape: the first tensor of each state has it."""
    named = dict(ddp.module.named_parameters())
    total = {name: torch.zeros_like(p, memory_format=torch.contiguous_format) for name, p in named.items()}
    total = {name: t.to(torch.complex128 if t.is_complex() else torch.float64) for name, t in total.items()}
    for key, (error, *_) in (ddp.comm_hook_state_dict() if state is None else state).items():
        names = re.sub(r"#\d+$", "", key).split(",")
        lengths = [torch.view_as_real(total[n]).numel() if total[n].is_complex() else total[n].numel() for n in names]
        for name, part in zip(names, error.split(lengths), strict=True):
            part = torch.view_as_complex(part.view(-1, 2)) if total[name].is_complex() else part
            total[name] += part.view(total[name].shape)
    return total


class Ledger:
    """Holds, step by step: what became of .grad and of what is owed is the mean of what the ranks have computed."""

    def __init__(self, ddp: Any, *, tolerance: float = 0.0) -> None:
        """`tolerance` is relative to the largest number of a step."""
        self.tolerance = tolerance
        self.open(ddp)

    def open(self, ddp: Any) -> None:
        """Note what is owed, which nothing but a step may change."""
        self.owed = {name: mean_of(owed) for name, owed in owed_here(ddp).items()}

    def changes(self, ddp: Any) -> list[str]:
        """What is not owed as it was, in words."""
        now = {name: mean_of(owed) for name, owed in owed_here(ddp).items()}
        return [
            f"what is owed to {name} was {self.owed[name].tolist()} and is {owed.tolist()}"
            for name, owed in now.items()
            if not torch.equal(owed, self.owed[name].to(owed.dtype))
        ]

    def assert_as_before(self, ddp: Any, when: str) -> None:
        changes = self.changes(ddp)
        assert not changes, f"{when}: {changes}"

    def step(self, ddp: Any, loss: Loss, *, backward: Callable[[Tensor], Any] = Tensor.backward) -> None:
        """One synchronised step that is right on this rank."""
        before, owed_before = gradient_copies(ddp.module), owed_here(ddp)
        local = local_gradients(copy.deepcopy(ddp.module), loss)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what goes by hooks
            backward(loss(ddp))
        differences = self.differences(ddp, before, local, owed_before)
        assert not differences, "\n".join(differences)

    def differences(
        self,
        ddp: Any,
        before: Mapping[str, Tensor | None],
        local: Mapping[str, Tensor | None],
        owed_before: Mapping[str, Tensor],
        used_before: Collection[str] = (),
    ) -> list[str]:
        """What a synchronised backward has done wrong, in words; a collective.

        `before` is .grad as it was, `local` what this rank's part of the backward is, `used_before` are parameters with
        a gradient from local backwards.
        """
        after, dues, found = owed_here(ddp), {}, gradient_copies(ddp.module)
        unused: set[str] = set()
        for name, parameter in ddp.module.named_parameters():
            used = mean_of(torch.tensor(float(local.get(name) is not None or name in used_before)))
            unused.update([name] if not used else [])
            contributions = [g for g in (before[name], local.get(name)) if g is not None]
            dues[name] = mean_of(sum(contributions, torch.zeros_like(parameter))) + self.owed[name]
        now = {name: mean_of(owed) for name, owed in after.items()}
        largest = max([due.abs().max().item() for due in dues.values() if due.numel()], default=0.0)
        self.owed = now
        wrong = []
        for name, due in dues.items():
            gradient, old = found[name], before[name]
            same_debt = torch.equal(after[name], owed_before[name].to(after[name].dtype))
            if name in unused and old is None:
                if gradient is not None or not same_debt:
                    wrong.append(
                        f"{name}, which no rank uses, has .grad {_words(gradient)}, was owed "
                        f"{_words(owed_before[name])} and is owed {_words(after[name])}"
                    )
            elif name in unused and same_debt and gradient is not None and torch.equal(gradient, old):
                continue  # else it is taken for used, as something has left it a .grad
            elif gradient is None:
                wrong.append(f"{name} has no gradient")
            elif not ((gradient + now[name]) - due).abs().max().item() <= self.tolerance * largest:
                wrong.append(
                    f"{name}: .grad {_words(gradient)} and owed {_words(now[name])}, expected in all {_words(due)}"
                )
        return wrong


def _words(tensor: Tensor | None) -> str:
    return str(None if tensor is None else tensor.tolist())


@torch.no_grad()
def make_integer(module: nn.Module) -> None:
    """Small integers in place of the parameters, the same on every rank, so that gradients are exact."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        values = torch.randint(-2, 3, parameter.shape, generator=generator)
        parameter.copy_(values)


def integers(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(10 * step + rank)).float()
