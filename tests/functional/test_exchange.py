"""What ranks of gloo exchange: a part of it for each, or all of it for everybody."""

import contextlib
import threading
import time
import unittest.mock
from collections.abc import Iterator, Sequence
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


@contextlib.contextmanager
def both_ways(group: dist.ProcessGroup) -> Iterator[None]:
    """With a way back, as communicators have."""
    back = dist.new_group()
    torch_private.exchanges.let_send_back(group, by=back)
    yield
    dist.destroy_process_group(back)


def _exchanges(rank: int) -> None:
    """On one group, and on two: which of both launches first is different on the ranks then."""
    _several(rank)
    with both_ways(dist.group.WORLD):
        _several(rank)


def _several(rank: int) -> None:
    """At once, awaited in another order; each rank's part of the sum, or all of what it has."""
    ranks, name = dist.get_world_size(), dist.group.WORLD.group_name
    sizes = (1, 7, 5000, 0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        sent = [brought(rank, ranks * size, dtype) for size in sizes]
        received, summed = [
            [torch.full_like(each, torch.nan) for each in sent],
            [torch.empty(n, dtype=dtype) for n in sizes],
        ]
        own = received[1].view(ranks, -1)[rank]  # where this rank's own part would come
        summed[1] = own
        for each in zip(sent, received, summed, strict=True):
            exchange_of_sums_into(*each, (), name)
        new = [exchange_of_sums(each, ranks, 0, name) for each in sent]
        whole = [exchange_of_all(each, ranks, 0, name) for each in sent]
        for each, part, another, gathered in reversed([*zip(sent, summed, new, whole, strict=True)]):
            wait_tensor(gathered), wait_tensor(part), wait_tensor(another)
            everybodys = torch.stack([brought(other, each.numel(), dtype) for other in range(ranks)])
            assert torch.equal(gathered.view(everybodys.shape), everybodys)
            assert torch.equal(part, everybodys.unflatten(1, (ranks, len(part)))[:, rank].sum(0))
            assert torch.equal(part, another)
        exchange_of_all_into(own, received[1], (), name)
        assert torch.equal(wait_tensor(received[1])[rank * 7 : (rank + 1) * 7], own)
        everybodys = torch.stack([brought(other, ranks * 7, dtype) for other in range(ranks)])
        assert torch.equal(received[1], everybodys.sum(0)), "the sum of everything"


def _in_slices(rank: int) -> None:
    """Each is added up by itself, also where they do not have the same size."""
    ranks, name = dist.get_world_size(), dist.group.WORLD.group_name
    sent = brought(rank, ranks * 1003, torch.float32) / 7
    with unittest.mock.patch.object(torch_private.exchanges, "SLICE_BYTES", 1000):
        summed = wait_tensor(exchange_of_sums(sent, ranks, 0, name))
    everybodys = torch.stack([brought(other, ranks * 1003, torch.float32) / 7 for other in range(ranks)])
    assert torch.equal(summed, everybodys.view(ranks, ranks, -1)[:, rank].sum(0))


def _elsewhere(rank: int) -> None:
    """What other backends are asked for, however large it is."""
    exchanges = torch_private.exchanges
    with unittest.mock.patch.multiple(exchanges, SLICE_BYTES=8, _goes_both_ways=lambda *_: False):
        _several(rank)


def test_each_rank_has_what_the_others_have_sent_it(ranks2: RankPool, ranks3: RankPool) -> None:
    for pool in (ranks2, ranks3):
        pool.run(_exchanges)
        pool.run(_in_slices)
        pool.run(_elsewhere)


def _ends_behind_a_profiler(rank: int) -> None:
    """What gloo would write down when it is awaited would be freed memory by then: torch 2.13 ended the process."""
    for _ in range(6):
        launched = []
        with torch.profiler.profile() as profile:
            for _ in range(20):
                launched.append(exchange_of_all(torch.ones(1000), 2, 0, dist.group.WORLD.group_name))
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
        self._let, self._error = threading.Event(), error
        self._future: torch.futures.Future[None] = torch.futures.Future()

    def let(self) -> None:
        self._future.set_result(None)
        self._let.set()

    def get_future(self) -> Any:
        return self._future

    def wait(self, timeout: Any = None) -> bool:
        assert self._let.wait(60), "nobody has let it"
        if self._error is not None:
            raise self._error
        return True


class Group:
    """One of two, or three, that notes what is launched."""

    def __init__(self, name: str, launched: list[tuple[str, str]], works: Iterator[Work], rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)
        self._name, self._launched, self._works = name, launched, works

    def alltoall_base(self, received: Tensor, sent: Tensor, *_: object) -> Work:
        whats = ["receive"] * (received.numel() > 0) + ["send"] * (sent.numel() > 0)
        self._launched.append((self._name, " and ".join(whats)))
        return next(self._works)

    def broadcast(self, _: list[Tensor], options: Any) -> Work:
        self._launched.append((self._name, "send" if options.rootRank == self.rank() else "receive"))
        return next(self._works)


class TwoGroups:
    """Of a rank of so many, which work as they are given; what they launch, and the arrivals that are told."""

    def __init__(self, works: Sequence[Work], rank: int = 1, ranks: int = 2) -> None:
        self.launched, self.arrived = list[tuple[str, str]](), list[str]()
        of_each = self.launched, iter(works), rank, ranks
        self.group: Any = Group("group", *of_each)
        self._back: Any = Group("back", *of_each)
        torch_private.exchanges.let_send_back(self.group, by=self._back)

    def arrive(self) -> None:
        self.arrived.append("now")


@pytest.mark.parametrize(
    ("rank", "ranks", "sums", "of_all"),
    [
        (0, 2, [("back", "receive"), ("group", "send")], [("back", "receive"), ("group", "send")]),
        (1, 2, [("group", "receive"), ("back", "send")], [("group", "receive"), ("back", "send")]),
        (
            1,
            3,
            [("group", "receive and send"), ("back", "receive and send")],
            [("group", "receive"), ("back", "send"), ("back", "receive")],
        ),
    ],
)
def test_a_rank_launches_first_what_it_receives_by(
    rank: int, ranks: int, sums: list[tuple[str, str]], of_all: list[tuple[str, str]]
) -> None:
    """What it sends would keep the announcement of its receipt waiting, and one direction of the link idle."""
    works = [Work() for _ in [*sums, *of_all]]
    two = TwoGroups(works, rank, ranks)
    sent, received = torch.ones(6), torch.zeros(6)
    torch_private.exchanges.start_exchange_of_sums(two.group, sent, received, torch.zeros(6 // ranks))
    assert two.launched == sums
    two.launched.clear()
    torch_private.exchanges.start_exchange_of_all(two.group, torch.ones(6 // ranks), received, two.arrive)
    assert two.launched == of_all
    assert received.view(ranks, -1)[rank].all() and received.sum() == 6 // ranks, "its own part needs nobody"
    for work in works[len(sums) :]:
        assert not two.arrived, "another one has not come"
        work.let()
    assert two.arrived == ["now"]
    for work in works[: len(sums)]:
        work.let()
    wait_tensor(received)


@pytest.mark.parametrize("tells", [True, False])
def test_a_slice_is_added_up_while_the_next_one_is_on_its_way(tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's own part of what it sends is 1, and the row of threes and fours is what the other one has sent."""
    monkeypatch.setattr(torch_private.exchanges, "SLICE_BYTES", 4)  # an element
    works = [Work() for _ in range(4)]
    two = TwoGroups(works)
    received, summed = torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.zeros(2)
    arrive = two.arrive if tells else None
    torch_private.exchanges.start_exchange_of_sums(two.group, torch.ones(4), received, summed, arrive)
    assert two.launched == [("group", "receive"), ("back", "send")] * 2
    waiting = threading.Thread(target=wait_tensor, args=(summed,))
    waiting.start()
    for work in works[:2]:
        work.let()
    while not summed[0]:
        time.sleep(0.001)
    assert summed.tolist() == [4, 0] and waiting.is_alive() and not two.arrived
    for work in works[2:]:
        work.let()
    waiting.join()
    assert summed.tolist() == [4, 5] and two.arrived == ["now"] * tells


def test_who_waits_is_told_of_an_error() -> None:
    exchanges = torch_private.exchanges
    for start, sent, memory in (
        (exchanges.start_exchange_of_all, torch.ones(2), [torch.zeros(4)]),
        (exchanges.start_exchange_of_sums, torch.ones(4), [torch.zeros(4), torch.zeros(2)]),
    ):
        works = [Work(), Work(RuntimeError("the other rank is gone"))]
        for work in works:
            work.let()
        two = TwoGroups(works)
        start(two.group, sent, *memory)
        with pytest.raises(RuntimeError, match="the other rank is gone"):
            wait_tensor(memory[-1])


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
