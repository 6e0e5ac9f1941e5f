"""The versions of torch that are supported."""

import torch

SUPPORTED_TORCH = (2, 11), (2, 15)  # from, below


def check_torch_version(version: str = torch.__version__) -> None:
    """Raise RuntimeError unless `version` is one that the names in this module exist in."""
    (lowest, beyond), found = SUPPORTED_TORCH, _minor_version(version)
    if not lowest <= found < beyond:
        lowest_name, beyond_name = (".".join(map(str, bound)) for bound in (lowest, beyond))
        newer = ", or look for a newer compiled_ddp" if found >= beyond else ""
        raise RuntimeError(
            f"compiled_ddp supports torch >= {lowest_name} and < {beyond_name}, found {version}. Install a supported "
            f"torch, pip install 'torch>={lowest_name},<{beyond_name}'{newer}: it uses private parts of torch, which "
            "other versions may have changed."
        )


def _minor_version(version: str = torch.__version__) -> tuple[int, int]:
    major, minor = (int(part) for part in version.split(".")[:2])
    return major, minor
