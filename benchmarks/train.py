"""Train under torch DDP and compile_ddp from one seed and plot both loss curves: `python -m benchmarks.train`.

`--whole` has whole steps beside them.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import trange

from benchmarks.whole_step import WHOLE, Whole
from benchmarks.workload import Workload
from compiled_ddp.tools.comparison.measure import Contender
from compiled_ddp.tools.comparison.ranks import Rank
from compiled_ddp.tools.comparison.variants import Variant


def train(
    workload: Workload, variants: Sequence[Variant], *, whole: Sequence[str], steps: int, rank: Rank
) -> dict[str, list[float]]:
    """The loss of each step, averaged over ranks, for each variant. All see the same weights and batches."""
    loops = {variant.name: partial(_loss_of_loop, Contender(variant, workload, rank)) for variant in variants}
    wholes = {name: partial(_loss_of_whole, Whole(workload, rank, **WHOLE[name])) for name in whole}
    every: dict[str, Callable[[], float]] = {**loops, **wholes}
    losses: dict[str, list[float]] = {name: [] for name in every}
    bar = trange(steps, desc="training", disable=rank.index != 0, leave=False)
    for _ in bar:
        for name, loss in every.items():
            losses[name].append(loss())
        bar.set_postfix_str(", ".join(f"{name} {curve[-1]:.4f}" for name, curve in losses.items()))
    by_rank = rank.gather(losses)
    return {
        name: [sum(values) / len(values) for values in zip(*(of_rank[name] for of_rank in by_rank), strict=True)]
        for name in every
    }


def _loss_of_loop(contender: Contender) -> float:
    loss = contender.module(*contender.next_batch())
    loss.backward()
    contender.optimizer.step()
    contender.optimizer.zero_grad()
    return float(loss.item())


def _loss_of_whole(whole: Whole) -> float:
    return float(whole.loss(whole.next_batch()).item())


def largest_difference(curves: dict[str, list[float]]) -> float:
    """Largest difference between any two curves at one step."""
    return max(max(at_step) - min(at_step) for at_step in zip(*curves.values(), strict=True))


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Losses above, and below them each curve's distance to the first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), height_ratios=(3, 1), sharex=True, layout="constrained")
    (first_name, first), *others = curves.items()
    above.plot(first, label=first_name, linewidth=3, color="#9ecae1")
    for name, curve in others:
        above.plot(curve, label=name, linewidth=1.2, linestyle="--", color="#08306b")
        below.plot([abs(a - b) for a, b in zip(curve, first, strict=True)], linewidth=1, color="#08306b")
    above.set_ylabel("loss, mean over ranks")
    above.legend(frameon=False)
    below.set_ylabel(f"distance to\n{first_name}")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("--model", choices=("gpt", "conv"), default="gpt")
    parser.add_argument("--steps", type=int, help="default 300, with --quick 60")
    parser.add_argument("--quick", action="store_true", help="60 steps, about two minutes on two cores")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--variants", nargs="+", default=["torch DDP", "compile_ddp"], metavar="NAME")
    parser.add_argument("--whole", nargs="+", choices=WHOLE, default=[], metavar="NAME", help="whole steps")
    parser.add_argument("--bucket-cap-mb", type=float)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/train.json"))
    parser.add_argument("--png", type=Path, default=Path("benchmarks/out/train.png"))
    options = parser.parse_args(arguments)
    options.steps = options.steps or (60 if options.quick else 300)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    from benchmarks.launch import REPOSITORY, run_job
    from compiled_ddp.tools.comparison.record import recipe

    options = _parse(arguments)
    job: dict[str, Any] = {
        "workload": options.model,
        "variants": options.variants,
        "bucket_cap_mb": options.bucket_cap_mb,
        "device": options.device,
        "steps": options.steps,
        "whole": options.whole,
    }
    curves = run_job("train", job, ranks=options.ranks)
    difference = largest_difference(curves)
    for name, curve in curves.items():
        print(f"{name}: loss {curve[0]:.4f} at the first step, {curve[-1]:.4f} after {len(curve)}")
    print(f"Largest difference of the losses at one step: {difference:.2e}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"recipe": recipe(REPOSITORY), "largest_difference": difference, "losses": curves})
    )
    draw(curves, options.png)
    print(f"Curves: {options.png}, losses: {options.json}")


if __name__ == "__main__":
    main()
