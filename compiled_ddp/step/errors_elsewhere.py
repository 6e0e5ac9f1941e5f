"""What rank `rank` raises in its backward of forward `forward` because of what riders say of other ranks."""

from compiled_ddp.backward.riders import Findings, Flag


def broke_off_elsewhere(rank: int, forward: int, findings: Findings, *, told_at_once: bool) -> RuntimeError:
    """`told_at_once` says whether this backward is the one that broke off, and not the one before it."""
    ranks = findings.ranks_with(Flag.ABORTED)
    if told_at_once:
        return RuntimeError(
            f"rank {rank}: the backward of forward {forward} broke off on {ranks} other rank(s) and was "
            "not reduced. Drop this step on every rank (zero_grad), and look for the exception on the other ranks."
        )
    return RuntimeError(
        f"rank {rank}: the backward of forward {forward} finds that the one before it broke off on "
        f"{ranks} rank(s), which a GPU tells one step late: some ranks have stepped with a part of the "
        "mean, and parameters may differ between ranks. Look for the exception on the other ranks, and load a "
        "checkpoint on every rank."
    )


def lost_elsewhere(rank: int, forward: int, findings: Findings) -> RuntimeError:
    """An exception has ended the backward before this one somewhere, when the other ranks had its mean."""
    ranks, state = findings.ranks_with(Flag.LOST), ""
    if findings.ranks_with(Flag.STATE_LOST):
        state = " What the communication hook kept begins anew on every rank: load it from the checkpoint, too."
    return RuntimeError(
        f"rank {rank}: the backward of forward {forward} finds that an exception ended the one before it on "
        f"{ranks} rank(s) when all of it had been sent: the other ranks have stepped with its mean, and "
        "these perhaps not, so that parameters may differ between ranks. Look for the exception there, and load a "
        f"checkpoint on every rank.{state}"
    )


def hook_failed_elsewhere(rank: int, forward: int, findings: Findings, hook: str) -> RuntimeError:
    """`hook` names a communication hook that was registered in torch's way, which cannot be called again."""
    ranks = findings.ranks_with(Flag.HOOK_FAILED)
    return RuntimeError(
        f"rank {rank}: the communication hook {hook} raised on {ranks} rank(s) in the backward of "
        f"forward {forward}, which was not reduced. Look for the exception on the other ranks; the wrapper cannot "
        "reduce any more."
    )
