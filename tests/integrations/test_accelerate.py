"""What `compiled_ddp.integrations.accelerate` takes and refuses. Its loop beside torch's class: test_trainers.py."""

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrun
from torch import Tensor, nn

from compiled_ddp.integrations.torch import DistributedDataParallel, EagerDistributedDataParallel
from ranks import RankPool

if importlib.util.find_spec("accelerate") is None:
    pytest.skip("`make trainers` installs accelerate", allow_module_level=True)

import accelerate
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    TorchDynamoPlugin,
)

from compiled_ddp.integrations.accelerate import Accelerator

pytestmark = pytest.mark.slow  # the ranks import it first


def _in_job(rank: int, world_size: int, port: int, test: Callable[..., None], *args: Any) -> None:
    """`test(*args)` in a process that torchrun has started, and that has had no Accelerator so far."""
    with torchrun.environment(rank, world_size, port):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        test(*args)


def two_ranks(pool: RankPool, test: Callable[..., None], *args: Any) -> None:
    pool.run(_in_job, 2, torchrun.free_port(), test, *args, process_group=False)


def alone(test: Callable[..., None], *args: Any) -> None:
    with RankPool(1) as pool:
        pool.run(_in_job, 1, torchrun.free_port(), test, *args, process_group=False)


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def gradients(
    make: type[accelerate.Accelerator], handlers: list[Any], **options: Any
) -> tuple[nn.Module, list[Tensor]]:
    accelerator = make(cpu=True, kwargs_handlers=handlers, **options)
    ddp = accelerator.prepare(seeded())
    x = torch.arange(32.0).reshape(4, 8) * (accelerator.process_index + 1) / 40
    accelerator.backward(ddp(x).square().mean())
    return ddp, [parameter.grad for parameter in ddp.parameters()]


def _follows_handler(backend: str, wrapper: type, comm_hook: str) -> None:
    handler = DistributedDataParallelKwargs(bucket_cap_mb=3, comm_hook=DDPCommunicationHookType(comm_hook))
    torchs, expected = gradients(accelerate.Accelerator, [handler])
    AcceleratorState._reset_state()
    ddp, found = gradients(Accelerator, [handler], backend=backend, first_bucket_mb=0.5)
    assert type(ddp) is wrapper
    assert ddp.bucket_bytes_cap == torchs.bucket_bytes_cap == 3 * 2**20
    assert ddp._settings.options.first_bucket_mb == 0.5
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert comm_hook == "no" or all(torch.equal(grad, grad.half().float()) for grad in found)


@pytest.mark.parametrize("comm_hook", ["no", "fp16"])
@pytest.mark.parametrize(
    ("backend", "wrapper"), [("aot_eager", DistributedDataParallel), ("hooks", EagerDistributedDataParallel)]
)
def test_options_and_handler_reach_the_wrapper(ranks2: RankPool, backend: str, wrapper: type, comm_hook: str) -> None:
    two_ranks(ranks2, _follows_handler, backend, wrapper, comm_hook)


def _unwrapped_and_evaluated() -> None:
    accelerator = Accelerator(cpu=True, backend="hooks")
    model, reference = seeded(), seeded()
    ddp = accelerator.prepare(model)
    assert accelerator.unwrap_model(ddp) is model
    assert accelerator._models[-1] is model  # Accelerate keeps the bare model of torch's class too
    assert accelerator.prepare_model(reference, evaluation_mode=True) is reference


def test_models_can_be_had_back_and_evaluated_bare(ranks2: RankPool) -> None:
    two_ranks(ranks2, _unwrapped_and_evaluated)


def _one_process(rank: int, port: int | None) -> None:
    with contextlib.nullcontext() if port is None else torchrun.environment(rank, 1, port):
        _train_alone(wrapped=port is not None)


def _train_alone(*, wrapped: bool) -> None:
    accelerator = Accelerator(cpu=True, backend="aot_eager", gradient_accumulation_steps=2)
    model = seeded()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (type(prepared) is DistributedDataParallel) if wrapped else (prepared is model)
    for _ in range(2):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(torch.ones(2, 8)).sum())
            optimizer.step()


@pytest.mark.parametrize("port", [None, torchrun.free_port()], ids=["no launcher", "torchrun"])
def test_one_process_trains(port: int | None) -> None:
    with RankPool(1) as pool:
        pool.run(_one_process, port, process_group=False)


def _refused(message: str, arguments: dict[str, Any], environment: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises((TypeError, ValueError), match=message):
            Accelerator(cpu=True, **arguments)


@pytest.mark.parametrize(
    ("message", "arguments", "environment"),
    [
        ("dynamo backend INDUCTOR.*leave out dynamo_plugin", {"dynamo_backend": "inductor"}, {}),
        ("dynamo backend EAGER", {"dynamo_plugin": TorchDynamoPlugin(backend="eager")}, {}),
        ("unset ACCELERATE_DYNAMO_BACKEND", {}, {"ACCELERATE_DYNAMO_BACKEND": "aot_eager"}),
        ("Accelerator got an unexpected keyword argument 'bucket_cap'. Did you mean", {"bucket_cap": 3}, {}),
        ("backend must be 'inductor' or 'aot_eager', found 'eager'", {"backend": "eager"}, {}),
        ("'strict'. It is compile_ddp's: hooks compile nothing", {"backend": "hooks", "strict": True}, {}),
        (
            "bucket_cap_mb: given as an option, and by DistributedDataParallelKwargs",
            {"bucket_cap_mb": 3, "kwargs_handlers": [DistributedDataParallelKwargs(bucket_cap_mb=4)]},
            {},
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    ranks2: RankPool, message: str, arguments: dict[str, Any], environment: dict[str, str]
) -> None:
    two_ranks(ranks2, _refused, message, arguments, environment)


def _other_kinds(kind: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType(kind)
    with pytest.raises(ValueError, match=f"Accelerate is configured for {kind}: use accelerate.Accelerator"):
        Accelerator.take_over(accelerator)
    with pytest.raises(TypeError, match="found a Accelerator: derive that class from"):
        Accelerator.take_over(Accelerator.__new__(Accelerator))


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_other_kinds_of_training_are_refused(kind: str) -> None:
    alone(_other_kinds, kind)


def _prepared_before() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(seeded())
    with pytest.raises(RuntimeError, match=r"prepared a \w+ already, in torch's wrapper: call take_over\(\) before"):
        Accelerator.take_over(accelerator)
    assert type(accelerator) is accelerate.Accelerator


def test_an_accelerator_that_has_prepared_a_model_is_not_taken_over() -> None:
    alone(_prepared_before)
