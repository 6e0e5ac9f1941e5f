"""transformers' Trainer that trains with `compile_ddp`, and a mixin for other trainers that derive from it.

Imported by who asks for it: `pip install "compiled-ddp[trainers]"` brings transformers.
"""

from collections.abc import Mapping
from typing import Any

import transformers

from compiled_ddp.integrations.accelerate import Accelerator


class CompiledDDPMixin:
    """To be named before a trainer: `class Mine(CompiledDDPMixin, trl.SFTTrainer)`.

    The trainer's Accelerator becomes a `compiled_ddp.integrations.accelerate.Accelerator`, and nothing else changes:
    autocast, label smoothing, accumulation, evaluation and checkpoints are the trainer's own.

    Args:
        ddp_options: options of `compile_ddp`, and `backend="hooks"` for `EagerDDP`, which compiles nothing. None
            leaves all to their defaults.

    Raises TypeError where a class names the mixin behind its trainer, ValueError for
    `TrainingArguments(torch_compile=True)`, and otherwise what the Accelerator raises.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        order = cls.__mro__
        if transformers.Trainer in order and order.index(transformers.Trainer) < order.index(CompiledDDPMixin):
            raise TypeError(
                f"{cls.__name__} names CompiledDDPMixin behind its trainer, which would train without it: write "
                f"class {cls.__name__}(CompiledDDPMixin, ...)."
            )

    def __init__(self, *args: Any, ddp_options: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        self.ddp_options = dict(ddp_options or {})
        super().__init__(*args, **keywords)

    def create_accelerator_and_postprocess(self) -> None:
        """As the trainer's own, with the Accelerator that prepares with `compile_ddp`."""
        trainer: Any = self
        if trainer.args.torch_compile:
            raise ValueError(
                "TrainingArguments(torch_compile=True) would compile the model a second time: leave out torch_compile, "
                "torch_compile_backend and torch_compile_mode. ddp_options takes torch.compile's backend, mode and "
                "options."
            )
        parent: Any = super()
        parent.create_accelerator_and_postprocess()
        Accelerator.take_over(trainer.accelerator, **self.ddp_options)


class Trainer(CompiledDDPMixin, transformers.Trainer):
    """`transformers.Trainer`, with the wrapper of `compile_ddp` where that has torch's DistributedDataParallel."""
