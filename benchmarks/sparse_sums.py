"""Whether sparse all-reduces of gloo may be under way at once: sums them for some seconds, and checks each sum.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.sparse_sums --seconds 20 --at-once 4

On torch 2.13, 2 cores and three busy processes beside it, a rank ended in the middle in 2 of 12 runs of 18 s with four
at once ("malloc(): unaligned tcache chunk detected"), on a group of torch's and on one of ours; one after the other in
none of 12. See compiled_ddp/step/sparse_gradients.py.
"""

import argparse
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

ROWS, WIDTH, MOST_ENTRIES = 50, 8, 30


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank())
    end, rounds = time.monotonic() + options.seconds, 0
    while _all_go_on(time.monotonic() < end):
        _sum_and_check([_sparse(generator) for _ in range(options.at_once)])
        rounds += 1
    print(f"rank {dist.get_rank()}: {rounds} rounds of {options.at_once}, all right")
    dist.destroy_process_group()


def _all_go_on(this_does: bool) -> bool:
    ranks = torch.tensor(int(this_does))
    dist.all_reduce(ranks, dist.ReduceOp.MIN)
    return bool(ranks)


def _sparse(generator: torch.Generator) -> Tensor:
    entries = int(torch.randint(0, MOST_ENTRIES, (1,), generator=generator))
    indices = torch.randint(0, ROWS, (1, entries), generator=generator)
    values = torch.randn(entries, WIDTH, generator=generator)
    return torch.sparse_coo_tensor(indices, values, (ROWS, WIDTH)).coalesce()


def _sum_and_check(tensors: list[Tensor]) -> None:
    expected = [tensor.to_dense() for tensor in tensors]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    for total, dense in zip(tensors, expected, strict=True):
        dist.all_reduce(dense)
        torch.testing.assert_close(total.to_dense(), dense)


if __name__ == "__main__":
    main()
