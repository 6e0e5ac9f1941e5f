"""What is trained, described so that the core can build it once per variant and on every rank."""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

Batches = Callable[[int, int], Iterator[tuple[Tensor, ...]]]


def load_fresh(module_name: str, label: str) -> ModuleType:
    """Module `module_name` executed anew under the name `module_name`_`label`: same source, code objects of its own.

    Dynamo caches compiled code by code object, across instances and wrappers. Two variants that shared a class would
    share compiled code, and the second would silently run what the first one compiled.
    """
    fresh_name = f"{module_name}_{label}"
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        raise ValueError(f"No source file found for module '{module_name}'; a workload's model needs one")
    spec = importlib.util.spec_from_file_location(fresh_name, spec.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[fresh_name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Workload:
    """A model, its data and its optimizer.

    The model is named, not passed: `model_factory` in `model_module` is called without arguments and returns an
    nn.Module whose forward takes a batch and returns the loss. Its module is loaded anew for every variant
    (`load_fresh`), so keep module-level work in it small.
    """

    name: str
    model_module: str
    model_factory: str
    batches: Batches  # (rank, world_size) -> endless tuples of tensors, the arguments of forward
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    seed: int = 0
    find_unused_parameters: bool = False  # what torch's DDP is told; the other wrappers find them by themselves

    def build_model(self, label: str, device: torch.device) -> nn.Module:
        """A new model with the same initial weights for every label and rank."""
        torch.manual_seed(self.seed)
        model = getattr(load_fresh(self.model_module, label), self.model_factory)()
        return model.to(device)

    def loss(self, module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return module(*batch)

    def forget_model(self) -> None:
        """Nothing to do: `build_model` keeps nothing."""
