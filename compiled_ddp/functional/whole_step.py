"""`compile_step(model, optimizer)`: forward, backward, all-reduces and the optimizer's update as one compiled graph.

The model and the optimizer stay their owner's. Each call hands their tensors, as they are then, to a functional step,
which writes what becomes of them back into the same memory: so a state dict, a scheduler, an average of weights, an
evaluation, `load_state_dict` and an ordinary loop in between mean what they always mean.

What a graph has fixed is `_Layout`: which parameters are trained, their groups and the groups' switches. Another layout
is another graph, which is kept beside the first.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compiled_ddp import torch_private
from compiled_ddp.environment import check_environment
from compiled_ddp.functional.compiled import Backend, CompiledStep
from compiled_ddp.functional.transforms import grad_and_value
from compiled_ddp.functional.updates import Kind, Rule, Vector, as_vectors, rule_of
from compiled_ddp.keywords import check_switches, suggests_keywords
from compiled_ddp.model.checks import check_model, check_writable, properties_of
from compiled_ddp.model.managed import is_wrapper
from compiled_ddp.options import check_compiler, is_number
from compiled_ddp.ranks.agreement import Description, agree_on_description
from compiled_ddp.ranks.alone import begin_alone
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.torch_private.dynamo import untraced

Loss = Callable[..., Any]


@suggests_keywords
def compile_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Loss | None = None,
    *,
    has_aux: bool = False,
    process_group: dist.ProcessGroup | None = None,
    clip_grad_norm: float | None = None,
    bucket_cap_mb: float | None = None,
    backend: Backend = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> "TrainingStep":
    """Make a function that takes a whole training step as one graph: see `TrainingStep`. A collective.

        step = compile_step(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
        for x, y in batches:
            loss = step(x, y)

    Args:
        model: a bare module. Its parameters and buffers are overwritten with those of the group's rank 0.
        optimizer: torch.optim's SGD, Adam or AdamW. Parameters of the model that it does not have are not trained.
        loss_fn: called as `loss_fn(model, *batch)`, returns this rank's loss; None calls `model(*batch)`.
        has_aux: whether that returns a pair of the loss and anything else, which the step then returns too, detached.
        process_group: the ranks to average over; None is all of them.
        clip_grad_norm: the largest norm of all reduced gradients together, as of `torch.nn.utils.clip_grad_norm_`.
        bucket_cap_mb: size of a bucket in MiB; None plans them (docs/planner.md).
        backend: "inductor", or "aot_eager", which runs the same graph without compiling kernels.
        mode: as in torch.compile; for Inductor.
        options: as in torch.compile; for Inductor.

    Raises TypeError or ValueError for arguments that are not as described, and RuntimeError on every rank where ranks
    have different models or optimizers.
    """
    begin_alone()
    check_environment()
    check_compiler(backend, mode, None)
    check_switches(has_aux=has_aux)
    _check(model, optimizer, loss_fn, clip_grad_norm)
    compiler = functools.partial(
        CompiledStep,
        backend=backend,
        options=torch_private.compiler_options.inductor_options(mode, options, None),
        donated=("params", "buffers", "state", "steps"),
        keeps_donated=True,
    )
    rule = _begun(model, optimizer, RankGroup(process_group))
    whole = _WithLoss(model, loss_fn or _call, has_aux=has_aux)
    return TrainingStep(model, optimizer, _Graph(whole, rule, process_group, clip_grad_norm, bucket_cap_mb), compiler)


def _check(model: object, optimizer: object, loss_fn: object, clip_grad_norm: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile_step takes a model, an nn.Module, found {type(model).__name__}.")
    if is_wrapper(model):
        raise TypeError(
            f"compile_step reduces gradients itself: give it the bare model, `{type(model).__name__}(...).module`."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"compile_step takes an optimizer of torch.optim's, found {type(optimizer).__name__}.")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function (model, *batch), found {type(loss_fn).__name__}.")
    if clip_grad_norm is not None and not (is_number(clip_grad_norm) and clip_grad_norm > 0):
        raise ValueError(f"clip_grad_norm must be a positive number, found {clip_grad_norm!r}.")


@torch.no_grad()
def _begun(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: RankGroup) -> Rule:
    """The optimizer's rule, when ranks have compared what they have, and have the values of the group's first one."""
    rule = rule_of(optimizer)

    def describe() -> Description:
        _, contents = check_model(model, "compile_step")
        check_writable(contents)
        parameters = dict(model.named_parameters())
        _refuse_hooks(parameters, optimizer)
        layout = _Layout.of(parameters, optimizer, rule)
        description: Description = {"optimizer": [type(optimizer).__name__]}
        description |= {
            f"group {number} of the optimizer": [*kind.switches] for number, kind in enumerate(layout.kinds)
        }
        for name, group, parameter in layout.trained(parameters):
            description[f"parameter {name}"] = [f"group {group}", *properties_of(parameter)]
        return description

    agree_on_description(ranks, describe, failure="no step was made")
    tensors = [each.detach() for each in (*model.parameters(), *model.buffers())]
    if ranks.world_size > 1 and tensors:
        torch_private.groups.broadcast_coalesced(ranks.process_group, tensors, source=0)
    return rule


def _refuse_hooks(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for code of the user's that a graph would not run."""
    if torch_private.tensors.any_is_hooked([*parameters.values()]):
        name = next(name for name, each in parameters.items() if torch_private.tensors.any_is_hooked([each]))
        raise ValueError(
            f"parameter {name} has hooks on its gradient, which compile_step does not run: put what they do into the "
            "loss, or train with compile_ddp(model)."
        )
    if torch_private.optimizers.has_hooks(optimizer):
        raise ValueError(
            f"the {type(optimizer).__name__} has hooks on its step(), or another step(), which compile_step does not "
            "run: call what they do behind each step, or train with compile_ddp(model)."
        )


# ---- what a graph has fixed ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """The names of the trained parameters, each with its group, and the kinds of the groups."""

    names: tuple[str, ...]
    groups: tuple[int, ...]
    kinds: tuple[Kind, ...]

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, rule: Rule) -> "_Layout":
        """Of the model's `parameters` as they are now. Raises ValueError where the optimizer has others."""
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        names, groups = list[str](), list[int]()
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if not parameter.requires_grad:
                    continue
                if parameter.is_complex():
                    raise ValueError(
                        f"parameter {place} of group {number} of the optimizer is complex, whose update compile_step "
                        "does not have: train with compile_ddp(model)."
                    )
                if id(parameter) not in name_of:
                    raise ValueError(
                        f"parameter {place} of group {number} of the optimizer, of shape {tuple(parameter.shape)}, is "
                        "none of the model's: make the module that it belongs to a part of the model."
                    )
                names.append(name_of[id(parameter)])
                groups.append(number)
        if not names:
            raise ValueError("the optimizer has no parameter that is trained: check requires_grad.")
        return cls(tuple(names), tuple(groups), tuple(map(rule.kind, optimizer.param_groups)))

    def trained(self, parameters: Mapping[str, nn.Parameter]) -> list[tuple[str, int, nn.Parameter]]:
        """Name, group and parameter of each."""
        return [(name, group, parameters[name]) for name, group in zip(self.names, self.groups, strict=True)]


# ---- the step as a function of tensors -------------------------------------------------------------------------------

Tensors = dict[str, Tensor]


class _WithLoss(nn.Module):
    """The model and its loss as one module, whose tensors `functional_call` replaces."""

    def __init__(self, model: nn.Module, loss_fn: Loss, *, has_aux: bool) -> None:
        super().__init__()
        self.model, self.loss_fn, self.has_aux = model, loss_fn, has_aux

    def forward(self, *batch: Any, **named: Any) -> Any:
        return self.loss_fn(self.model, *batch, **named)


def _call(model: nn.Module, *batch: Any, **named: Any) -> Any:
    return model(*batch, **named)


class _Graph:
    """What is compiled, for a layout."""

    def __init__(
        self,
        whole: _WithLoss,
        rule: Rule,
        process_group: dist.ProcessGroup | None,
        clip_grad_norm: float | None,
        bucket_cap_mb: float | None,
    ) -> None:
        self.rule, self.has_aux, self._clip_grad_norm = rule, whole.has_aux, clip_grad_norm
        users_loss = whole.loss_fn  # so that what it closes over is followed, as of any function of a compiled step

        def loss(params: Tensors, others: Tensors, buffers: Tensors, batch: Any, named: Any) -> Any:
            # A gradient function may not write into what it is given.
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            tensors = {f"model.{name}": each for name, each in {**params, **others, **copies}.items()}
            result = torch.func.functional_call(whole, tensors, batch, named)
            value, aux = result if whole.has_aux else (result, None)
            _refuse_unused(value, params)
            assert users_loss is whole.loss_fn
            # Those that forward has written into, or replaced by others: `functional_call` puts these into `tensors`.
            return value, (aux, {name: tensors[f"model.{name}"].detach() for name in buffers})

        loss.__qualname__ = f"loss of {type(whole.model).__name__}"
        self._gradient = grad_and_value(loss, has_aux=True, process_group=process_group, bucket_cap_mb=bucket_cap_mb)

    def step_of(self, layout: _Layout) -> Callable[..., Any]:
        """A function of tensors, which returns what becomes of those that it is given, in their order."""
        rule, gradient, most = self.rule, self._gradient, self._clip_grad_norm

        def step(
            params: Tensors,
            buffers: Tensors,
            state: dict[str, Tensors],
            others: Tensors,
            steps: Tensor,
            numbers: Sequence[Tensor],
            batch: Any,
            named: Any,
        ) -> Any:
            gradients, (value, (aux, buffers)) = gradient(params, others, buffers, batch, named)
            if most is not None:
                gradients = _clipped(gradients, most)
            counts = steps + 1
            new, new_state = dict[str, Tensor](), dict[str, Tensors]()
            for place, (name, group) in enumerate(zip(layout.names, layout.groups, strict=True)):
                kind = layout.kinds[group]
                of_group = Vector(kind, numbers[group])
                # In 16 bits a learning rate or a beta would be another number.
                own = {each: _widened(value) for each, value in state[name].items()}
                given = _widened(params[name]), _widened(gradients[name]), own
                new[name], new_state[name] = rule.update(*given, of_group, kind, counts[place])
            return new, buffers, new_state, counts, value, aux

        return step


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _clipped(gradients: Tensors, most: float) -> Tensors:
    """As torch.nn.utils.clip_grad_norm_ leaves them."""
    norms = [torch.linalg.vector_norm(_widened(each)) for each in gradients.values()]
    norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device, torch.float64) for each in norms]))
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    return {name: each * factor.to(each.device, each.dtype) for name, each in gradients.items()}


def _refuse_unused(loss: object, params: Tensors) -> None:
    """Raise RuntimeError for parameters without a way to the loss, whose update would be another one than torch's."""
    if not isinstance(loss, Tensor):
        return
    unused = torch_private.autograd.not_reached(loss, params)
    if unused:
        raise RuntimeError(
            f"the loss does not use {', '.join(unused[:5])}: torch.optim leaves such a parameter as it is, where a "
            "graph would apply weight decay and momentum. Freeze it with requires_grad_(False), or train with "
            "compile_ddp(model)."
        )


# ---- what users call -------------------------------------------------------------------------------------------------


class TrainingStep:
    """Made by `compile_step`: `loss = step(x, y)` does what this loop does under DDP, in one graph.

        loss = loss_fn(model, x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    Parameters, buffers and the optimizer's state are updated in place, in the user's own objects, which mean before,
    between and after steps what they always mean; `.grad` stays None. Learning rate, betas, momentum and weight decay
    may change between any two calls. Every rank calls it equally often.

    Where a rank raises, all do, and nothing has been updated on any. Raises RuntimeError, too, for a model that no
    single graph can hold, with the place, and for parameters that the loss does not use.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        graph: _Graph,
        compiler: Callable[..., CompiledStep],
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._graph, self._compiler = graph, compiler
        self._known: dict[_Layout, list[_Known]] = {}
        self._latest: CompiledStep | None = None

    @untraced
    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Take a step with this batch; returns this rank's loss, detached, and with `has_aux` a pair."""
        with contextlib.nullcontext() if self._latest is None else self._latest.telling():
            parameters = dict(self.model.named_parameters())
            _refuse_hooks(parameters, self.optimizer)
            layout = _Layout.of(parameters, self.optimizer, self._graph.rule)
            known = self._known_of(layout)
            trained = layout.trained(parameters)
            params: Tensors = {name: parameter for name, _, parameter in trained}
            others: Tensors = {name: each for name, each in parameters.items() if name not in params}
            buffers = dict(self.model.named_buffers())
            state, steps = self._state(trained, layout)
            counts = _as_vector(steps) if steps else torch.zeros(len(trained), dtype=torch.float64, device="cpu")
            numbers = as_vectors(self._graph.rule, self.optimizer.param_groups)
        self._latest = known.compiled
        *_, value, aux = known.compiled(params, buffers, state, others, counts, numbers, batch, named)
        known.note_traced(self.model)
        torch_private.optimizers.note_step(self.optimizer, steps, counts)
        return (value, aux) if self._graph.has_aux else value

    def _known_of(self, layout: _Layout) -> "_Known":
        """What is compiled for this layout, and for the numbers and texts that the model's modules have."""
        plain = _plain(self.model)
        every = self._known.setdefault(layout, [])
        known = next((each for each in every if each.plain == plain), None)
        if known is None:
            known = _Known(self._compiler(self._graph.step_of(layout)), plain)
            every.append(known)
        return known

    def _state(
        self, trained: Sequence[tuple[str, int, nn.Parameter]], layout: _Layout
    ) -> tuple[dict[str, Tensors], list[Tensor]]:
        """The optimizer's state of each parameter, and their counts of steps, where it has these."""
        rule, states, steps = self._graph.rule, dict[str, Tensors](), list[Tensor]()
        for name, group, parameter in trained:
            needed = rule.needed(layout.kinds[group])
            own: dict[str, Any] = self.optimizer.state.get(parameter, {})  # which makes no entry, as torch makes none
            missing = [each for each in needed if own.get(each) is None]
            if missing:
                own, options = self.optimizer.state[parameter], self.optimizer.param_groups[group]
                own.update((each, rule.begin(each, parameter, options)) for each in missing)
            states[name] = {each: own[each] for each in needed if each != "step"}
            if "step" in needed:
                if not isinstance(own["step"], Tensor):  # a number in old checkpoints
                    own["step"] = torch.tensor(float(own["step"]), dtype=torch.float32, device="cpu")
                steps.append(own["step"])
        return states, steps


class _Known:
    """A step that was compiled, while the model's modules had these numbers and texts."""

    def __init__(self, compiled: CompiledStep, plain: tuple[Hashable, ...]) -> None:
        self.compiled, self.plain = compiled, plain
        self._graphs = 0

    def note_traced(self, model: nn.Module) -> None:
        """A forward may count its own calls: what it does in Python happens while it is traced, and not again."""
        if self.compiled.graphs != self._graphs:
            self._graphs, self.plain = self.compiled.graphs, _plain(model)


_PLAIN = frozenset({int, float, bool, str, type(None)})


def _plain(model: nn.Module) -> tuple[Hashable, ...]:
    """What a graph has fixed of the attributes that a forward may read: numbers and texts of all modules."""
    return tuple(value for module in model.modules() for value in vars(module).values() if type(value) in _PLAIN)


def _as_vector(steps: Sequence[Tensor]) -> Tensor:
    """Counts of steps, float64, on the device of the first one."""
    return torch.stack([each.to(steps[0].device) for each in steps]).double()
