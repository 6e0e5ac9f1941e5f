"""What a lossy communication hook has sent and what it still owes, held against plain autograd averaged by hand."""

import copy
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from models import local_gradients
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

    def __init__(self, ddp: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
        self.rtol, self.atol = rtol, atol
        self.open(ddp)

    def open(self, ddp: Any) -> None:
        """Note what is owed, as nothing but a step may change it."""
        self.owed = {name: mean_of(owed) for name, owed in owed_here(ddp).items()}

    def assert_as_before(self, ddp: Any, when: str) -> None:
        for name, owed in owed_here(ddp).items():
            self._assert_close(mean_of(owed), self.owed[name], f"what is owed to {name} {when}")

    def step(self, ddp: Any, loss: Loss, *, backward: Callable[[Tensor], Any] | None = None, also: Any = ()) -> None:
        """One synchronised step. `also` are parameters with a local gradient since the last one."""
        named = dict(ddp.module.named_parameters())
        before = {name: None if p.grad is None else p.grad.clone() for name, p in named.items()}
        here = owed_here(ddp)
        bare = copy.deepcopy(ddp.module)
        local = local_gradients(bare, loss)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what goes by hooks
            (backward or Tensor.backward)(loss(ddp))
        self.check(ddp, before, local, here, also)

    def check(
        self,
        ddp: Any,
        before: Mapping[str, Tensor | None],
        local: Mapping[str, Tensor | None],
        owed_before: Mapping[str, Tensor],
        also: Any = (),
    ) -> None:
        """`before` is .grad as it was, `local` what this rank has added to it in vain."""
        after = owed_here(ddp)
        for name, parameter in ddp.module.named_parameters():
            used = torch.tensor(float(local.get(name) is not None or name in also))
            dist.all_reduce(used)
            old, found = before[name], parameter.grad
            if not used:
                assert (old is None) == (found is None), f"{name} is used nowhere, and .grad is {found}"
                assert found is None or torch.equal(found, old), f"{name} is used nowhere, and .grad has changed"
                assert torch.equal(after[name], owed_before[name]), f"what is owed to {name}, used nowhere, has changed"
                mean_of(after[name])
                continue
            zero = torch.zeros_like(parameter)
            due = mean_of(sum((g for g in (old, local.get(name)) if g is not None), zero)) + self.owed[name]
            assert found is not None, f"{name} is used, and has no gradient"
            self.owed[name] = mean_of(after[name])
            self._assert_close(mean_of(found) + self.owed[name], due, f"sent and owed to {name}")
            self._assert_close(mean_of(found), found, f"the mean of {name} over ranks")

    def _assert_close(self, found: Tensor, expected: Tensor, what: str) -> None:
        expected = expected.to(found.dtype)
        torch.testing.assert_close(found, expected, rtol=self.rtol, atol=self.atol, msg=lambda m: f"{what}: {m}")


@torch.no_grad()
def make_integer(module: nn.Module) -> None:
    """Small integers in place of the parameters, the same on every rank, so that gradients are exact."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        values = torch.randint(-2, 3, parameter.shape, generator=generator)
        parameter.copy_(values)


def integers(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(10 * step + rank)).float()
