"""One variant on one rank, in a process of its own: `python -m compiled_ddp.tools.comparison.contestant INSTRUCTIONS`.

Processes share nothing that one variant could leave to another: compiled code (Dynamo caches it by code object), freed
memory, a process group that is broken. The parent writes a request a line to stdin and reads an answer a line from
what was stdout; what the user's code prints goes to stderr. The process ends with its parent, wherever it is.
"""

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from compiled_ddp.tools.command_line.seeds import seed_all
from compiled_ddp.tools.command_line.target import NoSuchTarget, find_function
from compiled_ddp.tools.comparison.collectives import CommunicationAlone
from compiled_ddp.tools.comparison.measure import Contender, device_name
from compiled_ddp.tools.comparison.probe import MemoryUnknown, first_step, of_all_ranks, peak_memory
from compiled_ddp.tools.comparison.ranks import Rank, gloo_group, share_cores
from compiled_ddp.tools.comparison.reference import Reference, copies_of_buffers, trainable
from compiled_ddp.tools.comparison.users_task import RETURNS, UsersWorkload
from compiled_ddp.tools.comparison.variants import Variant, WrapperOptions, make_variants
from compiled_ddp.tools.comparison.workload import total_samples

PROBED_STEPS = 5


@dataclass(frozen=True)
class Instructions:
    """What the process is for. A path is on this rank's machine."""

    users_function: str  # SCRIPT:FUNCTION
    label: str  # unique among all processes of this rank: their stores are kept apart by it
    variant: str | None  # None: what is no variant, as the reference
    wrapper_options: WrapperOptions
    device: str
    process_group: str
    seed: int
    timeout_s: float
    reference: str  # the file that holds it

    def to_json(self) -> str:
        """What `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Instructions":
        """What `to_json` wrote."""
        fields = json.loads(text)
        return Instructions(**{**fields, "wrapper_options": WrapperOptions(**fields["wrapper_options"])})


class Contestant:
    """What answers the requests. An answer is a JSON value."""

    def __init__(self, instructions: Instructions, rank: Rank) -> None:
        self._instructions, self._rank = instructions, rank
        self._contender: Contender | None = None
        self._communication: CommunicationAlone | None = None

    def answer(self, request: str, argument: Any) -> Any:
        """Do what the parent asks for; every rank is asked for the same."""
        actions: dict[str, Callable[[Any], Any]] = {
            "make reference": lambda _: self._make_reference(),
            "probe": self._probe,
            "warm up": self._warm_up,
            "step": lambda untimed: self._trained().take_turn(untimed),
            "count collectives": lambda _: self._trained().collectives(),
            "prepare communication": self._prepare_communication,
            "communicate": lambda _: self._communicating().timed_step(),
        }
        return actions[request](argument)

    def _trained(self) -> Contender:
        assert self._contender is not None, "it is warmed up first"
        return self._contender

    def _communicating(self) -> CommunicationAlone:
        assert self._communication is not None, "it is prepared first"
        return self._communication

    def _call_function(self) -> UsersWorkload:
        rank = self._rank
        seed = self._instructions.seed + rank.index
        seed_all(seed)  # for what the script draws; the workload does so again for the function
        function = find_function(self._instructions.users_function, returns=RETURNS)
        return UsersWorkload(
            self._instructions.users_function.rpartition(":")[2],
            function,
            seed=seed,
            rank=rank.index,
            world_size=rank.world_size,
            device=rank.device,
        )

    def _make_reference(self) -> dict[str, Any]:
        """Plain autograd on the first batch, from rank 0's weights: into the file for the other processes."""
        workload, rank = self._call_function(), self._rank
        model = workload.build_model("reference", rank.device)
        state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        _agree_on_shapes(state, rank)
        for value in state.values():
            shared = value.detach().to("cpu", copy=True)
            dist.broadcast(shared, src=0, group=rank.control)
            value.detach().copy_(shared)
        initial = {name: value.detach().to("cpu", copy=True) for name, value in state.items()}
        began = time.perf_counter()
        reference = Reference.compute(workload, rank)
        step_s = time.perf_counter() - began
        saved = {"state": initial, "batch": reference.batch, "gradients": reference.gradients}
        torch.save(saved, self._instructions.reference)
        again = reference.difference(workload, model, rank, communicates=False)
        parameters = trainable(model)
        return {
            "workload": workload.name,
            "device": device_name(rank.device),
            "parameters": sum(parameter.numel() for parameter in parameters),
            "gradient_bytes": sum(parameter.nbytes for parameter in parameters),
            "step_s": max(rank.gather(step_s)),
            "own_difference": again,
            "batch_size": total_samples(rank.gather(workload.samples(reference.batch))),
        }

    def _from_reference(self) -> tuple[UsersWorkload, Reference]:
        """The workload with the weights of the reference, which is loaded too."""
        workload, device = self._call_function(), self._rank.device
        saved = torch.load(self._instructions.reference, map_location=device, weights_only=False)
        model = workload.build_model("", device)
        model.load_state_dict(saved["state"], strict=False)
        weights = [parameter.detach().clone() for parameter in trainable(model)]
        gradients = [gradient.cpu() for gradient in saved["gradients"]]
        return workload, Reference(weights, copies_of_buffers(model), saved["batch"], gradients)

    def _variant(self) -> Variant:
        assert self._instructions.variant is not None
        return make_variants(self._instructions.wrapper_options)[self._instructions.variant]

    def _probe(self, warmup: int) -> dict[str, Any]:
        """First step and peak memory, of the slowest rank and the one that needs most."""
        workload = self._from_reference()[0]  # what else there is would count as memory of the variant's
        contender, first = first_step(workload, self._variant(), self._rank)
        peak, unknown = None, None
        try:
            peak = peak_memory(contender, warmup=warmup, steps=PROBED_STEPS)
        except MemoryUnknown as error:
            unknown = str(error)
        peaks = self._rank.gather(peak)
        return {
            "first_step": asdict(of_all_ranks(self._rank.gather(first))),
            "peak_memory_bytes": None if None in peaks else max(peaks),
            "memory_unknown": unknown,
        }

    def _warm_up(self, steps: int) -> dict[str, Any]:
        workload, reference = self._from_reference()
        self._contender = Contender(self._variant(), workload, self._rank)
        difference = self._contender.warm_up(reference, steps)
        step_s = max(self._rank.gather(self._contender.step_s))
        return {"gradient_difference": difference, "bucket_bytes": self._contender.bucket_bytes(), "step_s": step_s}

    def _prepare_communication(self, bucket_bytes: list[int]) -> list[int]:
        self._communication = CommunicationAlone(bucket_bytes, self._rank)
        self._communication.step()
        return [buffer.nbytes for buffer in self._communication.buffers]


def _agree_on_shapes(state: dict[str, torch.Tensor], rank: Rank) -> None:
    """Raise ValueError, on every rank, where the models of two ranks differ: rank 0's weights go to all of them."""
    described = [(name, tuple(value.shape), str(value.dtype)) for name, value in state.items()]
    first, *others = rank.gather(described)
    for other, found in enumerate(others, start=1):
        if found != first:
            here, there = next(pair for pair in zip([*first, None], [*found, None], strict=False) if pair[0] != pair[1])
            raise ValueError(f"the models of the ranks differ: rank 0 has {here}, rank {other} has {there}")


def _join(instructions: Instructions) -> Rank:
    """This process as a rank of a group of its own, at the store that the launcher's environment names."""
    index, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    timeout = timedelta(seconds=instructions.timeout_s)
    if instructions.device == "cuda":
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        share_cores(local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        device = torch.device("cpu")
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    store = dist.PrefixStore(instructions.label, shared)
    dist.init_process_group(instructions.process_group, store=store, rank=index, world_size=world_size, timeout=timeout)
    return Rank(index, world_size, device, gloo_group())


def _read_requests(source: IO[str], requests: "queue.Queue[tuple[str, Any]]") -> None:
    """Put what the parent asks for into the queue; end the process when the parent has ended, or wants no more."""
    for line in source:
        request, argument = json.loads(line)
        requests.put((request, argument))
    os._exit(0)  # the main thread may be waiting for another rank


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    source = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    requests: queue.Queue[tuple[str, Any]] = queue.Queue()
    threading.Thread(target=_read_requests, args=(source, requests), daemon=True).start()
    contestant: Contestant | None = None
    while True:
        request, argument = requests.get()
        try:
            if contestant is None:
                instructions = Instructions.from_json(Path(sys.argv[1]).read_text())
                contestant = Contestant(instructions, _join(instructions))
            message = {"answer": contestant.answer(request, argument)}
        except NoSuchTarget as error:
            message = {"error": str(error)}
        except (
            Exception
        ) as error:  # whatever the user's code, a wrapper or a compiler raises: the parent tells the others
            traceback.print_exc()
            message = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(message) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
