"""Data-parallel training in which the gradients' all-reduces are part of the compiled graph.

    ddp = compile_ddp(model)  # in place of DistributedDataParallel(model) and torch.compile
    ddp(batch).backward()     # .grad is the mean over ranks

`EagerDDP(model)` does the same from gradient hooks and compiles nothing. `functional` differentiates plain functions
and averages over ranks, and compiles whole steps as one graph. `replace_ddp()` makes libraries that wrap models in DDP
use these wrappers. `verify_parity()` trains a copy of a model and compares its gradients with plain autograd, averaged
by hand. `comm_hooks` compress what is sent. The other names are the types of `ddp.plan` and `ddp.explain()`. Start with
docs/quick-start.md.
"""

# The public names stand in `public.py`. They are imported when the first of them is asked for, as torch takes a second
# to be: a command line that prints its help, or refuses its arguments, does without.

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from compiled_ddp.public import *  # noqa: F403
else:
    import importlib
    import importlib.util

    def __getattr__(name: str) -> object:
        """A module of the package, a public name, or `__all__`: what is not there yet."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        public = importlib.import_module(f"{__name__}.public")
        if name not in ("__all__", *public.__all__):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(public, name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({"__version__", "comm_hooks", *__getattr__("__all__")})
