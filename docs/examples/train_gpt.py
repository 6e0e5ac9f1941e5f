"""Train a small byte-level GPT with data parallelism: the complete script to start from.

    torchrun --standalone --nproc-per-node 2 docs/examples/train_gpt.py --steps 200

One process per CPU core (gloo) or, where CUDA is found, per GPU (nccl). It trains on the Python standard library's own
source, or on the file that --data names, saves a checkpoint, and goes on from it when started again.
"""

import argparse
import os
import sysconfig
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from compiled_ddp import compile_ddp


class ByteDataset(Dataset):
    """Windows of `context` bytes and the same windows one byte ahead, as int64."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context :][: self.context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Returns the loss from forward, so that the loss belongs to the compiled graph."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def read_text(path: Path | None) -> bytes:
    if path is not None:
        return path.read_bytes()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(source.read_bytes() for source in sources)


def make_loader(text: bytes, options: argparse.Namespace, *, shuffle: bool) -> DataLoader:
    """Each rank's own share of the windows. Every rank gets the same number of batches."""
    dataset = ByteDataset(text, options.context)
    sampler = DistributedSampler(dataset, shuffle=shuffle, seed=options.seed)
    return DataLoader(dataset, options.batch, sampler=sampler, drop_last=True, pin_memory=torch.cuda.is_available())


def training_batches(loader: DataLoader, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches from that of `step` on, in a new order each epoch; a resumed run sees what it would have seen."""
    while True:
        epoch, skip = divmod(step, len(loader))
        loader.sampler.set_epoch(epoch)
        for batch in islice(loader, skip, None):
            yield batch
            step += 1


@torch.no_grad()
def evaluate(ddp: nn.Module, loader: DataLoader, device: torch.device, batches: int) -> float:
    """Mean loss over every rank's first `batches` batches. No gradient, so nothing is reduced but this one number."""
    ddp.eval()
    losses = [ddp(x.to(device), y.to(device)) for x, y in islice(loader, batches)]
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    ddp.train()
    return mean.item() / dist.get_world_size()


def save_checkpoint(path: Path, ddp: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Rank 0 writes for all: after a step every rank holds the same. The rename leaves no half-written file behind."""
    if dist.get_rank() == 0:
        unfinished = path.with_suffix(".tmp")
        # The keys are those of the bare model: a checkpoint loads with or without the wrapper.
        torch.save({"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
        os.replace(unfinished, path)


def train(options: argparse.Namespace, device: torch.device) -> None:
    text = read_text(options.data)
    split = len(text) * 9 // 10
    train_loader = make_loader(text[:split], options, shuffle=True)
    eval_loader = make_loader(text[split:], options, shuffle=False)

    torch.manual_seed(options.seed)
    model = GPT(options.width, options.layers, options.heads, options.context).to(device)
    ddp = compile_ddp(model, backend=options.backend)  # was: DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=options.learning_rate)

    step = 0
    if options.checkpoint.exists():  # every rank reads it; with several machines, from a shared file system
        checkpoint = torch.load(options.checkpoint, map_location=device, weights_only=True)
        ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step = checkpoint["step"]
        say(f"resumed from {options.checkpoint} at step {step}")

    batches, begin = training_batches(train_loader, step), time.perf_counter()
    while step < options.steps:
        x, y = next(batches)
        loss = ddp(x.to(device, non_blocking=True), y.to(device, non_blocking=True))
        loss.backward()  # the gradients are means over ranks when it returns
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % options.log_every == 0:
            seconds, begin = time.perf_counter() - begin, time.perf_counter()
            say(f"step {step}: loss {loss.item():.4f} on rank 0, {1e3 * seconds / options.log_every:.0f} ms a step")
        if step % options.eval_every == 0 or step == options.steps:
            say(f"step {step}: evaluation loss {evaluate(ddp, eval_loader, device, options.eval_batches):.4f}")
            save_checkpoint(options.checkpoint, ddp, optimizer, step)
            begin = time.perf_counter()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--data", type=Path, help="a file to train on; default the standard library's source")
    parser.add_argument("--checkpoint", type=Path, default=Path("train_gpt.pt"))
    parser.add_argument("--backend", default="inductor", help="aot_eager starts at once and needs no C++ compiler")
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=128, help="bytes per window")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients together")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--eval-batches", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
