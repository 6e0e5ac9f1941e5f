"""What is said when the ranks have begun different numbers of forwards, so that steps were paired up wrongly."""

from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.users_code import warn_user


class StepCheck:
    """Collects every rank's number of forwards once the riders have shown that they differ."""

    def __init__(self, communicator: Communicator, check_steps: str) -> None:
        self._communicator, self._check_steps = communicator, check_steps
        self._disagreements = 0

    def report(self, forward_count: int) -> RuntimeError | None:
        """Say, with every rank's count, that gradients of different steps were averaged; all ranks are in here.

        Returns the error to raise; with check_steps="warn" it is a warning, the first time.
        """
        if self._check_steps == "off" or (self._check_steps == "warn" and self._disagreements):
            return None
        self._disagreements += 1
        key, ranks = f"forward_count/{self._disagreements}", self._communicator.ranks
        counts = self._counts(key, forward_count)
        listed = ", ".join(f"rank {rank}: {count}" for rank, count in zip(ranks.ranks, counts, strict=True))
        message = (
            f"rank {ranks.global_rank}: this backward averaged gradients of different steps. Synchronised "
            f"forwards begun since wrapping, {listed}. A rank that drops a step after its forward (if loss.isnan(): "
            "continue) must call skip_step() in place of backward, and a forward for evaluation belongs under "
            'torch.no_grad(). Where ranks differ on purpose, wrap with check_steps="warn" or "off".'
        )
        if self._check_steps == "error":
            ranks.outlast(key)
            return RuntimeError(f"{message} Load the latest checkpoint on every rank.")
        warn_user(message)
        return None

    def _counts(self, key: str, forward_count: int) -> list[str]:
        """Every rank's, which one rank gathers for all: ten thousand that read ten thousand keys would not end."""
        ranks, purpose = self._communicator.ranks, "for the numbers of forwards"
        if ranks.rank != 0:
            ranks.publish(f"{key}/{ranks.rank}", str(forward_count))
            return ranks.read(f"{key}/all", writer=0, purpose=purpose).split()
        counts = [str(forward_count), *ranks.read_all(key, purpose=purpose)]
        ranks.publish(f"{key}/all", " ".join(counts))
        return counts
