"""Data-parallel training in which the gradients' all-reduces are part of the compiled graph.

    ddp = compile_ddp(model)  # in place of DistributedDataParallel(model) and torch.compile
    ddp(batch).backward()     # .grad is the mean over ranks

`EagerDDP(model)` does the same from hooks, with nothing compiled. `functional` has gradients whose mean over ranks is
part of a function, and whole steps as one graph. `replace_ddp()` lets a library that wraps by itself take these, and
`verify_parity()` trains a model beside torch's DDP and compares. `comm_hooks` are what may reduce in place of an
all-reduce. The other names are of what `ddp.plan` and `ddp.explain()` return. Begin with docs/quick-start.md.
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
