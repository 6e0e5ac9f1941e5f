"""Every public argument with values of a wrong kind: refused by its name, with what was found, on every rank alike."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, assert_step, row_batch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from compiled_ddp import EagerDDP, compile_ddp
from compiled_ddp import functional as ddp
from compiled_ddp.compat import apex, bert
from compiled_ddp.integrations import torch as subclasses
from compiled_ddp.wrapping.ddp_arguments import DDPKeywords
from ranks import RankPool

ANYTHING = None  # an argument without effect takes anything, as under torch's DDP and in apex

NO_SWITCH = ("no", 2, [True], torch.ones(2))
NO_SIZE = ("25", True, [25], math.nan, -1, torch.ones(2))
NO_DEVICE = ("nowhere", 1.5, True, -1, [0], torch.ones(2))
NO_TEXT = ("x", 3, True, ["first"], torch.ones(2))
NO_GROUP = ("gloo", 0, [0, 1], torch.ones(2))

WRONG_FOR_DDP: dict[str, Sequence[Any] | None] = {
    "device_ids": ("cpu", 0, 1.5, [None], ["nowhere"], [True], [1.5], {0}),
    "output_device": NO_DEVICE,
    "dim": ANYTHING,
    "process_group": NO_GROUP,
    "device_mesh": ("x", 0, (2,), torch.ones(2)),
    "find_unused_parameters": ANYTHING,
    "check_reduction": ANYTHING,
    "batched_grad_copy": ANYTHING,
    "lazy_bucket_allocation": ANYTHING,
    "skip_all_reduce_unused_params": ANYTHING,
    "delay_all_reduce_named_params": ("head.weight", 3),
    "param_to_hook_all_reduce": ("head.weight", 3),
    "mixed_precision": ("bf16", True),
    "bucket_cap_mb": (*NO_SIZE, 0),
    "first_bucket_mb": (*NO_SIZE, 0),
    "bucket_cap_mb_list": ("25", 25, True, b"25", ["25"], [True], [0], 0, torch.ones(2)),
    "calibration": ("link.json", 25, {"link": 1}),
    "embedding_rows": ("yes", 1, 0, [True]),
    "plan": ("plan.json", 25, {"buckets": []}),
    "broadcast_buffers": NO_SWITCH,
    "forward_sync_buffers": NO_SWITCH,
    "init_sync": (*NO_SWITCH, None),
    "static_graph": (*NO_SWITCH, None),
    "gradient_as_bucket_view": (*NO_SWITCH, None),
    "keep_buffers": (*NO_SWITCH, None),
    "reduction": (*NO_TEXT, None),
    "piggyback": ("loss", 3, [3], ["loss", "loss"], torch.ones(2)),
    "comm_hook": ("fp16", 3, True, [1]),
    "check_steps": (*NO_TEXT, None),
    "verify": (*NO_TEXT, None),
}
WRONG_FOR_COMPILER: dict[str, Sequence[Any] | None] = {
    "strict": (*NO_SWITCH, None),
    "smallest_graph_mb": (*NO_SIZE, None),
    "warmup_chooses": (*NO_SWITCH, None),
    "compile_once": (*NO_SWITCH, None),
    "backend": (*NO_TEXT, None),
    "fullgraph": (*NO_SWITCH, None),
    "dynamic": NO_SWITCH,
    "mode": NO_TEXT,
    "options": ("x", [1], 3, True, {1: 2}, torch.ones(2)),
}
WRONG_FOR_APEX: dict[str, Sequence[Any] | None] = {
    "message_size": ("1", True, None, [1], math.nan, torch.ones(2)),
    "delay_allreduce": (*NO_SWITCH, None),
    "shared_param": (True, 1),
    "allreduce_trigger_params": ("x", 3, [3], torch.tensor(1.0)),
    "retain_allreduce_buffers": (*NO_SWITCH, None),
    "allreduce_always_fp32": (*NO_SWITCH, None),
    "num_allreduce_streams": ("1", True, None, 0, [1], torch.ones(2)),
    "allreduce_communicators": ("x", [1]),
    "gradient_average": (*NO_SWITCH, None),
    "gradient_predivide_factor": ("1", True, None, 0, math.inf, torch.ones(2)),
    "gradient_average_split_factor": (1, "x"),
    "prof": ANYTHING,
    **{name: WRONG_FOR_DDP[name] for name in ("process_group", "check_steps", "verify")},
}
WRONG_FOR_ALL = WRONG_FOR_DDP | WRONG_FOR_COMPILER
# Whose messages do not quote what was passed: nothing at all may be.
REFUSED_AS_SUCH = (
    *("mixed_precision", "param_to_hook_all_reduce", "shared_param", "gradient_average_split_factor"),
    *("allreduce_trigger_params", "allreduce_communicators", "delay_all_reduce_named_params"),
)

WRAPPERS: dict[str, tuple[Callable[..., nn.Module], dict[str, Sequence[Any] | None]]] = {
    "EagerDDP": (EagerDDP, WRONG_FOR_DDP),
    "compile_ddp": (compile_ddp, WRONG_FOR_ALL),
    "the subclass of torch's": (subclasses.DistributedDataParallel, WRONG_FOR_ALL),
    "the eager one": (subclasses.EagerDistributedDataParallel, WRONG_FOR_DDP),
    "apex": (apex.DistributedDataParallel, WRONG_FOR_APEX),
    "apex of BERT": (bert.DistributedDataParallel, WRONG_FOR_APEX),
}


def raised_by(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return error
    return None


def assert_refused(call: Callable[..., Any], name: str, value: Any, *, quotes: str = "") -> None:
    """It raises a TypeError or ValueError that names the argument, or, on a rank that was told, one that quotes it."""
    case, error = f"{name}={value!r}", raised_by(lambda: call(**{name: value}))
    message = str(error)
    assert error is not None, f"{case} was taken"
    assert isinstance(error, TypeError | ValueError) != bool(quotes), f"{case}: {error!r}"
    assert name in message and quotes in message, f"{case}: {error!r}"
    is_quoted = any(repr(part) in message for part in (value, *_parts(value)))
    assert is_quoted or name in REFUSED_AS_SUCH, f"{case}: {error!r}"


def _parts(value: Any) -> Sequence[Any]:
    return [*value] if isinstance(value, list | dict) else []


def _wrong_for_wrappers(rank: int, kind: str) -> None:
    """On both ranks, then on one alone, which all the others are told of; the model can be wrapped afterwards."""
    construct, wrong = WRAPPERS[kind]
    model = Mlp()
    taken = inspect.signature(construct).parameters.keys()
    for name, values in wrong.items():
        if name not in taken and name not in DDPKeywords.__annotations__:
            continue
        for value in values or ():
            assert_refused(lambda **given: construct(model, **given), name, value)
        for value in (values or ())[:1]:
            given = value if rank == 1 else inspect.Parameter.empty
            quotes = "" if rank == 1 else "\n- rank 1: "

            def call(**arguments: Any) -> None:
                construct(model, **(arguments if given is not inspect.Parameter.empty else {}))  # noqa: B023

            assert_refused(call, name, value, quotes=quotes)
    if "apex" not in kind:
        assert_step(EagerDDP(model), lambda module: module(row_batch(rank)).square().sum())


@pytest.mark.parametrize("kind", WRAPPERS)
def test_each_argument_of_a_wrapper_is_refused_by_name_on_every_rank(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_wrong_for_wrappers, kind)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_table_has_every_argument_of_a_wrapper(kind: str) -> None:
    construct, wrong = WRAPPERS[kind]
    parameters = inspect.signature(construct).parameters.values()
    names = {each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    assert names - {"model", "module"} <= wrong.keys()
    if wrong is not WRONG_FOR_APEX:
        assert wrong.keys() >= DDPKeywords.__annotations__.keys()


# ---- functional ------------------------------------------------------------------------------------------------------


def loss(params: Tensor, x: Tensor) -> Tensor:
    return (params * x).sum()


WRONG_FOR_GRADIENTS: dict[str, Sequence[Any] | None] = {
    "f": ("x", 3, None),
    "argnums": ("x", None, True, 1.5, [0], (), (0, "x"), (0, True), torch.ones(2)),
    "has_aux": (*NO_SWITCH, None),
    "process_group": NO_GROUP,
    "reduction": (*NO_TEXT, None),
    "bucket_cap_mb": NO_SIZE,
    "reduce_value": (*NO_SWITCH, None),
}
FUNCTIONS: dict[Callable[..., Any], tuple[dict[str, Any], dict[str, Sequence[Any] | None]]] = {
    ddp.grad: ({"f": loss}, WRONG_FOR_GRADIENTS),
    ddp.grad_and_value: ({"f": loss}, WRONG_FOR_GRADIENTS),
    ddp.compile: (
        {"step": loss},
        {
            "step": ("x", 3),  # without one it is a decorator
            "donate": (None, True, 1.5, b"x", [None], [True], {"x": 1}, torch.ones(2)),
            **{name: WRONG_FOR_COMPILER[name] for name in ("backend", "mode", "options", "fullgraph", "dynamic")},
        },
    ),
    ddp.overlap: (
        {"graph_module": symbolic_trace(lambda x: x)},
        {"graph_module": ("x", None, nn.Linear(2, 2), loss), "in_place": (*NO_SWITCH, None)},
    ),
    ddp.all_reduce: ({"x": torch.ones(2)}, {"x": (None, 1.0, [torch.ones(2)], "x"), "op": ("avg", None, 3, ["mean"])}),
    ddp.all_gather: ({"x": torch.ones(2)}, {"x": (None, 1.0, [torch.ones(2)], "x")}),
    ddp.broadcast: ({"tree": torch.ones(2)}, {"tree": ANYTHING, "src": (None, "0", True, 1.0, -1, 2, [0])}),
    ddp.fold_in_rank: ({}, {"generator": (None, 3, "x", torch.ones(2))}),
}


def _wrong_for_functions() -> None:
    for function, (right, wrong) in FUNCTIONS.items():
        assert inspect.signature(function).parameters.keys() <= wrong.keys(), function
        for name, values in wrong.items():
            for value in values if values and name in inspect.signature(function).parameters else ():
                case = f"{function.__name__}({name}={value!r})"
                error = raised_by(lambda: function(**right | {name: value}))  # noqa: B023
                assert isinstance(error, TypeError | ValueError), f"{case}: {error!r}"
                expected = type(value).__name__ if name in ("f", "step") else repr(value)
                is_quoted = any(text in str(error) for text in (expected, *map(repr, _parts(value))))
                assert name in str(error) and is_quoted, f"{case}: {error!r}"


def _wrong_for_functional(rank: int) -> None:
    """With ranks: before any communication, and what only one rank is given is told to those that wait for it."""
    _wrong_for_functions()
    with pytest.raises(TypeError, match=r"process_group must be a ProcessGroup.*found 'gloo'"):
        ddp.Communicator("gloo")  # type: ignore[arg-type]
    for _ in range(2):
        for call, name in (
            (lambda is_right: ddp.all_reduce(torch.ones(2) if is_right else None), "all_reduce takes a tensor, x"),
            (lambda is_right: ddp.all_reduce(torch.ones(2), "sum" if is_right else "avg"), "op must be"),
            (lambda is_right: ddp.all_gather(torch.ones(2) if is_right else [1]), "all_gather takes a tensor, x"),
            (lambda is_right: ddp.broadcast(torch.ones(2), src=0 if is_right else "0"), "src must be a rank below 2"),
        ):
            with pytest.raises((TypeError, ValueError) if rank == 1 else RuntimeError, match=name):
                call(rank == 0)
        torch.testing.assert_close(ddp.all_reduce(torch.ones(2) * rank, "sum"), torch.ones(2))
    gradient = ddp.grad(loss, (0, 1) if rank == 0 else (0, 2))
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match=r"argnums=\(0, 2\) of grad\(loss\) names arg"):
        gradient(torch.ones(2), torch.ones(2))
    scale = torch.ones(2).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"cannot take the gradient of argument 0\['b'\], of torch.float8_e4m3fn"):
        ddp.grad(lambda p, x: (p["b"].float() * x).sum())({"a": torch.ones(2), "b": scale}, torch.ones(2))


def test_each_argument_of_functional_is_refused_by_name(ranks2: RankPool) -> None:
    _wrong_for_functions()  # without torch.distributed too
    ranks2.run(_wrong_for_functional)


# ---- parameters ------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """`Mlp` on inputs times its own parameter, or buffer, of any kind."""

    def __init__(self, scale: Tensor, *, is_buffer: bool = False, is_trained: bool = False) -> None:
        super().__init__()
        self.mlp = Mlp()
        if is_buffer:
            self.register_buffer("scale", scale)
        else:
            self.scale = nn.Parameter(scale, requires_grad=is_trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x * self.scale.float())


def _kinds_of_parameters(rank: int) -> None:
    def wraps(model: nn.Module) -> list[Callable[[], nn.Module]]:
        return [lambda: EagerDDP(model), lambda: compile_ddp(model, backend="aot_eager")]

    with torch.inference_mode():
        in_inference_mode = nn.Parameter(torch.ones(5))
    refused: dict[str, nn.Module] = {"parameter scale was made in torch.inference_mode": Scaled(torch.ones(5))}
    next(iter(refused.values())).scale = in_inference_mode
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        refused[f"parameter scale is of {dtype}, in which no"] = Scaled(torch.ones(5).to(dtype), is_trained=True)
    quantised = torch.quantize_per_tensor(torch.ones(5), 1.0, 0, torch.quint8)
    refused["buffer scale is quantised"] = Scaled(quantised, is_buffer=True)
    for message, model in refused.items():
        for wrap in wraps(model):
            with pytest.raises(ValueError, match=message):
                wrap()
    ignored = Scaled(quantised, is_buffer=True)
    ignored._ddp_params_and_buffers_to_ignore = ["scale"]
    for wrap in wraps(ignored):
        wrap().unwrap()
    assert ignored.scale.is_quantized and dist.get_world_size() == 2
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16, torch.uint32, torch.uint64):
        for is_buffer in (True, False) if dtype.is_floating_point else (True,):
            model = Scaled(torch.full((5,), 2.0 - rank).to(dtype), is_buffer=is_buffer)
            x = row_batch(rank)
            wrapper = EagerDDP(model)
            unused = () if is_buffer else ("scale",)
            assert_step(wrapper, lambda module: module(x).square().sum(), unused=unused)  # noqa: B023
            assert model.scale.float().eq(2.0).all(), dtype  # rank 0's
            wrapper.unwrap()


def test_what_cannot_be_trained_is_refused_by_name_and_frozen_parameters_and_buffers_may_be_of_any_dtype(
    ranks2: RankPool,
) -> None:
    ranks2.run(_kinds_of_parameters)
