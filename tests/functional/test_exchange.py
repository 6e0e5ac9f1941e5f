"""What ranks of gloo exchange: a part of it for each, or all of it for everybody."""

import contextlib
import functools
import threading
import time
import unittest.mock
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.functional.operator import plan_of, spec_of
from compiled_ddp.functional.shares import rows_of_bucket
from compiled_ddp.passes.ops import (
    exchange_of_all,
    exchange_of_all_into,
    exchange_of_sums,
    exchange_of_sums_into,
    wait_tensor,
)
from ranks import RankPool

CPU = torch.device("cpu")


def brought(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(numel) + 100 * rank).to(dtype)


def _exchanges(rank: int) -> None:
    """Several at once, awaited in another order; each rank's part of the sum, or all of what it has."""
    ranks, name = dist.get_world_size(), dist.group.WORLD.group_name
    sizes = (1, 7, 5000)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        sent = [brought(rank, ranks * size, dtype) for size in sizes]
        received, summed = [
            [torch.full_like(each, torch.nan) for each in sent],
            [torch.empty(n, dtype=dtype) for n in sizes],
        ]
        own = received[1].view(ranks, -1)[rank]  # where this rank's own part would come
        summed[1] = own
        for number, each in enumerate(zip(sent, received, summed, strict=True)):
            exchange_of_sums_into(*each, 3 * number, (), name)
        new = [exchange_of_sums(each, ranks, 3 * number + 1, name) for number, each in enumerate(sent)]
        whole = [exchange_of_all(each, ranks, 3 * number + 2, name) for number, each in enumerate(sent)]
        for each, part, another, gathered in reversed([*zip(sent, summed, new, whole, strict=True)]):
            wait_tensor(gathered), wait_tensor(part), wait_tensor(another)
            everybodys = torch.stack([brought(other, each.numel(), dtype) for other in range(ranks)])
            assert torch.equal(gathered.view(ranks, -1), everybodys)
            assert torch.equal(part, everybodys.view(ranks, ranks, -1)[:, rank].sum(0))
            assert torch.equal(part, another)
        exchange_of_all_into(own, received[1], 0, (), name)
        assert torch.equal(wait_tensor(received[1])[rank * 7 : (rank + 1) * 7], own)
        everybodys = torch.stack([brought(other, ranks * 7, dtype) for other in range(ranks)])
        assert torch.equal(received[1], everybodys.sum(0)), "the sum of everything"


def _in_slices(rank: int) -> None:
    """Each is added up by itself, also where they do not have the same size."""
    ranks, name = dist.get_world_size(), dist.group.WORLD.group_name
    sent = brought(rank, ranks * 1003, torch.float32) / 7
    with unittest.mock.patch.object(torch_private.exchanges, "SLICE_BYTES", 1000):
        summed = wait_tensor(exchange_of_sums(sent, ranks, 1, name))
    everybodys = torch.stack([brought(other, ranks * 1003, torch.float32) / 7 for other in range(ranks)])
    assert torch.equal(summed, everybodys.view(ranks, ranks, -1)[:, rank].sum(0))


def _in_order(rank: int) -> None:
    """Of one number, as two steps of one group may have under way: in the order of launches, of whatever sizes."""
    ranks, name = dist.get_world_size(), dist.group.WORLD.group_name
    under_way = [exchange_of_all(torch.full((size,), float(size)), ranks, 5, name) for size in (3, 3000, 1)]
    for size, gathered in reversed([*zip((3, 3000, 1), under_way, strict=True)]):
        assert torch.equal(wait_tensor(gathered), torch.full((ranks * size,), float(size)))


def test_exchanges_of_one_number_come_in_the_order_of_their_launches(ranks3: RankPool) -> None:
    ranks3.run(_in_order)


def test_each_rank_has_what_the_others_have_sent_it(ranks2: RankPool, ranks3: RankPool) -> None:
    for pool in (ranks2, ranks3):
        pool.run(_exchanges)
        pool.run(_in_slices)


def _ends_behind_a_profiler(rank: int) -> None:
    """What gloo would write down when it is awaited would be freed memory by then: torch 2.13 ended the process."""
    for _ in range(6):
        launched = []
        with torch.profiler.profile() as profile:
            for number in range(20):
                launched.append(exchange_of_all(torch.ones(1000), 2, number, dist.group.WORLD.group_name))
        del profile
        for each in launched:
            assert wait_tensor(each).sum() == 2000
        with torch.profiler.profile() as another:
            torch.ones(3).sum()
        assert another.key_averages()


def test_one_that_is_awaited_when_a_profiler_has_ended_is_like_any_other(ranks2: RankPool) -> None:
    ranks2.run(_ends_behind_a_profiler)


class Work(dist.Work):
    """Is there when it has been `let`."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.let, self.error = threading.Event(), error

    def wait(self, timeout: Any = None) -> bool:
        assert self.let.wait(60), "nobody has let it"
        if self.error is not None:
            raise self.error
        return True


class Group:
    """Notes what is asked of it."""

    def __init__(self, works: list[Work]) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self._works = iter(works)

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def recv(self, _: list[Tensor], rank: int, tag: int) -> Work:
        self.asked.append(("receive from", rank, tag))
        return next(self._works)

    def send(self, _: list[Tensor], rank: int, tag: int) -> Work:
        self.asked.append(("send to", rank, tag))
        return next(self._works)


@contextlib.contextmanager
def gloo() -> Iterator[list[str]]:
    """Of groups that are stood in for; what is noted of arrivals."""
    with unittest.mock.patch.object(torch_private.exchanges, "is_gloo", return_value=True):
        yield []


def test_every_receipt_is_announced_before_anything_is_sent() -> None:
    """On one connection an announcement would stand behind what is sent, and one direction of the link would idle."""
    works, received = [Work() for _ in range(4)], torch.zeros(6)
    group: Any = Group(works)
    with gloo() as arrived:
        torch_private.exchanges.start_exchange_of_all(group, torch.ones(2), received, 4, lambda: arrived.append("now"))
    assert group.asked == [("receive from", 2, 5), ("receive from", 0, 5), ("send to", 2, 5), ("send to", 0, 5)]
    assert received.tolist() == [0, 0, 1, 1, 0, 0], "this rank's own part needs nobody"
    works[0].let.set()
    assert not arrived, "the second one has not come"
    for work in works:
        work.let.set()
    wait_tensor(received)
    assert arrived == ["now"]


@pytest.mark.parametrize("tells", [True, False])
def test_a_slice_is_added_up_while_the_next_one_is_on_its_way(tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's own part of what it sends is 1, and rows of ones and twos are what others have sent."""
    monkeypatch.setattr(torch_private.exchanges, "SLICE_BYTES", 4)  # an element
    works = [Work() for _ in range(8)]
    group: Any = Group(works)
    received, summed = torch.tensor([3.0, 4.0, 0.0, 0.0, 5.0, 6.0]), torch.zeros(2)
    with gloo() as arrived:
        arrive = (lambda: arrived.append("now")) if tells else None
        torch_private.exchanges.start_exchange_of_sums(group, torch.ones(6), received, summed, 4, arrive)
    assert [asked for asked, *_ in group.asked] == ["receive from"] * 4 + ["send to"] * 4
    waiting = threading.Thread(target=wait_tensor, args=(summed,))
    waiting.start()
    for work in works[:2]:
        work.let.set()
    while not summed[0]:
        time.sleep(0.001)
    assert summed.tolist() == [9, 0] and waiting.is_alive() and not arrived
    for work in works[2:]:
        work.let.set()
    waiting.join()
    assert summed.tolist() == [9, 11] and arrived == ["now"] * tells


def test_who_waits_is_told_of_an_error() -> None:
    exchanges = torch_private.exchanges
    for start, sent, memory in (
        (exchanges.start_exchange_of_all, torch.ones(2), [torch.zeros(6)]),
        (exchanges.start_exchange_of_sums, torch.ones(6), [torch.zeros(6), torch.zeros(2)]),
    ):
        works = [Work(), Work(RuntimeError("the other rank is gone")), Work(), Work()]
        for work in works:
            work.let.set()
        with gloo() as arrived:
            start(Group(works), sent, *memory, 4, functools.partial(arrived.append, "now"))
        with pytest.raises(RuntimeError, match="the other rank is gone"):
            wait_tensor(memory[-1])
        assert not arrived


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_bucket_that_is_whole_has_its_gradients_back_to_back(ranks: int) -> None:
    """And is as large as one of rows, whose shares are parts of what lies in a row here."""
    values = [torch.randn(size) for size in ((5, 3), (), (4,))]
    specs = tuple(spec_of(n, tuple(value.shape), torch.float32, CPU) for n, value in enumerate(values))
    of_all = specs, (2, 0, 1), (3, 0), ranks, 0
    whole, rows = (plan_of(*of_all, is_scattered=True, whole=each).of_gradients[0] for each in (True, False))
    assert (whole.numel, whole.shares) == (rows.numel, rows.shares)
    flat = rows_of_bucket(whole, values).view(-1)
    assert torch.equal(flat[:20], torch.cat([values[n].reshape(-1) for n in (2, 0, 1)]))
    assert not flat[20:].any() and len(flat) == whole.numel
    for gradient in whole.gradients:
        view = whole.view(gradient, flat)
        assert torch.equal(view, values[gradient.index]) and view.untyped_storage().data_ptr() == flat.data_ptr()
        assert torch.equal(rows.view(gradient, rows_of_bucket(rows, values)), values[gradient.index])
