"""What ranks of gloo exchange: a part of it for each, or all of it for everybody."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.functional.operator import plan_of, spec_of
from compiled_ddp.functional.shares import rows_of_bucket
from compiled_ddp.passes.ops import exchange, exchange_into, wait_tensor
from ranks import RankPool

CPU = torch.device("cpu")


def brought(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(numel) + 100 * rank).to(dtype)


def _exchanges(rank: int) -> None:
    """Several at once, awaited in another order; each rank's part, or all of what it has."""
    ranks, name = dist.get_world_size(), dist.group.WORLD.group_name
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        sent = [brought(rank, ranks * size, dtype) for size in (1, 7, 5000)]
        parts = [torch.empty(each.numel(), dtype=dtype) for each in sent]
        for number, (each, into) in enumerate(zip(sent, parts, strict=True)):
            exchange_into(each, into, False, 2 * number, (), name)
        whole = [exchange(each, ranks, True, 2 * number + 1, name) for number, each in enumerate(sent)]
        for each, part, gathered in reversed([*zip(sent, parts, whole, strict=True)]):
            wait_tensor(gathered), wait_tensor(part)
            everybodys = torch.stack([brought(other, each.numel(), dtype) for other in range(ranks)])
            assert torch.equal(gathered.view(ranks, -1), everybodys)
            assert torch.equal(part.view(ranks, -1), everybodys.view(ranks, ranks, -1)[:, rank])


def _in_order(rank: int) -> None:
    """Of one number, as two steps of one group may have under way: in the order of launches, of whatever sizes."""
    ranks, name = dist.get_world_size(), dist.group.WORLD.group_name
    under_way = [exchange(torch.full((size,), float(size)), ranks, True, 5, name) for size in (3, 3000, 1)]
    for size, gathered in reversed([*zip((3, 3000, 1), under_way, strict=True)]):
        assert torch.equal(wait_tensor(gathered), torch.full((ranks * size,), float(size)))


def test_exchanges_of_one_number_come_in_the_order_of_their_launches(ranks3: RankPool) -> None:
    ranks3.run(_in_order)


def test_each_rank_has_what_the_others_have_sent_it(ranks2: RankPool, ranks3: RankPool) -> None:
    ranks2.run(_exchanges)
    ranks3.run(_exchanges)


def _ends_behind_a_profiler(rank: int) -> None:
    """What gloo would write down when it is awaited would be freed memory by then: torch 2.13 ended the process."""
    for _ in range(6):
        launched = []
        with torch.profiler.profile() as profile:
            for number in range(20):
                launched.append(exchange(torch.ones(1000), 2, True, number, dist.group.WORLD.group_name))
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


def started(works: list[Work], monkeypatch: pytest.MonkeyPatch, arrived: list[str]) -> tuple[Group, Tensor]:
    group, received = Group(works), torch.zeros(6)
    monkeypatch.setattr(torch_private.groups, "is_gloo", lambda _: True)
    torch_private.groups.start_exchange(group, torch.ones(6), received, 4, lambda: arrived.append("now"))  # type: ignore[arg-type]
    return group, received


def test_every_receipt_is_announced_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one connection an announcement would stand behind what is sent, and one direction of the link would idle."""
    works, arrived = [Work() for _ in range(4)], list[str]()
    group, received = started(works, monkeypatch, arrived)
    assert group.asked == [("receive from", 2, 5), ("receive from", 0, 5), ("send to", 2, 5), ("send to", 0, 5)]
    assert received.tolist() == [0, 0, 1, 1, 0, 0], "this rank's own part needs nobody"
    works[0].let.set()
    assert not arrived, "the second one has not come"
    for work in works:
        work.let.set()
    wait_tensor(received)
    assert arrived == ["now"]


def test_who_waits_is_told_of_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    works, arrived = [Work(), Work(RuntimeError("the other rank is gone")), Work(), Work()], list[str]()
    _, received = started(works, monkeypatch, arrived)
    for work in works:
        work.let.set()
    with pytest.raises(RuntimeError, match="the other rank is gone"):
        wait_tensor(received)
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
