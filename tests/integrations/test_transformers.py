"""The traps of transformers' Trainer, and what its mixin refuses. Its loop beside torch's class: test_trainers.py."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrun
from torch import Tensor, nn

from compiled_ddp.integrations.torch import DistributedDataParallel, EagerDistributedDataParallel
from ranks import RankPool

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
    pytest.skip("`make trainers` installs transformers and accelerate", allow_module_level=True)

import transformers
from accelerate.state import AcceleratorState, GradientState

from compiled_ddp.integrations.accelerate import Accelerator
from compiled_ddp.integrations.transformers import CompiledDDPMixin, Trainer

pytestmark = pytest.mark.slow  # the ranks import it first


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Traced(transformers.Trainer):
    """Notes the dtype of what the model computes."""

    def compute_loss(self, model: nn.Module, inputs: Any, **others: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, **{**others, "return_outputs": True})
        self.states = outputs["hidden_states"][-1].dtype
        return loss


class ByMixin(CompiledDDPMixin, Traced):
    pass


class ByOverriding(Traced):
    """What one would write first, and the first trap: transformers then leaves the model to itself."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return DistributedDataParallel(model, backend="aot_eager") if training else model


def trainer(rank: int, port: int, make: Callable[..., transformers.Trainer], folder: str, **arguments: Any) -> Any:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, output_hidden_states=True
    )
    settings = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=2,
        per_device_train_batch_size=2,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    made = make(transformers.GPT2LMHeadModel(config), settings, train_dataset=Texts())
    made.train()
    return made


def losses(made: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def hooked(*args: Any, **kwargs: Any) -> transformers.Trainer:
    return ByMixin(*args, ddp_options={"backend": "hooks", "bucket_cap_mb": 3}, **kwargs)


def compiled(*args: Any, **kwargs: Any) -> transformers.Trainer:
    return ByMixin(*args, ddp_options={"backend": "aot_eager"}, **kwargs)


def _autocast(rank: int, port: int, folder: str) -> None:
    with torchrun.environment(rank, 2, port):
        torchs = trainer(rank, port, Traced, folder, bf16=True)
        for make, wrapper in ((hooked, EagerDistributedDataParallel), (compiled, DistributedDataParallel)):
            ours = trainer(rank, port, make, folder, bf16=True)
            assert type(ours.model_wrapped) is wrapper
            assert type(ours.accelerator) is Accelerator
            assert ours.model_wrapped.bucket_bytes_cap == 3 * 2**20 or make is compiled
            assert losses(ours) == pytest.approx(losses(torchs), abs=1e-3)
        full = trainer(rank, port, Traced, folder)
        assert losses(full) != losses(torchs)
        trapped = trainer(rank, port, ByOverriding, folder, bf16=True)
        assert losses(trapped) == losses(full)  # in fp32, without a word


def test_autocast_stays_around_the_model_as_overriding_wrap_model_loses_it(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(_autocast, torchrun.free_port(), str(tmp_path), process_group=False)


def _smoothed(rank: int, port: int, folder: str) -> None:
    with torchrun.environment(rank, 2, port):
        torchs, ours = (trainer(rank, port, make, folder, label_smoothing_factor=0.3) for make in (Traced, hooked))
        assert losses(ours) == losses(torchs)
        assert ours.accelerator.unwrap_model(ours.model_wrapped)._get_name() == "GPT2LMHeadModel"


def test_label_smoothing_finds_the_models_name(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(_smoothed, torchrun.free_port(), str(tmp_path), process_group=False)


def _compiled_twice(rank: int, folder: str) -> None:
    refused = pytest.raises(ValueError, match="would compile the model a second time: leave out torch_compile,")
    with torchrun.environment(rank, 1, torchrun.free_port()), refused:
        trainer(rank, 0, Trainer, folder, torch_compile=True)


def test_torch_compile_beside_it_is_refused(tmp_path: Path) -> None:
    with RankPool(1) as pool:
        pool.run(_compiled_twice, str(tmp_path), process_group=False)


def test_the_mixin_must_come_first() -> None:
    with pytest.raises(TypeError, match=r"Wrong names CompiledDDPMixin behind its trainer.*class Wrong\(CompiledDDP"):

        class Wrong(transformers.Trainer, CompiledDDPMixin):
            pass
