"""The operators that compiled_ddp adds to a graph.

`pack(Tensor[] parts) -> Tensor` lays its parts, each contiguous, back to back in a one-dimensional tensor. It is
`torch.cat` of the flattened parts with one freedom more: a compiler may let the parts be written there in the first
place. Inductor does so through the lowering in `compiled_ddp.torch_private`; every other backend copies.

`pack_into(Tensor[] parts, Tensor(a!) into) -> Tensor(a!)` does so in `into`, memory lent for the result, of its size
and dtype. Its contents are lost, and nothing may read it afterwards but through the result.

`sum_over_ranks` is a whole reduction of a plan, as a functional step asks for it: gradients and what rides with them
in, their sums over ranks out. Run as it is it launches the plan's buckets; `passes.step_pipeline` puts them into the
graph in its place. `order` is that of the gradients in the buckets, `lengths` says how many of them each bucket has: a
last one with none has the riders alone.
`leading` are the leading rider elements, `passengers` the user's, float32 of any shape. Returned are the sums of the
gradients, contiguous, of the passengers, and last of `leading`. Where it is `scattered_by` "exchange" or
"reduce_scatter", a rank gets its share of each sum alone, one-dimensional: `plan.share_elements`; in buckets that are
`whole` elements of any of the bucket's gradients. With `kept`, in place of the sums there is what a communication hook
makes of each bucket: it is what the hook keeps for all of them, in launch order, and what becomes of that is returned
behind all else. Only passes know the hook's program: this is not to be run as it is.

`gather_shares` is the way back: in are shares of this rank, out is what all ranks have, one-dimensional, each with what
fills it up. It is launched in the same buckets. `sum_numbers` sums a small tensor over ranks.

`gathered_before` is what the step before has left under way of these parameters: `passes.gather_later`. Run as it is it
copies them, as nothing is under way. `put_together` makes parameters of a bucket of shares that were gathered, with a
row for each of `ranks`, or leaves them as they are where that is not `sound`, a bool; `put_together_` does so in place.

`summed_before` is that of the sums of these parameters' gradients, and last whether they are to be used, a bool: False
where it is run as it is. `taken_apart` makes them of a bucket, each flat and of so many elements.

`optimizer_step` is what an optimizer makes of the parameters of a group and of their state (`functional.updates`):
lists of them in, for each name of the state one behind the other, and in the same order out. `optimizer_step_` leaves
it in place of what it was given.

`exchange_of_sums` sends each rank its equal part of what is `sent`; the result, when it has been awaited, is the sum of
what comes, in the order of ranks. `exchange_of_all` sends every rank this one's `share`; the result, flat, is that of
each. Passes tell by their `number`, `number_of_exchange`, of which bucket they are. `exchange_of_sums_into` and
`exchange_of_all_into` receive into memory that there is, `after` another launch: by that a compiler knows their order.
What is awaited of them is `summed`, and `received`; both may have this rank's share of the sums where its own row of
what is received would be.
`fill_rows` makes a matrix with a row for each rank, which is a row of every part, in memory that there is.

`add_in_order(Tensor into, Tensor indices, Tensor values) -> Tensor`, all of one dimension, is `into` with each value
added at its index, in their order. `index_add` and `index_put` become additions in any order, of several threads or of
a GPU's, so that ranks which add the same values would round differently, and their models drift apart.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from compiled_ddp.plan import is_called, share_elements, whole_of

torch.library.define("compiled_ddp::pack", "(Tensor[] parts) -> Tensor")
torch.library.define("compiled_ddp::pack_into", "(Tensor[] parts, Tensor(a!) into) -> Tensor(a!)")


@torch.library.impl("compiled_ddp::pack", "CompositeExplicitAutograd")
def _pack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


@torch.library.register_fake("compiled_ddp::pack")
def _pack_fake(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0].new_empty(sum(part.numel() for part in parts))


@torch.library.impl("compiled_ddp::pack_into", "CompositeExplicitAutograd")
def _pack_into(parts: Sequence[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts], out=into)


@torch.library.register_fake("compiled_ddp::pack_into")
def _pack_into_fake(parts: Sequence[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(into)  # Inductor would take a view of an input for memory that no all-reduce may overwrite


torch.library.define(
    "compiled_ddp::sum_over_ranks",
    "(Tensor[] gradients, Tensor[] passengers, Tensor leading, int[] order, int[] lengths, int world_size, "
    "str group_name, str scattered_by='', bool whole=False, Tensor[]? kept=None) -> Tensor[]",
)
torch.library.define(
    "compiled_ddp::gather_shares",
    "(Tensor[] shares, int[] order, int[] lengths, int world_size, str group_name, str scattered_by) -> Tensor[]",
)
torch.library.define("compiled_ddp::sum_numbers", "(Tensor numbers, str group_name) -> Tensor")


@torch.library.register_fake("compiled_ddp::sum_over_ranks")
def _sum_over_ranks_fake(
    gradients: Sequence[torch.Tensor],
    passengers: Sequence[torch.Tensor],
    leading: torch.Tensor,
    order: Sequence[int],
    lengths: Sequence[int],
    world_size: int,
    group_name: str,
    scattered_by: str = "",
    whole: bool = False,
    kept: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    unscattered = (*passengers, leading, *(kept or ()))
    others = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in unscattered]
    if scattered_by:
        return [*(part.new_empty(share_elements(part.numel(), world_size)) for part in gradients), *others]
    return [*(torch.empty_like(part, memory_format=torch.contiguous_format) for part in gradients), *others]


@torch.library.register_fake("compiled_ddp::gather_shares")
def _gather_shares_fake(
    shares: Sequence[torch.Tensor], order: Sequence[int], lengths: Sequence[int], world_size: int, *_: object
) -> list[torch.Tensor]:
    return [share.new_empty(world_size * share.numel()) for share in shares]


@torch.library.register_fake("compiled_ddp::sum_numbers")
def _sum_numbers_fake(numbers: torch.Tensor, _: str) -> torch.Tensor:
    return torch.empty_like(numbers)


_taken: contextvars.ContextVar[set[int] | None] = contextvars.ContextVar("taken", default=None)


@contextlib.contextmanager
def noting_what_is_taken() -> Iterator[set[int]]:
    """The addresses of what was gathered, and has been read in here: it had come."""
    taken = set[int]()
    token = _taken.set(taken)
    try:
        yield taken
    finally:
        _taken.reset(token)


def note_taken(*arrived: torch.Tensor) -> None:
    """These, or what they are views of, are read."""
    if (taken := _taken.get()) is not None:
        taken.update(each.untyped_storage().data_ptr() for each in arrived)


torch.library.define("compiled_ddp::gathered_before", "(Tensor[] params) -> Tensor[]")


@torch.library.impl("compiled_ddp::gathered_before", "CompositeExplicitAutograd")
def _gathered_before(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.clone() for each in params]


@torch.library.register_fake("compiled_ddp::gathered_before")
def _gathered_before_fake(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(each) for each in params]


torch.library.define("compiled_ddp::summed_before", "(Tensor[] params) -> Tensor[]")


@torch.library.impl("compiled_ddp::summed_before", "CompositeExplicitAutograd")
def _summed_before(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*map(torch.zeros_like, params), torch.zeros((), dtype=torch.bool, device=params[0].device)]


@torch.library.register_fake("compiled_ddp::summed_before")
def _summed_before_fake(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*map(torch.empty_like, params), torch.empty((), dtype=torch.bool, device=params[0].device)]


torch.library.define("compiled_ddp::taken_apart", "(Tensor gathered, int[] numels, int ranks) -> Tensor[]")


@torch.library.impl("compiled_ddp::taken_apart", "CompositeExplicitAutograd")
def _taken_apart(gathered: torch.Tensor, numels: Sequence[int], ranks: int) -> list[torch.Tensor]:
    note_taken(gathered)
    rows = gathered.view(ranks, -1).split([share_elements(numel, ranks) for numel in numels], dim=1)
    copies = [own.clone(memory_format=torch.contiguous_format).view(-1) for own in rows]
    return [own[:numel] for own, numel in zip(copies, numels, strict=True)]


@torch.library.register_fake("compiled_ddp::taken_apart")
def _taken_apart_fake(gathered: torch.Tensor, numels: Sequence[int], _: int) -> list[torch.Tensor]:
    return [gathered.new_empty(numel) for numel in numels]


torch.library.define("compiled_ddp::fill_rows", "(Tensor[] parts, Tensor(a!) into, int ranks) -> ()")
torch.library.define("compiled_ddp::exchange_of_sums", "(Tensor sent, int ranks, int number, str group_name) -> Tensor")
torch.library.define("compiled_ddp::exchange_of_all", "(Tensor share, int ranks, int number, str group_name) -> Tensor")
torch.library.define(
    "compiled_ddp::exchange_of_sums_into",
    "(Tensor sent, Tensor(a!) received, Tensor(b!) summed, Tensor[] after, str group_name) -> ()",
)
torch.library.define(
    "compiled_ddp::exchange_of_all_into",
    "(Tensor share, Tensor(a!) received, Tensor[] after, str group_name) -> ()",
)


@torch.library.impl("compiled_ddp::fill_rows", "CompositeExplicitAutograd")
def _fill_rows(parts: Sequence[torch.Tensor], into: torch.Tensor, ranks: int) -> None:
    torch.cat([*parts], 1, out=into.view(ranks, -1))


@torch.library.register_fake("compiled_ddp::fill_rows")
def _fill_rows_fake(*_: object) -> None:
    return


@torch.library.register_fake("compiled_ddp::exchange_of_sums")
def _exchange_of_sums_fake(sent: torch.Tensor, ranks: int, _: int, __: str) -> torch.Tensor:
    return sent.new_empty(sent.numel() // ranks)


@torch.library.register_fake("compiled_ddp::exchange_of_all")
def _exchange_of_all_fake(share: torch.Tensor, ranks: int, _: int, __: str) -> torch.Tensor:
    return share.new_empty(share.numel() * ranks)


@torch.library.register_fake("compiled_ddp::exchange_of_sums_into")
def _exchange_of_sums_into_fake(*_: object) -> None:
    return


@torch.library.register_fake("compiled_ddp::exchange_of_all_into")
def _exchange_of_all_into_fake(*_: object) -> None:
    return


_ARRIVED = "Tensor gathered, Tensor sound"
torch.library.define("compiled_ddp::put_together", f"({_ARRIVED}, Tensor[] params, int ranks) -> Tensor[]")
torch.library.define("compiled_ddp::put_together_", f"({_ARRIVED}, Tensor(a!)[] params, int ranks) -> ()")


@torch.library.impl("compiled_ddp::put_together", "CompositeExplicitAutograd")
def _put_together(
    gathered: torch.Tensor, sound: torch.Tensor, params: Sequence[torch.Tensor], ranks: int
) -> list[torch.Tensor]:
    copies = [each.clone() for each in params]
    _put_together_in_place(gathered, sound, copies, ranks)
    return copies


def _put_together_in_place(
    gathered: torch.Tensor, sound: torch.Tensor, params: Sequence[torch.Tensor], ranks: int
) -> None:
    note_taken(gathered)
    if sound.is_cpu and not sound:
        return
    rows, begin = gathered.view(ranks, -1), 0
    for param in params:
        share = share_elements(param.numel(), ranks)
        own = rows[:, begin : begin + share]
        if sound.is_cpu and param.numel() == ranks * share and param.is_contiguous():
            param.view(ranks, share).copy_(own)
        else:
            whole = whole_of(own, param.shape)
            param.copy_(whole if sound.is_cpu else torch.where(sound, whole, param))
        begin += share


torch.library.impl("compiled_ddp::put_together_", "CompositeExplicitAutograd", _put_together_in_place)


@torch.library.register_fake("compiled_ddp::put_together")
def _put_together_fake(
    _: torch.Tensor, __: torch.Tensor, params: Sequence[torch.Tensor], ___: int
) -> list[torch.Tensor]:
    return [torch.empty_like(each) for each in params]


@torch.library.register_fake("compiled_ddp::put_together_")
def _put_together_in_place_fake(*_: object) -> None:
    return


_STEP = "Tensor numbers, Tensor? factor, Tensor? skip, Tensor? applies, str optimizer, str switches, str names"
torch.library.define(
    "compiled_ddp::optimizer_step",
    f"(Tensor[] params, Tensor[] gradients, Tensor[] state, Tensor[] steps, {_STEP}) -> Tensor[]",
)
torch.library.define(
    "compiled_ddp::optimizer_step_",
    f"(Tensor(a!)[] params, Tensor[] gradients, Tensor(b!)[] state, Tensor(c!)[] steps, {_STEP}) -> ()",
)


@torch.library.register_fake("compiled_ddp::optimizer_step")
def _optimizer_step_fake(
    params: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    state: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    *_: object,
) -> list[torch.Tensor]:
    return [torch.empty_like(each) for each in (*params, *state, *steps)]


@torch.library.register_fake("compiled_ddp::optimizer_step_")
def _optimizer_step_in_place_fake(*_: object) -> None:
    return


torch.library.define("compiled_ddp::add_in_order", "(Tensor into, Tensor indices, Tensor values) -> Tensor")


@torch.library.impl("compiled_ddp::add_in_order", "CompositeExplicitAutograd")
def _add_in_order(into: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if into.is_cpu:
        return into.index_add(0, indices, values)  # by one thread
    return into.index_put((indices,), values, accumulate=True)  # sorted by index first, on a GPU


@torch.library.register_fake("compiled_ddp::add_in_order")
def _add_in_order_fake(into: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(into)


add_in_order = torch.ops.compiled_ddp.add_in_order.default
pack = torch.ops.compiled_ddp.pack.default
pack_into = torch.ops.compiled_ddp.pack_into.default
sum_over_ranks = torch.ops.compiled_ddp.sum_over_ranks.default
gather_shares = torch.ops.compiled_ddp.gather_shares.default
gathered_before = torch.ops.compiled_ddp.gathered_before.default
summed_before = torch.ops.compiled_ddp.summed_before.default
taken_apart = torch.ops.compiled_ddp.taken_apart.default
put_together = torch.ops.compiled_ddp.put_together.default
put_together_in_place = torch.ops.compiled_ddp.put_together_.default
sum_numbers = torch.ops.compiled_ddp.sum_numbers.default
optimizer_step = torch.ops.compiled_ddp.optimizer_step.default
optimizer_step_in_place = torch.ops.compiled_ddp.optimizer_step_.default
all_reduce = torch.ops._c10d_functional.all_reduce.default
all_reduce_in_place = torch.ops._c10d_functional.all_reduce_.default
all_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
exchange_of_sums = torch.ops.compiled_ddp.exchange_of_sums.default
exchange_of_all = torch.ops.compiled_ddp.exchange_of_all.default
exchange_of_sums_into = torch.ops.compiled_ddp.exchange_of_sums_into.default
exchange_of_all_into = torch.ops.compiled_ddp.exchange_of_all_into.default
fill_rows = torch.ops.compiled_ddp.fill_rows.default
reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
wait_tensor = torch.ops._c10d_functional.wait_tensor.default

PACKS = (pack, pack_into)
EXCHANGES = (exchange_of_sums, exchange_of_all, exchange_of_sums_into, exchange_of_all_into)
GATHERS = (all_gather, exchange_of_all, exchange_of_all_into)
LAUNCHES = (all_reduce, all_reduce_in_place, all_gather, *EXCHANGES, reduce_scatter)
WAITS: tuple[OpOverload, ...] = (wait_tensor,)
if hasattr(
    torch.ops._c10d_functional, "wait_tensors"
):  # torch 2.15 and later, for all results of a coalesced collective
    WAITS += (torch.ops._c10d_functional.wait_tensors.default,)


def number_of_exchange(bucket: Sequence[int], *, gathers: bool) -> int:
    """The number of the exchange that scatters a bucket of these gradients, or gathers it; 0 is nobody's."""
    return 2 * bucket[0] + 1 + gathers


def awaited_of(operator: object, args: Sequence[Any], result: Any) -> Any:
    """What is to be awaited of a launch by this operator, which has this result: of some it is an argument."""
    if operator is exchange_of_sums_into:
        return args[2]
    return args[1] if operator is exchange_of_all_into else result


def is_launch(node: torch.fx.Node, group_name: str) -> bool:
    """Whether `node` launches a collective on this group; its name is the last argument of each."""
    return node.target in LAUNCHES and is_called(str(node.args[-1]), group_name)


def is_wait(node: torch.fx.Node) -> bool:
    """Whether `node` awaits a collective: one of a plan, which `wait_tensor` alone does, or a user's."""
    return node.target in WAITS


def meets_other_ranks(node: torch.fx.Node) -> bool:
    """Whether the result depends on what other ranks bring: a collective names its group."""
    if not isinstance(node.target, OpOverload):
        return False
    names = {argument.name for argument in node.target._schema.arguments}
    return "c10d" in node.target.namespace or not names.isdisjoint({"group_name", "process_group"})
