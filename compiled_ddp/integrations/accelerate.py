"""Accelerate's Accelerator that prepares models with `compile_ddp`.

Imported by who asks for it: `pip install "compiled-ddp[trainers]"` brings accelerate.
"""

import inspect
from typing import Any

import accelerate
from accelerate.utils import DistributedType, DynamoBackend, TorchDynamoPlugin
from torch import nn

from compiled_ddp.integrations.replacement import check_replacement, replace_ddp

# Those for which Accelerate constructs torch's DistributedDataParallel are called MULTI_CPU, MULTI_GPU and so on.
_WITH_DDP = frozenset(kind for kind in DistributedType if kind == DistributedType.NO or kind.name.startswith("MULTI_"))
_ACCELERATES = inspect.signature(accelerate.Accelerator).parameters


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator`, with the wrapper of `compile_ddp` where that has torch's DistributedDataParallel.

    What `prepare` returns is a `compiled_ddp.integrations.torch.DistributedDataParallel`: autocast, devices,
    `accumulate`, `no_sync`, `trigger_sync_in_backward`, `unwrap_model` and checkpoints are Accelerate's own, and a
    `DistributedDataParallelKwargs` among `kwargs_handlers` is followed, its communication hook included. Without a
    launcher there is nothing to reduce: the model stays as it is, and is not compiled.

    Args:
        backend: that of `compile_ddp`, or "hooks" for `EagerDDP`, which compiles nothing.
        keywords: those of `accelerate.Accelerator`, and options of `compile_ddp` or `EagerDDP` (`bucket_cap_mb=`,
            `verify=`, ...).

    Raises TypeError or ValueError for what is no option, for one that a `DistributedDataParallelKwargs` gives too, for
    a TorchDynamoPlugin or `dynamo_backend`, and where the launcher asks for FSDP, DeepSpeed, Megatron-LM or tensor
    parallelism.
    """

    def __init__(self, *args: Any, backend: str = "inductor", **keywords: Any) -> None:
        options = {name: value for name, value in keywords.items() if name not in _ACCELERATES}
        accelerates = {name: value for name, value in keywords.items() if name in _ACCELERATES}
        check_replacement(type(self).__name__, backend, options)
        _refuse_dynamo(**inspect.signature(accelerate.Accelerator).bind(*args, **accelerates).arguments)
        super().__init__(*args, **accelerates)
        self._follow(backend, options)

    @classmethod
    def take_over(cls, accelerator: accelerate.Accelerator, *, backend: str = "inductor", **options: Any) -> None:
        """Make one of this class of an `accelerator` that has prepared no model yet.

        For code that constructs it itself. Raises as the constructor does, TypeError for a subclass of others, and
        RuntimeError where it has prepared a model, which would keep torch's wrapper.
        """
        if type(accelerator) is not accelerate.Accelerator:
            raise TypeError(
                f"expected an accelerate.Accelerator, found a {type(accelerator).__name__}: derive that class from "
                f"{cls.__module__}.{cls.__name__} instead."
            )
        check_replacement(cls.__name__, backend, options)
        if accelerator._models:
            raise RuntimeError(
                f"this accelerator has prepared a {type(accelerator._models[0]).__name__} already, in torch's wrapper: "
                "call take_over() before prepare()."
            )
        accelerator.__class__ = cls
        accelerator._follow(backend, options)

    def _follow(self, backend: str, options: dict[str, Any]) -> None:
        """Take `options`, if they suit what else was configured."""
        _refuse_dynamo(self.state.dynamo_plugin)
        if self.distributed_type not in _WITH_DDP or (self.parallelism_config and self.parallelism_config.tp_enabled):
            kind = "tensor parallelism" if self.distributed_type in _WITH_DDP else self.distributed_type.value
            raise ValueError(
                f"compile_ddp is for data parallelism with one copy of the model in each process, and Accelerate is "
                f"configured for {kind}: use accelerate.Accelerator, or change the configuration (`accelerate config`)."
            )
        twice = options.keys() & (self.ddp_handler.to_kwargs() if self.ddp_handler is not None else {}).keys()
        if twice:
            raise ValueError(
                f"{', '.join(sorted(twice))}: given as an option, and by DistributedDataParallelKwargs among "
                f"kwargs_handlers too. Give it once."
            )
        self._ddp_backend, self._ddp_options = backend, options

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's own, with our wrapper in the place of torch's."""
        with replace_ddp(backend=self._ddp_backend, **self._ddp_options):
            return super().prepare_model(model, *args, **kwargs)


def _refuse_dynamo(dynamo_plugin: Any = None, dynamo_backend: Any = None, **others: Any) -> None:
    """Raise ValueError where Accelerate would compile the wrapper: by these, or by what the launcher has set."""
    plugin = dynamo_plugin or TorchDynamoPlugin(backend=dynamo_backend)
    if plugin.backend != DynamoBackend.NO:
        raise ValueError(
            f"Accelerate is configured to call torch.compile (dynamo backend {plugin.backend.value}), and compile_ddp "
            "compiles the model by itself: leave out dynamo_plugin and dynamo_backend, answer no to torch dynamo in "
            "`accelerate config`, and unset ACCELERATE_DYNAMO_BACKEND. Options of torch.compile are options here too."
        )
