"""What the strategies for Lightning do besides training as torch's class does, for which there is test_trainers.py."""

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchrun
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import compiled_ddp
from compiled_ddp import torch_private
from compiled_ddp.integrations.torch import DistributedDataParallel, EagerDistributedDataParallel
from ranks import RankPool

if importlib.util.find_spec("lightning") is None:
    pytest.skip("`make trainers` installs lightning", allow_module_level=True)

import lightning

from compiled_ddp.integrations.lightning import CompiledDDPStrategy, FabricCompiledDDPStrategy

pytestmark = pytest.mark.slow  # the ranks import it first


class Classifier(lightning.LightningModule):
    """With what Lightning's users write into a step: a logged tensor, and a number that is read back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x) * self.scale, y)
        self.log("loss", loss)
        self.log_dict({"number": loss.item()})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Watch(lightning.Callback):
    """Notes after each batch how often something has been compiled, and what stands where."""

    def __init__(self) -> None:
        self.compilations: list[int] = []
        self.wrapper: Any = None
        self.net: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.compilations.append(torch_private.for_tests.compilations())
        self.wrapper, self.net = trainer.strategy.model, module.net


def quiet_trainer(strategy: Any, **arguments: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **arguments,
    )


def fit(strategy: Any, module: Any, steps: int, **arguments: Any) -> Watch:
    watch = Watch()
    torch.manual_seed(1 + int(os.environ["RANK"]))
    trainer = quiet_trainer(strategy, max_steps=steps, callbacks=[watch], **arguments)
    batches = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randn(96, 4))
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=4))
    return watch


def _in_job(rank: int, port: int, test: Callable[..., None], *args: Any) -> None:
    with torchrun.environment(rank, 2, port):
        test(*args)


def two_ranks(pool: RankPool, test: Callable[..., None], *args: Any) -> None:
    pool.run(_in_job, torchrun.free_port(), test, *args, process_group=False)


def _compiles_once() -> None:
    before = torch_private.for_tests.compilations()
    module = Classifier()
    watch = fit(CompiledDDPStrategy(backend="aot_eager"), module, 10)
    assert type(watch.wrapper) is DistributedDataParallel
    assert len(watch.compilations) == 10
    assert watch.compilations[0] > before
    assert watch.compilations[1:] == watch.compilations[1:2] * 9
    assert not {"log", "log_dict"} & vars(module).keys()


def test_ten_steps_compile_nothing_after_the_second(ranks2: RankPool) -> None:
    two_ranks(ranks2, _compiles_once)


def trained(strategy: Any, epochs: int, saved_to: Path, resumed_from: Path | None = None) -> dict[str, Tensor]:
    """The model's state after so many epochs, with which a checkpoint is written."""
    module = Classifier()
    rows = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8, generator=rows), torch.randn(32, 4, generator=rows))
    trainer = quiet_trainer(strategy, max_epochs=epochs)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=resumed_from, weights_only=False)
    trainer.save_checkpoint(saved_to)
    return {name: value.clone() for name, value in module.state_dict().items()}


def _resumes(folder: Path) -> None:
    strategies: dict[str, Callable[[], Any]] = {
        "torch's": lambda: "ddp",
        "graphs": lambda: CompiledDDPStrategy(backend="aot_eager"),
        "hooks": lambda: CompiledDDPStrategy(backend="hooks"),
    }
    through = trained("ddp", 2, folder / "through.ckpt")
    for saver, strategy in strategies.items():
        trained(strategy(), 1, folder / f"{saver}.ckpt")
    for saver in strategies:
        for resumer, strategy in strategies.items():
            resumed = trained(strategy(), 2, folder / "resumed.ckpt", folder / f"{saver}.ckpt")
            assert resumed.keys() == through.keys()
            for name, value in through.items():
                assert torch.equal(resumed[name], value), f"{name}, saved by {saver}, resumed by {resumer}"


def test_checkpoints_of_torchs_strategy_and_ours_resume_each_other(ranks2: RankPool, tmp_path: Path) -> None:
    two_ranks(ranks2, _resumes, tmp_path)


def _by_name(package: str) -> None:
    ours = importlib.import_module(f"compiled_ddp.integrations.{package.replace('.pytorch', '')}").CompiledDDPStrategy
    trainer = importlib.import_module(package).Trainer(accelerator="cpu", devices=2, strategy="compiled_ddp")
    assert type(trainer.strategy) is ours


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_strategy_has_a_name(ranks2: RankPool, package: str) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    two_ranks(ranks2, _by_name, package)


def _submodules(backend: str, wrapper: type) -> None:
    whole, parts = Classifier(), Classifier()
    fit("ddp", whole, 3, accumulate_grad_batches=2, gradient_clip_val=0.5)
    net = parts.net
    watch = fit(
        CompiledDDPStrategy(backend=backend, submodules=["net"], first_bucket_mb=0.5),
        parts,
        3,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )
    assert watch.wrapper is parts
    assert type(watch.net) is wrapper
    assert parts.net is net
    for name, value in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("backend", "wrapper"), [("aot_eager", compiled_ddp.CompiledDDP), ("hooks", compiled_ddp.EagerDDP)]
)
def test_parts_alone_can_be_compiled(ranks2: RankPool, backend: str, wrapper: type) -> None:
    two_ranks(ranks2, _submodules, backend, wrapper)


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


def _manual(options: dict[str, Any]) -> None:
    torchs, ours = Manual(), Manual()
    fit("ddp", torchs, 4)
    watch = fit(CompiledDDPStrategy(**options), ours, 4)
    assert watch.compilations[1:] == watch.compilations[1:2] * 3
    for name, value in torchs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "aot_eager"},
        {"backend": "aot_eager", "submodules": ["net"]},
        {"backend": "hooks"},
    ],
    ids=["whole", "part", "hooks"],
)
def test_manual_optimisation_compiles_nothing_after_the_second_step(ranks2: RankPool, options: dict[str, Any]) -> None:
    two_ranks(ranks2, _manual, options)


def _hooks_on_cuda(rank: int) -> None:
    strategy = CompiledDDPStrategy(backend="hooks", parallel_devices=[torch.device("cpu")] * 2)
    ddp = strategy._setup_model(Classifier())
    assert type(ddp) is EagerDistributedDataParallel
    on_cuda = SimpleNamespace(
        root_device=torch.device("cuda"),
        model=ddp,
        _ddp_comm_state=None,
        _ddp_comm_hook=default_hooks.fp16_compress_hook,
        _ddp_comm_wrapper=None,
    )
    lightning.pytorch.strategies.DDPStrategy._register_ddp_hooks(on_cuda)
    assert ddp.stats()["comm_hook"] == "fp16_compress_hook"


def test_lightning_takes_it_for_a_ddp_where_it_registers_hooks_on_cuda(ranks2: RankPool) -> None:
    ranks2.run(_hooks_on_cuda)


def _fabric() -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=FabricCompiledDDPStrategy(backend="aot_eager"))
    assert type(lightning.Fabric(accelerator="cpu", devices=2, strategy="compiled_ddp").strategy) is type(
        fabric.strategy
    )
    fabric.launch()
    model = nn.Linear(8, 4)
    ddp, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert type(ddp._forward_module) is DistributedDataParallel
    batches = torch.arange(64.0).reshape(2, 4, 8) * (fabric.global_rank + 1) / 40
    with fabric.no_backward_sync(ddp, enabled=True):
        fabric.backward(ddp(batches[0]).square().mean())
    local = model.weight.grad.clone()
    fabric.backward(ddp(batches[1]).square().mean())
    mean = fabric.all_reduce(local + torch.autograd.grad(model(batches[1]).square().mean(), model.weight)[0])
    torch.testing.assert_close(model.weight.grad, mean)
    optimizer.step()
    assert list(fabric.strategy.get_module_state_dict(ddp)) == ["weight", "bias"]


def test_fabric_accumulates_and_averages(ranks2: RankPool) -> None:
    two_ranks(ranks2, _fabric)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"CompiledDDPStrategy got an unexpected keyword argument 'bucket_cap'. Did you"
    ):
        CompiledDDPStrategy(bucket_cap=3)
    with pytest.raises(ValueError, match="backend must be 'inductor' or 'aot_eager', found 'eager'"):
        FabricCompiledDDPStrategy(backend="eager")
    with pytest.raises(TypeError, match=r"submodules must be a list of names, found 'net': pass \['net'\]"):
        CompiledDDPStrategy(submodules="net")
    with pytest.raises(ValueError, match=r"nothing would reduce \['net.0.weight', 'net.0.bias'\]: name their modules"):
        CompiledDDPStrategy(submodules=["net.2"])._setup_model(Classifier())
