"""Gradients of plain functions, reduced over ranks: torch.func's grad and grad_and_value."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.formatting import format_names
from compiled_ddp.functional.around_sum import AroundSum
from compiled_ddp.functional.communicator import Communicator
from compiled_ddp.functional.donations import donations
from compiled_ddp.functional.on_buckets import NOTHING_KEPT, Kept, OnBuckets
from compiled_ddp.functional.reduction import GradientReduction, Kind, Options
from compiled_ddp.functional.session import LossCall, calling_loss
from compiled_ddp.keywords import check_switches, suggests_keywords
from compiled_ddp.reducers.weights import weight_in_trace
from compiled_ddp.torch_private.dynamo import untraced
from compiled_ddp.users_code import warn_user

# ---- what gradients are taken of, by name, and which have none that can be reduced -----------------------------------


def named_tensors(args: Sequence[Any], argnums: int | tuple[int, ...], function: str) -> dict[str, Tensor]:
    """The leaves of these arguments. Raises ValueError where there are none, or one is no tensor of numbers."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    found = {
        f"argument {number}{path}": leaf
        for number in numbers
        if -len(args) <= number < len(args)
        for path, leaf in torch_private.trees.named_leaves(args[number])
    }
    if not found:
        raise ValueError(
            f"{function} finds no tensor in argument {argnums} to take gradients of, among {len(args)} that are passed "
            "by position."
        )
    beyond = [number for number in numbers if not -len(args) <= number < len(args)]
    if beyond:
        raise ValueError(
            f"argnums={argnums} of {function} names argument {beyond[0]}, and {len(args)} are passed by position."
        )
    for name, leaf in found.items():
        is_tensor = isinstance(leaf, Tensor)
        if not is_tensor or not (leaf.is_floating_point() or leaf.is_complex()) or leaf.dtype.itemsize == 1:  # float8
            kind = leaf.dtype if is_tensor else type(leaf).__name__
            raise ValueError(
                f"{function} cannot take the gradient of {name}, of {kind}: pass what is not trained as "
                "another argument."
            )
    return found


def refuse_sparse(names: Sequence[str], gradients: Sequence[Tensor], function: str) -> None:
    """Raise ValueError for gradients that no bucket can hold."""
    sparse = [name for name, gradient in zip(names, gradients, strict=True) if gradient.layout != torch.strided]
    if sparse:
        raise ValueError(
            f"{function} does not reduce sparse gradients, as those of {format_names(sparse)} are: leave out "
            "sparse=True."
        )


# ---- transforms ------------------------------------------------------------------------------------------------------

Argnums = int | tuple[int, ...]

_WHY_UNTRACED = (
    "a reduction tells the other ranks of this one, and hears of them, before and after each run, which no graph of "
    "torch.compile can hold. Compile the step with compiled_ddp.functional.compile(step), which makes one graph of it, "
    "or leave out fullgraph=True: then the graph ends before the gradient and begins again behind it"
)


@suggests_keywords
def grad(
    f: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    process_group: dist.ProcessGroup | Communicator | None = None,
    reduction: Kind = "mean",
    bucket_cap_mb: float | None = None,
) -> Callable[..., Any]:
    """Make a function that returns the gradients of `f`, reduced over ranks, with torch.func.grad's arguments.

    Make it once, outside of the step: its first call creates a communicator of its own.

    Args:
        f: returns a scalar loss; with `has_aux`, the loss and anything else, which stays local.
        argnums: the positional arguments of `f` to differentiate, trees of floating-point tensors.
        has_aux: whether `f` returns a pair; the returned function then returns one too: the gradients, and the second
            part.
        process_group: the ranks; None means all of them. A `Communicator` replaces one of its own.
        reduction: "mean" of the ranks' gradients, "sum", or "weighted": each call then takes this rank's `weight=`, a
            number or a tensor of one element, and returns the gradients of the weighted mean of the ranks' losses:
            zeros if all weights are 0. Those in float16 are weighed and summed in float32. A weight that is negative or
            not finite, or that becomes infinite or zero in float32, is refused on every rank; in a graph or on a GPU,
            where it cannot be read, all gradients become NaN.
        bucket_cap_mb: the size of a bucket in MiB; 0 gives each gradient a bucket of its own. None measures the link at
            the first call on these ranks: 2 on a slow one, 8 on a faster one, 25 on the fastest.

    Raises TypeError or ValueError for arguments that are not as described. The returned function raises RuntimeError on
    every rank, with the names, if ranks call it with different trees, shapes, dtypes or options, or if one of them has
    raised.
    """
    differentiate = GradientFunction(f, argnums, has_aux, Options(process_group, reduction, bucket_cap_mb), "grad")

    @functools.wraps(f)
    def gradient_of(*args: Any, **kwargs: Any) -> Any:
        gradients, result = differentiate(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return untraced(gradient_of, tell=differentiate.tell_of_compilation, why=_WHY_UNTRACED)


@suggests_keywords
def grad_and_value(
    f: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    process_group: dist.ProcessGroup | Communicator | None = None,
    reduction: Kind = "mean",
    bucket_cap_mb: float | None = None,
    reduce_value: bool = False,
) -> Callable[..., Any]:
    """Make a function that returns reduced gradients and the loss: (gradients, loss), or (gradients, (loss, aux)).

    Arguments are those of `grad`. The loss is this rank's. With `reduce_value` it is reduced like the gradients, in
    float32 and without an all-reduce of its own.
    """
    options = Options(process_group, reduction, bucket_cap_mb)
    differentiate = GradientFunction(f, argnums, has_aux, options, "grad_and_value", reduce_value=reduce_value)

    @functools.wraps(f)
    def gradient_and_value_of(*args: Any, **kwargs: Any) -> Any:
        return differentiate(*args, **kwargs)

    return untraced(gradient_and_value_of, tell=differentiate.tell_of_compilation, why=_WHY_UNTRACED)


class GradientFunction:
    """The gradient function behind `grad` and `grad_and_value`."""

    def __init__(
        self,
        f: Callable[..., Any],
        argnums: Argnums,
        has_aux: bool,
        options: Options,
        transform: str,
        *,
        reduce_value: bool = False,
        before_sum: Callable[..., Any] | None = None,
    ) -> None:
        """`before_sum` makes of this rank's gradients, of aux and of the call's arguments what is summed, a list of
        float32 tensors that ride along, and what a hook on buckets has kept: then calls return a pair of the reduced
        gradients and of the sums of these, behind which is what it keeps from then on. Its first argument is a dict of
        a model's parameters, which are called by their own names.
        """
        if not callable(f):
            raise TypeError(f"{transform} takes a function, f, found {type(f).__name__}.")
        check_switches(has_aux=has_aux, reduce_value=reduce_value)
        numbers = argnums if isinstance(argnums, tuple) else (argnums,)
        if not numbers or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
            raise TypeError(f"argnums must be an int or a tuple of ints, as of torch.func.grad, found {argnums!r}.")
        self._f, self._argnums, self._has_aux, self._reduce_value = f, argnums, has_aux, reduce_value
        self.__wrapped__ = f  # where a compiled step looks for what it closes over
        self._before_sum = before_sum
        name = getattr(f, "__qualname__", type(f).__name__).replace("<locals>.", "")
        self.reduction = GradientReduction(f"{transform}({name})", _place_of(f), options)
        self._is_weighted = options.reduction == "weighted"
        self._has_told, self._has_told_of_unused = False, False
        self._proven: set[torch.dtype] = set()  # whose division has been tried

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return (gradients, value), where value is (value, aux) with `has_aux`."""
        if torch.is_inference_mode_enabled():
            # Where torch.func.grad of torch 2.11 returns zeros, and buffers are made that no later call may write.
            # Nothing in here has a derivative to the outside either way.
            with torch.inference_mode(False), torch.no_grad():
                return self._differentiate(args, kwargs)
        return self._differentiate(args, kwargs)

    def _differentiate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reduction, hook = self.reduction, self.reduction.options.hook
        reduction.find_ranks()
        if reduction.is_alone:
            weight = self._take_weight(kwargs)
            tensors = self._differentiated(args)
            gradients, riding, kept, value, aux = self._local(args, kwargs, None, ())
            if weight is not None:
                gradients, value = self._weighed_alone(gradients, value, weight)
            if isinstance(hook, OnBuckets):
                gradients, riding = self._by_buckets(tensors, gradients, riding, kept)
            gradients = self._around_alone(gradients)
            return self._with_riding(gradients, riding), (value, aux) if self._has_aux else value
        reduction.note_call()
        failures = reduction.failures
        try:
            weight, tensors = self._take_weight(kwargs), self._differentiated(args)
            dtypes = [tensor.dtype for tensor in tensors.values()]
            gradients, riding, kept, value, aux = self._local(args, kwargs, weight, dtypes)
            flat, structure = torch_private.trees.flatten(gradients)
            refuse_sparse(list(tensors), flat, reduction.name)
            if torch_private.autograd.transforms_are_active():
                flat, value = _batched(list(tensors.values()), flat, value)
            self._prove_division(list(tensors), flat)
            if isinstance(hook, OnBuckets):
                gradients, riding = self._by_buckets(tensors, gradients, riding, kept)
                return self._with_riding(gradients, riding), (value, aux) if self._has_aux else value
            sent, passengers = self._sent(flat, value, weight)
            if hook is not None:
                sent = [hook.sent(each, reduction.world_size) for each in sent]
        except BaseException as error:
            # Who traces tells of it; and what has failed in the loss may have been told.
            if not torch_private.tracing.is_tracing() and reduction.failures == failures:
                reduction.break_off(error)
            raise
        sums = reduction.sum(tensors, sent, [*passengers, *riding])
        ridden = len(sums) - len(riding)
        reduced, value = self._results(sums[:ridden], len(flat), value)
        if hook is not None:
            pairs = zip(reduced, dtypes, strict=True)
            reduced = [hook.mean(each, dtype, reduction.world_size) for each, dtype in pairs]
        reduced = [each.to(dtype) for each, dtype in zip(reduced, dtypes, strict=True)]
        reduced = torch_private.trees.unflatten(reduced, structure)
        return self._with_riding(reduced, sums[ridden:]), (value, aux) if self._has_aux else value

    def _by_buckets(
        self, tensors: Mapping[str, Tensor], gradients: Any, riding: Sequence[Tensor], kept: Kept
    ) -> tuple[Any, list[Tensor]]:
        """What a hook on buckets makes of gradients; the sums of what rides along, and what it keeps."""
        flat, structure = torch_private.trees.flatten(gradients)
        sums, new = self.reduction.by_buckets(tensors, flat, riding, kept)
        return torch_private.trees.unflatten(sums[: len(flat)], structure), [*sums[len(flat) :], *new]

    def _around_alone(self, gradients: Any) -> Any:
        """What a hook around a sum makes of gradients that nobody else adds anything to."""
        hook = self.reduction.options.hook
        if not isinstance(hook, AroundSum):
            return gradients
        flat, structure = torch_private.trees.flatten(gradients)
        return torch_private.trees.unflatten([hook.mean(hook.sent(each, 1), each.dtype, 1) for each in flat], structure)

    def _with_riding(self, gradients: Any, riding: Sequence[Tensor]) -> Any:
        return gradients if self._before_sum is None else (gradients, riding)

    def on_this_rank(self, *args: Any) -> tuple[Any, Sequence[Tensor], Any]:
        """What `before_sum` makes of this rank's gradients, and lets ride along, which nobody sums; and aux."""
        self.reduction.find_ranks()
        gradients, riding, _, _, aux = self._local(args, {}, None, ())
        return gradients, riding, aux

    def _differentiated(self, args: Sequence[Any]) -> dict[str, Tensor]:
        """What gradients are taken of, by name. Raises as `named_tensors`, and RuntimeError for what was donated."""
        tensors = named_tensors(args, self._argnums, self.reduction.name)
        if self._before_sum is not None:
            tensors = dict(zip(args[0], tensors.values(), strict=True))
        donations.refuse(self.reduction.name, tensors.values(), tensors.items)
        return tensors

    def tell_of_compilation(self) -> None:
        """Say, the first time, what torch.compile around the step does not do."""
        if not self._has_told:
            self._has_told = True
            warn_user(
                f"torch.compile ends its graph before {self.reduction.name}, which runs operator by operator. With "
                "compiled_ddp.functional.compile(step) the step is one graph, in which each bucket is launched behind "
                "its last gradient."
            )

    def _take_weight(self, kwargs: dict[str, Any]) -> Any:
        if not self._is_weighted:
            return None
        if "weight" not in kwargs:
            raise TypeError(f'{self.reduction.name} has reduction="weighted": pass this rank\'s weight= in each call.')
        taker = f"rank {self.reduction.global_rank}: weight= of {self.reduction.name}"
        return weight_in_trace(kwargs.pop("weight"), taker=taker, world_size=self.reduction.world_size)

    def _weighed_alone(self, gradients: Any, value: Tensor, weight: float | Tensor) -> tuple[Any, Tensor]:
        """What a weighted mean over one rank is: zeros where that has no weight, and NaN where its weight is none."""
        own = torch.as_tensor(weight, dtype=torch.float32, device=value.device)

        def weighed(tensor: Tensor) -> Tensor:
            return torch.where(own > 0, tensor, own.to(tensor.dtype))

        flat, structure = torch_private.trees.flatten(gradients)
        mean_value = weighed(value) if self._reduce_value else value
        return torch_private.trees.unflatten([weighed(each) for each in flat], structure), mean_value

    def _local(
        self, args: Sequence[Any], kwargs: dict[str, Any], weight: Any, dtypes: Sequence[torch.dtype]
    ) -> tuple[Any, Sequence[Tensor], Kept, Tensor, Any]:
        """What is summed of this rank's loss, times its weight where it has one; what rides along, and what a hook has
        kept; the loss, and aux.

        Gradients are with respect to tensors of these dtypes. [Note: weights behind half precision]
        """
        others: list[tuple[int, Any]] = []  # of the leaves of what comes with it those that are no tensors
        structure: Any = None
        is_weighed = weight is None

        def weighted(*args: Any, **kwargs: Any) -> Any:
            nonlocal others, structure, is_weighed
            result = self._f(*args, **kwargs)
            if self._has_aux and not (isinstance(result, tuple) and len(result) == 2):
                return result  # which torch.func refuses
            loss, aux = result if self._has_aux else (result, None)
            leaves, structure = torch_private.trees.flatten(aux)
            others = [(place, leaf) for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self._tell_of_unused(loss)
            is_half = any(dtype in _HALF for dtype in (*dtypes, getattr(loss, "dtype", None)))
            if is_weighed or (is_half and not call.has_collectives):
                return loss, (loss, tensors)
            is_weighed = True
            return loss * weight, (loss, tensors)

        call = LossCall(self.reduction.process_group, self.reduction.name)
        with calling_loss(call):
            gradients, (_, result) = torch.func.grad_and_value(weighted, self._argnums, True)(*args, **kwargs)
        value, leaves = result
        if not is_weighed:
            flat, of_gradients = torch_private.trees.flatten(gradients)
            gradients = torch_private.trees.unflatten([_weighed(each, weight) for each in flat], of_gradients)
        for place, leaf in others:
            leaves.insert(place, leaf)
        aux = torch_private.trees.unflatten(leaves, structure)
        riding: Sequence[Tensor] = ()
        kept = NOTHING_KEPT
        if self._before_sum is not None:
            gradients, riding, kept = self._before_sum(gradients, aux, *args, **kwargs)
        return gradients, riding, kept, value, aux

    def _tell_of_unused(self, loss: object) -> None:
        if isinstance(loss, Tensor) and not loss.requires_grad and not self._has_told_of_unused:
            self._has_told_of_unused = True
            warn_user(
                f"{self.reduction.name} returns zeros: its loss does not depend on argument {self._argnums}. Let it "
                "read the parameters that it is given, not those of a module or of a closure."
            )

    def _sent(self, flat: Sequence[Tensor], value: Tensor, weight: Any) -> tuple[Sequence[Tensor], list[Tensor]]:
        """What is summed up: gradients, and what rides with them.

        A mean is taken before the sum: in a graph it moves to where the derivative begins (`passes/scale_seeds.py`).
        """
        passengers = []
        if self._is_weighted:
            weight = torch.as_tensor(weight, dtype=torch.float32, device=value.device)
            # A mean over no rows is not a number. What a collective in the loss takes from this rank for others stays.
            flat = [torch.where((weight > 0) | gradient.isfinite(), gradient, 0) for gradient in flat]
            passengers.append(weight)
        if self._reduce_value:
            local = value.to(torch.float32)
            passengers.append(torch.where(weight > 0, local * weight, 0) if self._is_weighted else local)
        return flat if self._share == 1.0 else [gradient * self._share for gradient in flat], passengers

    def _results(self, sums: Sequence[Tensor], gradients: int, value: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Gradients and value, of what `_sent` has become."""
        reduced, ridden = sums[:gradients], sums[gradients:]
        if self._is_weighted:
            total = ridden[0].double()  # for gradients in float64
            inverse = torch.where(total == 0, 0.0, 1.0 / total)  # NaN where a rank's weight was none
            reduced = [(gradient * inverse).to(gradient.dtype) for gradient in reduced]
            mean_value = ridden[-1] * inverse
        else:
            mean_value = ridden[-1] * self._share if ridden else value
        if self._reduce_value:
            value = mean_value.to(value.dtype)
        return reduced, value

    def _prove_division(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """At the first call with a dtype: what is multiplied and divided around the sum, tried on a single number.

        Raises RuntimeError, with the names, where the mean of equal gradients is not what they are.
        """
        world_size, kind = self.reduction.world_size, self.reduction.options.reduction
        expected = {"mean": 2.0, "sum": 2.0 * world_size, "weighted": 1.0}[kind]
        new = {gradient.dtype for gradient in gradients}.difference(self._proven)
        for dtype in sorted(new, key=str):
            with torch_private.tracing.outside_of_traces():
                two, one = (torch.tensor(value, dtype=dtype, device="cpu") for value in (2.0, 1.0))
                weight = 2.0 if self._is_weighted else None
                sent, passengers = self._sent([two], one.real, weight)
                sums = [each * world_size for each in (*sent, *passengers)]
                ((found,), _) = self._results(sums, 1, one)
            if abs(complex(found.item()) - expected) > 0.01 * expected:
                own = [name for name, gradient in zip(names, gradients, strict=True) if gradient.dtype == dtype]
                raise RuntimeError(
                    f"{self.reduction.name} would return {found.item() / expected:g} times the {kind} over ranks of "
                    f"the gradients of {format_names(own)}: please report this."
                )
            self._proven.add(dtype)

    @property
    def _share(self) -> float:
        return 1.0 / self.reduction.world_size if self.reduction.options.reduction == "mean" else 1.0


# [Note: weights behind half precision] A weight is often a number of tokens: times that, a loss or a gradient may be no
# float16 number, and in bfloat16 the weight is rounded. There gradients are differentiated without it and weighed in
# float32; those in float16 are summed in float32 too. Only where a loss has collectives must the weight be part of it:
# what other ranks' losses give back has their weights.
_HALF = frozenset({torch.float16, torch.bfloat16})


def _weighed(gradient: Tensor, weight: float | Tensor) -> Tensor:
    """`gradient` times `weight`; in float32 where it is in float16."""
    own = torch.as_tensor(weight, dtype=torch.float32, device=gradient.device)
    if gradient.dtype not in _HALF:
        return gradient * own
    product = gradient.to(torch.float32) * own
    return product if gradient.dtype == torch.float16 else product.to(gradient.dtype)


def _place_of(function: Callable[..., Any]) -> str:
    """File and line of its definition, the same in any folder; empty for what is no function of Python's."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _batched(tensors: Sequence[Tensor], gradients: Sequence[Tensor], value: Tensor) -> tuple[list[Tensor], Tensor]:
    """Gradients and value in batches where what they are derived from is: on another rank they may depend on it."""
    batched = [_batched_as(tensor, gradient) for tensor, gradient in zip(tensors, gradients, strict=True)]
    return batched, _batched_as(max(tensors, key=_batch_dims), value)


def _batch_dims(tensor: Tensor) -> int:
    return torch_private.autograd.without_transforms(tensor).dim() - tensor.dim()


def _batched_as(like: Tensor, tensor: Tensor) -> Tensor:
    if _batch_dims(tensor) >= _batch_dims(like):
        return tensor
    return tensor + torch.zeros_like(like, dtype=tensor.dtype).sum()
