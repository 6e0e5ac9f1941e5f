"""Work of torch's and the package's that costs each compilation a tenth and no test looks at, left out.

torch's private names stand here as strings, as do those that ranks are forked with; what a torch lacks is let be.
"""

import importlib
from typing import Any


def spare_work() -> None:
    """In this process, for good."""
    # For a line in a log, each compilation empties the processor's caches and times its guards: 25 ms.
    _replace("torch._dynamo.guards", "profile_guard_manager", lambda *_: 0.0)
    # Each process group that is made lets Dynamo forget what it does with each of torch's functions, which is found
    # again in 20 ms. That is for rules which were asked for while torch was being imported.
    _replace("torch._dynamo.trace_rules", "clear_lru_cache", lambda: None)


def spare_random_numbers() -> None:
    """A million of them, 20 ms, to see what rounding makes of each graph; the tests' have few elements."""
    reference = importlib.import_module("compiled_ddp.graph.reference")
    assert reference._TABLE > 2**12
    reference._TABLE = 2**12 + 7


def _replace(module: str, name: str, function: Any) -> None:
    found = importlib.import_module(module)
    if hasattr(found, name):
        setattr(found, name, function)
