"""The options of both wrappers: their keywords, their defaults, and the checks of their values.

A new option is a keyword and a field here, what it does where it acts, and its line in the constructors' docstrings.
"""

import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, TypeGuard, TypeVar, get_type_hints

from compiled_ddp import torch_private
from compiled_ddp.comm_hooks import CommHook
from compiled_ddp.errors import OptionError, WrongKindError
from compiled_ddp.plan import ReductionKind
from compiled_ddp.planning.assignment import BucketPolicy
from compiled_ddp.planning.bucket_rule import BucketRule
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.planners import MEBIBYTE, OptimalBuckets, Planner, SizedBuckets
from compiled_ddp.planning.saved_plan import SavedPlan
from compiled_ddp.reducers.averaging import Scaling

Mode = Literal["graph", "hooks"]
Function = TypeVar("Function", bound=Callable[..., object])

Backend = Literal["inductor", "aot_eager"]
Verify = Literal["first", "always", "off"]
CheckSteps = Literal["error", "warn", "off"]


class OptionKeywords(TypedDict, total=False):
    """The keyword arguments of EagerDDP and compile_ddp that are options; defaults are those of `Options`."""

    bucket_cap_mb: float | None
    first_bucket_mb: float | None
    bucket_cap_mb_list: Sequence[float] | None
    calibration: Calibration | None
    plan: SavedPlan | None
    embedding_rows: bool | None
    broadcast_buffers: bool | None  # None is the default, as in DDP
    forward_sync_buffers: bool | None
    init_sync: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    keep_buffers: bool
    reduction: ReductionKind
    piggyback: Sequence[str]
    comm_hook: CommHook | None
    check_steps: CheckSteps
    verify: Verify


class CompilerKeywords(OptionKeywords, total=False):
    """Options of `compile_ddp`: those of both wrappers, and those that concern graphs."""

    strict: bool
    smallest_graph_mb: float
    warmup_chooses: bool
    compile_once: bool
    backend: Backend
    fullgraph: bool
    dynamic: bool | None
    mode: str | None
    options: dict[str, Any] | None


def takes_options(keywords: type[OptionKeywords]) -> Callable[[Function], Function]:
    """Write the options that a function takes in its last argument, `**others`, into its signature, with defaults.

    For help() and whatever else asks at run time; editors and type checkers read the TypedDict.
    """

    def write_out(function: Function) -> Function:
        signature = inspect.signature(function)
        *others, rest = signature.parameters.values()
        defaults = {field.name: field.default for field in fields(Options)}
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
            for name, annotation in get_type_hints(keywords).items()
        ]
        parameters = [*others, *options, rest.replace(annotation=inspect.Parameter.empty)]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return write_out


def part_options(keywords: Mapping[str, Any], known: type[OptionKeywords]) -> tuple["Options", Any]:
    """The options among a constructor's keywords, and its other keywords."""
    options = {name: value for name, value in keywords.items() if name in known.__annotations__}
    others = {name: value for name, value in keywords.items() if name not in options}
    if options.get("broadcast_buffers", True) is None:
        del options["broadcast_buffers"]
    return Options(**options), others


@dataclass(frozen=True)
class BucketOptions:
    """How large buckets are, in MiB as DDP's. Without a size they are planned for the link and the device."""

    bucket_cap_mb: float | None = None
    first_bucket_mb: float | None = None
    bucket_cap_mb_list: Sequence[float] | None = None
    calibration: Calibration | None = None  # measured before anything is planned, where it is needed
    plan: SavedPlan | None = None
    embedding_rows: bool | None = None  # None: where a calibration says that it may pay
    bucket_rule: BucketRule | None = None  # in place of sizes in bytes: of the adapters in compiled_ddp.compat alone

    def _check_buckets(self) -> None:
        if self.bucket_cap_mb_list is not None and not _is_listed(self.bucket_cap_mb_list):
            raise WrongKindError(f"bucket_cap_mb_list must be a list of sizes, found {self.bucket_cap_mb_list!r}.")
        given = {"first_bucket_mb": self.first_bucket_mb, "bucket_cap_mb": self.bucket_cap_mb}
        sizes = [(name, size) for name, size in given.items() if size is not None]
        sizes += [("each of bucket_cap_mb_list", size) for size in self.bucket_cap_mb_list or ()]
        for name, size in sizes:
            if not (is_number(size) and size > 0):
                raise ValueError(f"{name} must be a positive number of MiB, found {size!r}.")
        check_plan(self.plan)
        if self.plan is not None and self.bucket_cap_mb_list:
            raise ValueError("plan= and bucket_cap_mb_list= are alternatives: pass one of them.")
        if not isinstance(self.calibration, Calibration | None):
            raise WrongKindError(
                f"calibration must be what compiled_ddp.calibrate() returns, or Calibration.load(path), found "
                f"{self.calibration!r}."
            )


@dataclass(frozen=True)
class CompilerOptions:
    """How graphs are compiled, and whether hooks may replace them. `EagerDDP` has none of these options."""

    strict: bool = False
    smallest_graph_mb: float = 0.5  # what it does: compiled_ddp/planning/small_graphs.py
    warmup_chooses: bool = True
    compile_once: bool = True  # how: compiled_ddp/graph/compile_once.py
    backend: Backend = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str | None = None
    options: dict[str, Any] | None = None

    def _check_compiler(self) -> None:
        if not (is_number(self.smallest_graph_mb) and self.smallest_graph_mb >= 0):
            raise ValueError(f"smallest_graph_mb must be a number of MiB, 0 or more, found {self.smallest_graph_mb!r}.")
        if not isinstance(self.options, dict | None):
            raise ValueError(f"options must be a dict, as in torch.compile, found {self.options!r}.")
        check_compiler(self.backend, self.mode, self.dynamic)
        if self.mode is not None and self.options is not None:
            raise ValueError("mode and options are alternatives, as in torch.compile: pass one of them.")
        self.inductor_options()  # refuses what is unknown

    @property
    def naive(self) -> bool:
        """True with `options={NAIVE: True}`: graphs keep the reference program, one all-reduce per gradient."""
        return bool((self.options or {}).get(NAIVE))

    @functools.cached_property  # asked for each call of each step
    def smallest_graph_bytes(self) -> float:
        """Below this hooks reduce a graph that is one of several; 0 in the reference program, where all are equal."""
        return 0.0 if self.naive else self.smallest_graph_mb * MEBIBYTE

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """`options` without our own keys: Inductor's."""
        return self.options and {key: value for key, value in self.options.items() if key != NAIVE}

    def inductor_options(self) -> dict[str, Any]:
        """Inductor's settings for `mode` and `options`. Raises ValueError for names that Inductor does not have."""
        return torch_private.compiler_options.inductor_options(self.mode, self.compiler_options, self.dynamic)


@dataclass(frozen=True)
class Options(CompilerOptions, BucketOptions):
    """The options that a wrapper was made with, checked."""

    broadcast_buffers: bool = True
    forward_sync_buffers: bool | None = None
    init_sync: bool = True
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    keep_buffers: bool = True
    reduction: ReductionKind = "mean"
    piggyback: Sequence[str] = ()
    comm_hook: CommHook | None = None
    check_steps: CheckSteps = "error"
    verify: Verify = "first"
    # Of the adapters in compiled_ddp.compat alone, where hooks reduce everything.
    scaling: Scaling | None = None  # in place of the mean
    follows_model: bool = False  # take what was replaced, removed or frozen in the model, and find the buckets anew

    def check(self) -> None:
        """Raise ValueError, naming the allowed values, for one that is not allowed."""
        self._check_buckets()
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, found {getattr(self, name)!r}.")
        if not isinstance(self.forward_sync_buffers, bool | None):
            raise ValueError(f"forward_sync_buffers must be True, False or None, found {self.forward_sync_buffers!r}.")
        if self.reduction not in ("mean", "sum", "weighted"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'weighted', found {self.reduction!r}.")
        if self.comm_hook is not None and self.reduction != "mean":
            raise ValueError(f'a comm_hook returns the mean over ranks; leave out reduction="{self.reduction}".')
        check_embedding_rows(self.embedding_rows)
        if self.embedding_rows and (self.comm_hook is not None or self.naive):
            raise ValueError("a comm_hook reduces whole gradients: leave out embedding_rows=True.")
        check_comm_hook(self.comm_hook)
        names = self.piggyback
        if not _is_listed(names) or not all(isinstance(n, str) for n in names) or len(set(names)) != len(names):
            raise ValueError(f"piggyback must be a sequence of different names, found {self.piggyback!r}.")
        if self.check_steps not in ("error", "warn", "off"):
            raise ValueError(f"check_steps must be 'error', 'warn' or 'off', found {self.check_steps!r}.")
        if self.verify not in ("first", "always", "off"):
            raise ValueError(f"verify must be 'first', 'always' or 'off', found {self.verify!r}.")
        self._check_compiler()

    @property
    def bucket_capacities_bytes(self) -> tuple[float, ...]:
        """The capacity of each bucket in order; the last one is that of all further ones too. Empty without sizes."""
        if self.naive:
            return (0.0,)
        if self.bucket_cap_mb_list:
            return tuple(size * MEBIBYTE for size in self.bucket_cap_mb_list)
        if self.bucket_cap_mb is None:
            return ()
        first = _FIRST_BUCKET_MB if self.first_bucket_mb is None else self.first_bucket_mb
        return min(first, self.bucket_cap_mb) * MEBIBYTE, self.bucket_cap_mb * MEBIBYTE

    @property
    def largest_bucket_bytes(self) -> float:
        """The capacity of further buckets than those that have one of their own; infinite without sizes."""
        return self.bucket_capacities_bytes[-1] if self.bucket_capacities_bytes else math.inf

    @property
    def needs_calibration(self) -> bool:
        """Whether buckets are planned for a link that is not known yet."""
        given = self.bucket_rule, self.plan, self.calibration
        return not self.bucket_capacities_bytes and all(each is None for each in given)

    @functools.cached_property
    def planner(self) -> Planner:
        """What fills the buckets of a wrapper with these options."""
        if self.bucket_rule is not None:
            return self.bucket_rule
        if self.plan is not None and not self.naive:
            return self.plan
        if self.bucket_capacities_bytes:
            return SizedBuckets(self.bucket_capacities_bytes)
        assert self.calibration is not None, "the link has not been measured"
        first = None if self.first_bucket_mb is None else self.first_bucket_mb * MEBIBYTE
        return OptimalBuckets.of(self.calibration, first)

    @property
    def may_send_rows(self) -> bool:
        """Whether any embedding's gradient may be summed by those rows that are not zero."""
        takes_whole = self.planned_reduction == "hook" or self.scaling is not None or self.bucket_rule is not None
        return self.embedding_rows is not False and not self.naive and not takes_whole

    def sends_rows(self, name: str, rows: int, nbytes: int) -> bool:
        """Whether the gradient of the embedding with this name, of so many rows and bytes, is."""
        if not self.may_send_rows or self.embedding_rows is not None:
            return bool(self.may_send_rows)
        return self.planner.sends_rows(name, rows, nbytes)

    def bucket_policy(self, world_size: int) -> BucketPolicy:
        """What all plans of a wrapper with these options have in common."""
        return BucketPolicy(self.planner, world_size, self.planned_reduction, len(self.piggyback))

    @property
    def planned_reduction(self) -> ReductionKind:
        """How the ranks' gradients are reduced, as plans name it."""
        return self.reduction if self.comm_hook is None else "hook"

    @property
    def synchronise_buffers_at_init(self) -> bool:
        """DDP's rule: `forward_sync_buffers` leaves the synchronisation at construction alone."""
        return self.forward_sync_buffers is not None or self.broadcast_buffers

    @functools.cached_property
    def synchronise_buffers_in_forward(self) -> bool:
        return self.broadcast_buffers if self.forward_sync_buffers is None else self.forward_sync_buffers

    def shared(self) -> dict[str, object]:
        """The options that must be equal on every rank, in a form that can be compared."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.options is not None:
            values["options"] = dict(sorted(self.options.items()))
        return {name: _ADDRESS.sub("", repr(value)) for name, value in values.items()}


_FIRST_BUCKET_MB = 1.0  # where a bucket_cap_mb is given: DDP's, which decides how soon communication starts

_SWITCHES = (
    *("broadcast_buffers", "init_sync", "static_graph", "gradient_as_bucket_view", "keep_buffers"),
    *("strict", "fullgraph", "warmup_chooses", "compile_once"),
)


def check_plan(plan: object) -> None:
    """Raise WrongKindError for what is neither a saved plan nor None."""
    if not isinstance(plan, SavedPlan | None):
        raise WrongKindError(f"plan must be a SavedPlan, as SavedPlan.load(path) returns, found {plan!r}.")


def check_embedding_rows(wanted: object) -> None:
    """Raise ValueError for what is neither True nor False nor None."""
    if not isinstance(wanted, bool | None):
        raise ValueError(f"embedding_rows must be True, False or None, found {wanted!r}.")


def check_comm_hook(hook: object) -> None:
    """Raise TypeError for what is neither None nor can be called."""
    if hook is not None and not callable(hook):
        raise TypeError(f"comm_hook must be a function (gradients, ranks), found {hook!r}.")


def check_compiler(backend: object, mode: object, dynamic: object) -> None:
    """Raise ValueError, naming the allowed values, for one that is not allowed."""
    if backend not in ("inductor", "aot_eager"):
        raise ValueError(f"backend must be 'inductor' or 'aot_eager', found {backend!r}.")
    if not isinstance(dynamic, bool | None):
        raise ValueError(f"dynamic must be True, False or None, as in torch.compile, found {dynamic!r}.")
    modes = torch_private.compiler_options.modes() if mode is not None else ()
    if mode is not None and not (isinstance(mode, str) and mode in modes):
        raise OptionError(f"mode must be one of {', '.join(modes)}, as in torch.compile, or None, found {mode!r}.")


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_listed(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


NAIVE = "compiled_ddp.naive"

# In the repr of an object, for example of a pass among Inductor's options: another one in every process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def mode_from_environment() -> Mode:
    """`COMPILED_DDP_MODE`: "graph" (the default) or "hooks", which switches the passes off without a code change.

    Raises ValueError for anything else.
    """
    mode = os.environ.get("COMPILED_DDP_MODE", "graph")
    if mode not in ("graph", "hooks"):
        raise ValueError(f"COMPILED_DDP_MODE must be 'graph' or 'hooks', found {mode!r}.")
    return mode  # type: ignore[return-value]
