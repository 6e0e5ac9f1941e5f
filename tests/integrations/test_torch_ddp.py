"""The wrappers that are torch's DistributedDataParallel, and what constructs that class by itself."""

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.parallel.distributed as torchs_module
from models import assert_gradients, assert_step, expected_mean, row_batch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import compiled_ddp
from compiled_ddp.integrations.torch import DistributedDataParallel, EagerDistributedDataParallel
from ranks import RankPool


def compiled(*args: Any) -> nn.Module:
    return DistributedDataParallel(*args, backend="aot_eager")


WRAPPERS: dict[str, Callable[..., nn.Module]] = {"compiled": compiled, "hooks": EagerDistributedDataParallel}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))


def seeded(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Normed()


def loss(rank: int, step: int = 0) -> Callable[[nn.Module], Tensor]:
    return lambda module: module(row_batch(rank, step)).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(rank, step)(model).backward()
        optimizer.step()


def assert_same_state(model: nn.Module, other: nn.Module, *, but: str = "nothing") -> None:
    state, expected = model.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert but in name or torch.equal(state[name], value), name


# ---- a real DDP ------------------------------------------------------------------------------------------------------


def _like_torchs(rank: int, kind: str) -> None:
    ours, torchs = WRAPPERS[kind](seeded()), TorchDDP(seeded())
    assert isinstance(ours, TorchDDP)
    optimizers = optimizer_of(ours), optimizer_of(torchs)
    for model, optimizer in zip((ours, torchs), optimizers, strict=True):
        train(model, optimizer, rank, range(5))
    assert_same_state(ours, torchs)
    assert_step(ours, loss(rank, 5))
    ours.load_state_dict(torchs.state_dict())
    torchs.load_state_dict(ours.state_dict())
    ours.load_state_dict(torchs.module.state_dict())  # a checkpoint of the bare model
    assert_same_state(ours, torchs)
    assert_same_state(pickle.loads(pickle.dumps(ours)), torchs, but="norm" if rank else "nothing")  # rank 0's buffers


@pytest.mark.parametrize("kind", WRAPPERS)
def test_trains_and_saves_as_torchs(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_like_torchs, kind)


def _by_argument(rank: int) -> None:
    ddp = DistributedDataParallel(seeded(), None, backend="hooks", bucket_cap_mb=1)
    assert type(ddp) is EagerDistributedDataParallel
    assert_step(ddp, loss(rank))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'fullgraph'\. It is compile_ddp's"):
        DistributedDataParallel(seeded(), backend="hooks", fullgraph=True)
    with pytest.raises(TypeError, match="Mine compiles: derive it from EagerDistributedDataParallel"):
        Mine(seeded(), backend="hooks")


class Mine(DistributedDataParallel):
    pass


def test_an_argument_picks_hooks(ranks2: RankPool) -> None:
    ranks2.run(_by_argument)


def _checkpoints(rank: int, kind: str, folder: str) -> None:
    """torch.distributed.checkpoint, optimizer included, to and from torch's class; and the rest of the training."""
    torchs_model, made = TorchDDP(seeded()), WRAPPERS[kind](seeded())
    torchs_optimizer, optimizer = optimizer_of(torchs_model), optimizer_of(made)
    for model, its_optimizer, name in ((torchs_model, torchs_optimizer, "torchs"), (made, optimizer, "ours")):
        train(model, its_optimizer, rank, range(3))
        state, optimizer_state = get_state_dict(model, its_optimizer)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{name}")
        train(model, its_optimizer, rank, range(3, 5))
    for model, name in ((WRAPPERS[kind](seeded(1)), "torchs"), (TorchDDP(seeded(2)), "ours")):
        resumed = optimizer_of(model)
        state, optimizer_state = get_state_dict(model, resumed)
        dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{name}")
        set_state_dict(model, resumed, model_state_dict=state, optim_state_dict=optimizer_state)
        train(model, resumed, rank, range(3, 5))
        assert_same_state(model, torchs_model, but="running")  # of which either rank's is saved


@pytest.mark.parametrize("kind", WRAPPERS)
def test_distributed_checkpoints_go_both_ways_and_resume_to_the_bit(
    ranks2: RankPool, kind: str, tmp_path: Path
) -> None:
    ranks2.run(_checkpoints, kind, str(tmp_path))


def _asked_for(rank: int, kind: str) -> None:
    """What trainers reach for; and a backward that is synchronised though its forward was under no_sync()."""
    ddp = WRAPPERS[kind](seeded(), None, None, 0, True, True, None, 25)
    assert (ddp.device_ids, ddp.static_graph, ddp.find_unused_parameters, ddp.dim) == (None, False, False, 0)
    assert ddp.require_backward_grad_sync
    assert ddp.require_forward_param_sync
    assert ddp._get_ddp_logging_data()["world_size"] == 2
    assert ddp.reducer._rebuild_buckets() is False
    with pytest.raises(AttributeError, match="has no '_build_params_for_reducer'"):
        _ = ddp._build_params_for_reducer
    ddp.eval()  # without batch statistics, so that forwards do not depend on each other

    def both(module: nn.Module) -> Tensor:
        return loss(rank, 0)(module) + loss(rank, 1)(module)

    assert_step(ddp, both)
    ddp.zero_grad()
    with ddp.no_sync():
        loss(rank, 0)(ddp).backward()
        last = loss(rank, 1)(ddp)
    ddp.reducer.prepare_for_backward([last])
    last.backward()
    accumulated = {name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()}
    ddp.zero_grad()
    both(ddp).backward()
    for name, parameter in ddp.module.named_parameters():
        torch.testing.assert_close(accumulated[name], parameter.grad)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_has_what_trainers_ask_for(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_asked_for, kind)


def _nested(rank: int, kind: str) -> None:
    ddp = WRAPPERS[kind](seeded())
    with pytest.raises(RuntimeError, match=r"is a \w*DistributedDataParallel already"):
        compiled_ddp.EagerDDP(ddp)
    bare = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    expected = expected_mean(bare, loss(rank))
    bare[0] = WRAPPERS[kind](bare[0])
    outer = compiled_ddp.EagerDDP(bare)
    loss(rank)(outer).backward()
    assert_gradients(bare[0].module, {name[2:]: value for name, value in expected.items() if name.startswith("0.")})
    assert torch.allclose(bare[1].weight.grad, expected["1.weight"].float())


@pytest.mark.parametrize("kind", WRAPPERS)
def test_is_known_as_a_wrapper_of_ours_within_others(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_nested, kind)


# ---- in the place of torch's -----------------------------------------------------------------------------------------


class Subclass(TorchDDP):
    """A user's."""


def _replaced(rank: int) -> None:
    before = dict(vars(TorchDDP))
    with compiled_ddp.replace_ddp(backend="aot_eager", check_steps="warn"):
        made = TorchDDP(seeded(), bucket_cap_mb=1)  # a name imported before
        assert type(torchs_module.DistributedDataParallel(seeded())) is DistributedDataParallel
        assert type(Subclass(seeded())) is Subclass
        with compiled_ddp.replace_ddp(backend="hooks", bucket_cap_mb=3.0):
            by_hooks = []
            thread = threading.Thread(target=lambda: by_hooks.append(TorchDDP(seeded())))
            thread.start()
            thread.join()
        assert type(TorchDDP(seeded())) is DistributedDataParallel
    assert dict(vars(TorchDDP)) == before
    assert type(TorchDDP(seeded())) is TorchDDP
    assert type(made) is DistributedDataParallel
    assert type(by_hooks[0]) is EagerDistributedDataParallel
    for ddp in (made, by_hooks[0]):
        assert_step(ddp, loss(rank))
    with pytest.raises(ZeroDivisionError), compiled_ddp.replace_ddp():
        1 / 0  # noqa: B018
    assert dict(vars(TorchDDP)) == before


def test_replaces_torchs_where_it_is_constructed_and_restores_it(ranks2: RankPool) -> None:
    ranks2.run(_replaced)


def _out_of_order(rank: int) -> None:
    before = dict(vars(TorchDDP))
    first = compiled_ddp.replace_ddp(backend="hooks")
    second = compiled_ddp.replace_ddp(backend="aot_eager")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert type(TorchDDP(seeded())) is DistributedDataParallel, "the other one goes on"
    second.__exit__(None, None, None)
    assert dict(vars(TorchDDP)) == before
    assert type(TorchDDP(seeded())) is TorchDDP

    begun, ended = threading.Barrier(2, timeout=60), threading.Event()
    made: list[type] = []

    def replaces() -> None:
        with compiled_ddp.replace_ddp(backend="aot_eager"):
            begun.wait()
            made.append(type(TorchDDP(seeded())))
            ended.wait(60)

    thread = threading.Thread(target=replaces)
    with compiled_ddp.replace_ddp(backend="hooks"):
        thread.start()
        begun.wait()
        while not made:
            time.sleep(0.01)
    ended.set()
    thread.join()
    assert made == [DistributedDataParallel]
    assert dict(vars(TorchDDP)) == before


def test_contexts_of_several_threads_may_end_in_any_order(ranks2: RankPool) -> None:
    ranks2.run(_out_of_order)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"bucket_cap": 3},
            r"replace_ddp got an unexpected keyword argument 'bucket_cap'. Did you mean 'bucket_cap_mb'",
        ),
        ({"backend": "hooks", "strict": True}, "keyword argument 'strict'. It is compile_ddp's: hooks compile nothing"),
        ({"backend": "eager"}, "backend must be 'inductor' or 'aot_eager', found 'eager'"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message), compiled_ddp.replace_ddp(**options):
        pytest.fail("it has opened")
