"""The store of torch.distributed, through which ranks agree: whatever it raises is explained, wherever it is used."""

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from models import Mlp, row_batch, wrappers

from compiled_ddp import EagerDDP
from compiled_ddp.graph.warmup import warm_up
from compiled_ddp.ranks.agreement import Description, agree_on_description
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.rank_group import RankGroup
from ranks import RankPool


def _ended_store() -> dist.Store:
    """One whose host is gone."""
    soon = timedelta(seconds=15)  # on a loaded machine 3 were too few to connect
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=soon)
    return dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=soon)


def _publish(ranks: RankGroup) -> None:
    for _ in range(10):  # what is sent first may still find its way into the connection
        ranks.publish("key", "value")


USES: dict[str, Callable[[RankGroup], object]] = {
    "publish": _publish,
    "read": lambda ranks: ranks.read("key", writer=0, purpose="to answer"),
    "agreement": lambda ranks: agree_on_description(ranks, dict, failure="nothing was agreed on"),
    "warm-up": lambda ranks: warm_up(ranks, 1, (), measure=lambda: None),
}


def _explained(rank: int, use: str) -> str:
    ranks = RankGroup(None)
    ranks._store.shared = dist.PrefixStore("ended", _ended_store())
    with pytest.raises(RuntimeError) as caught:
        USES[use](ranks)
    assert type(caught.value) is RuntimeError
    return str(caught.value)


@pytest.mark.parametrize("use", USES)
def test_every_use_of_the_store_says_who_waited_for_what_and_what_to_do(ranks2: RankPool, use: str) -> None:
    for rank, message in enumerate(ranks2.run(_explained, use)):
        waited = r"to (publish '.*' for the other ranks|wait for rank \d \(to .*\))"
        assert re.match(f"rank {rank} could not reach the store of torch.distributed {waited}: ", message), message
        assert "Look there for the first error, and start all ranks again." in message


def _no_group(rank: int) -> str:
    ranks = RankGroup(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_ddp.torch_private.groups.default_store", _ended_store)
        with pytest.raises(RuntimeError) as caught:
            Communicator(ranks)
    return str(caught.value)


def test_a_process_group_that_cannot_be_made_names_the_rank_and_the_others(ranks2: RankPool) -> None:
    for rank, message in enumerate(ranks2.run(_no_group)):
        assert message.startswith(f"rank {rank} could not make the process group of compiled_ddp/"), message
        assert "with ranks [0, 1]" in message and "start all ranks again" in message


def _in_training(rank: int) -> list[str]:
    """The first backward agrees on the sequence of buckets; wrapping compares the models."""
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp())
    ddp._runtime.communicator.ranks._store.shared = dist.PrefixStore("ended", _ended_store())
    messages = []
    with pytest.raises(RuntimeError) as caught:
        ddp(row_batch(rank)).sum().backward()
    messages.append(str(caught.value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_ddp.torch_private.groups.default_store", _ended_store)
        with pytest.raises(RuntimeError) as caught:
            EagerDDP(Mlp())
        messages.append(str(caught.value))
    return messages


def test_training_and_wrapping_say_so_too(ranks2: RankPool) -> None:
    for rank, messages in enumerate(ranks2.run(_in_training)):
        for message in messages:
            assert message.startswith(f"rank {rank} could not reach the store of torch.distributed to "), message


def _agree_on_much(rank: int, last: tuple[str, str]) -> str:
    """20 MB, where the store takes 8 MiB at a time."""
    much: Description = {f"parameter {number}": ["x" * 2000] for number in range(10_000)}
    much["the last one"] = [last[rank]]
    try:
        agree_on_description(RankGroup(None), lambda: much, failure="nothing was agreed on")
    except RuntimeError as error:
        return str(error)
    return ""


def test_descriptions_of_any_length_are_compared(ranks2: RankPool) -> None:
    assert ranks2.run(_agree_on_much, ("same", "same")) == ["", ""]
    for message in ranks2.run(_agree_on_much, ("one", "other")):
        assert "rank 1: the last one is other here, one on rank 0." in message
