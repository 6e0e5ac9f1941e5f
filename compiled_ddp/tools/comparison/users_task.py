"""The user's function: what it may take and return, and the workload that is made of it.

(model, batches)                  a batch is what the model takes, and its output is the loss or has a `loss`
(model, loss_function, batches)   a batch is (inputs, target), and the loss is loss_function(model(inputs), target)
{"model": ..., "batches": ...}    or an object with these, and "loss_function" and "optimizer" where there are any
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compiled_ddp.model.managed import is_wrapper
from compiled_ddp.tools.command_line.seeds import seed_all
from compiled_ddp.tools.comparison.reference import trainable
from compiled_ddp.tools.comparison.workload import samples_in
from compiled_ddp.users_model import call_model, loss_in

RETURNS = "(model, batches), (model, loss_function, batches), or a dict or an object with model and batches"
_FIELDS = ("model", "batches", "loss_function", "optimizer", "batch_size")

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What trains where the function brings no optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-4)


@dataclass(frozen=True)
class Training:
    """What the user's function returned. `optimizer` makes one of the parameters that it is given.

    `batch_size` is the number of samples in this rank's batches; None: the leading dimension of a batch's first tensor.
    """

    model: nn.Module
    batches: Iterable[Any] | Callable[[int], Any]
    loss_function: Callable[[Any, Any], Tensor] | None = None
    optimizer: Optimizer = default_optimizer
    batch_size: int | None = None


def call_function(function: Callable[..., Any], **offered: Any) -> Any:
    """What `function` returns, given those of `offered` that it has parameters for.

    Raises TypeError where it needs anything else.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if unknown := [name for name in needed if name not in offered]:
        raise TypeError(f"the function needs {', '.join(unknown)}: it can be given {', '.join(offered)} by these names")
    known = {parameter.name for parameter in parameters}
    return function(**{name: value for name, value in offered.items() if takes_all or name in known})


def training_of(returned: Any, *, may_be_wrapped: bool = False) -> Training:
    """`returned`, of the user's function, checked. Raises TypeError or ValueError with what to return."""
    given = _named(returned)
    if unknown := given.keys() - set(_FIELDS):
        raise TypeError(f"the function returned {sorted(unknown)}, which are none of {list(_FIELDS)}")
    _check_model(given["model"], may_be_wrapped=may_be_wrapped)
    _check_batches(given["batches"])
    if given.get("optimizer") is None:
        given["optimizer"] = default_optimizer
    for name in ("loss_function", "optimizer"):
        if not callable(given.get(name)) and given.get(name) is not None:
            raise TypeError(f"{name} must be a function, found {_kind(given[name])}")
    batch_size = given.get("batch_size")
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise TypeError(f"batch_size must be the number of samples in a batch, found {batch_size!r}")
    return Training(**given)


def _named(returned: Any) -> dict[str, Any]:
    if isinstance(returned, Mapping):
        given = dict(returned)
    elif hasattr(returned, "model") and hasattr(returned, "batches"):
        given = {name: getattr(returned, name) for name in _FIELDS if hasattr(returned, name)}
    elif isinstance(returned, tuple | list) and len(returned) == 2:
        given = dict(zip(("model", "batches"), returned, strict=True))
    elif isinstance(returned, tuple | list) and len(returned) == 3:
        given = dict(zip(("model", "loss_function", "batches"), returned, strict=True))
        if callable(given["batches"]) and not callable(given["loss_function"]):
            raise TypeError("the loss function comes second: return (model, loss_function, batches)")
    else:
        number = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise TypeError(f"the function returned {_kind(returned)}{number}: return {RETURNS}")
    if missing := {"model", "batches"} - given.keys():
        raise TypeError(f"the function returned no {' and no '.join(sorted(missing))}: return {RETURNS}")
    return given


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _check_model(model: Any, *, may_be_wrapped: bool) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, found {_kind(model)}: return {RETURNS}")
    wrapped = [name for name, part in model.named_modules() if is_wrapper(part)]
    if wrapped and not may_be_wrapped:
        where = f"has a wrapper inside, {wrapped[0]}" if wrapped[0] else "is wrapped already"
        raise ValueError(f"the model {where}: return it bare, as each variant wraps it in another way")
    if not trainable(model):
        raise ValueError("no parameter of the model has requires_grad=True: there is nothing to train")


def _check_batches(batches: Any) -> None:
    if isinstance(batches, Tensor | Mapping | tuple | str):
        raise TypeError(
            f"batches is {_kind(batches)}, which looks like one batch: return a list of batches ([batch] trains on one "
            "again and again), a DataLoader, a generator without an end, or a function of the step"
        )
    if not callable(batches) and not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise TypeError(
            f"batches must be a list, a DataLoader, a generator without an end, or a function of the step, found "
            f"{_kind(batches)}"
        )


class UsersWorkload:
    """A call of the user's function, for one variant in a process of its own."""

    def __init__(self, name: str, function: Callable[..., Any], *, seed: int, **offered: Any) -> None:
        """Call `function` with the seeds set. Raises what it raises, and what `training_of` does."""
        self.name = name
        seed_all(seed)
        self._training = training_of(call_function(function, **offered))
        self._model: nn.Module | None = self._training.model

    def build_model(self, label: str, device: torch.device) -> nn.Module:
        """The function's model: the same object in every call."""
        assert self._model is not None, "the model was given up"
        return self._model.to(device)

    def forget_model(self) -> None:
        """Hold the model no longer."""
        self._model = None
        self._training = Training(nn.Module(), (), self._training.loss_function)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The function's optimizer, or AdamW. Raises TypeError where what it makes cannot step."""
        optimizer = self._training.optimizer(parameters)
        if not callable(getattr(optimizer, "step", None)):
            raise TypeError(f"optimizer must make one with a step(), found {_kind(optimizer)}")
        return optimizer

    def batches(self, rank: int, world_size: int) -> Iterator[Any]:
        """The function's batches, from the first one again where they end.

        Raises ValueError, when one is asked for, where there is none to be had.
        """
        batches = self._training.batches
        if callable(batches) and not isinstance(batches, Iterable):
            yield from map(batches, itertools.count())
            return
        while True:
            number = 0
            for number, batch in enumerate(iter(batches), start=1):  # noqa: B007
                yield batch
            if number == 0:
                raise ValueError(
                    "there are no more batches: return a list, a DataLoader, a function of the step, or a generator "
                    "without an end"
                )

    def samples(self, batch: Any) -> int | None:
        """How many `batch` has: what the function told, or the leading dimension of its first tensor, if it has one."""
        told = self._training.batch_size
        return samples_in(batch) if told is None else told

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        """The loss of `module` on `batch`. Raises TypeError where there is none."""
        loss_function = self._training.loss_function
        if loss_function is None:
            output, source, hint = call_model(module, batch), "the model", "return (model, loss_function, batches)"
        else:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                number = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
                raise TypeError(f"with a loss function a batch is (inputs, target), found {_kind(batch)}{number}")
            output, source = loss_function(call_model(module, batch[0]), batch[1]), "the loss function"
            hint = "it must return a tensor of one element"
        try:
            return loss_in(output, source)
        except TypeError as error:
            raise TypeError(f"{error}: {hint}") from None
