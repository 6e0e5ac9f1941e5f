"""The arguments of apex's DistributedDataParallel: which of them can be taken, and what they are in our options."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from compiled_ddp.options import CheckSteps, Options, Verify, is_number
from compiled_ddp.planning.bucket_rule import BucketRule
from compiled_ddp.reducers.averaging import Scaling


@dataclass(frozen=True)
class ApexArguments:
    """What a script passes, with apex's names and meanings."""

    message_size: float
    delay_allreduce: bool
    shared_param: object
    allreduce_trigger_params: Sequence[torch.Tensor] | None
    retain_allreduce_buffers: bool
    allreduce_always_fp32: bool
    gradient_average: bool
    gradient_predivide_factor: float
    gradient_average_split_factor: object
    num_allreduce_streams: int = 1
    allreduce_communicators: object = None

    def check(self, module: nn.Module) -> None:
        """Raise TypeError or ValueError, with what to do, for what cannot be taken."""
        if self.shared_param is not None:
            raise ValueError(
                "shared_param is no longer supported, as in apex: shared parameters need no option. "
                "delay_allreduce=True delays communication to the end of backward."
            )
        if self.gradient_average_split_factor is not None:
            raise ValueError(
                "gradient_average_split_factor has been renamed to gradient_predivide_factor: pass that "
                "(apex warned, or did not look at it)."
            )
        self._check_values()
        on_cpu = all(parameter.is_cpu for parameter in module.parameters())
        if on_cpu and (self.num_allreduce_streams != 1 or self.allreduce_communicators is not None):
            raise ValueError(
                "num_allreduce_streams and allreduce_communicators name CUDA streams, and a process group for each, "
                "and the model is on the CPU, where gloo runs four collectives at once. Leave both out."
            )
        self._check_triggers(module)

    def _check_values(self) -> None:
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, int) or value not in (0, 1):
                raise ValueError(f"{name} must be True or False, found {value!r}.")
        streams: object = self.num_allreduce_streams
        if isinstance(streams, bool) or not isinstance(streams, int) or streams < 1:
            raise ValueError(f"num_allreduce_streams must be a number of streams, 1 or more, found {streams!r}.")
        if not is_number(self.message_size) or math.isnan(self.message_size):
            raise ValueError(f"message_size must be a number of elements, found {self.message_size!r}.")
        factor = self.gradient_predivide_factor
        if not _is_positive(factor):
            raise ValueError(f"gradient_predivide_factor must be a positive number, found {factor!r}.")

    def _check_triggers(self, module: nn.Module) -> None:
        if self.allreduce_trigger_params is None:
            return
        if self.delay_allreduce:
            raise ValueError("Setting allreduce_trigger_params is only valid if delay_allreduce=False.")
        if not isinstance(self.allreduce_trigger_params, tuple):
            raise TypeError(
                f"allreduce_trigger_params must be a list of parameters, found {self.allreduce_trigger_params!r}."
            )
        own = {id(parameter) for parameter in module.parameters()}
        unknown = [n for n, tensor in enumerate(self.allreduce_trigger_params) if id(tensor) not in own]
        if unknown:
            raise ValueError(
                f"allreduce_trigger_params[{unknown[0]}] is not a parameter of the model: pass those that "
                "model.parameters() has."
            )

    def options(self, module: nn.Module, world_size: int, *, check_steps: CheckSteps, verify: Verify) -> Options:
        """For arguments that `check` may still refuse; ranks compare them."""
        return Options(
            # As apex does: parameters are rank 0's, buffers stay each rank's own.
            broadcast_buffers=False,
            bucket_rule=BucketRule(self.message_size, self._trigger_names(module), _is_on(self.delay_allreduce)),
            reduction="mean" if _is_on(self.gradient_average) else "sum",
            scaling=self._scaling(world_size),
            follows_model=True,
            check_steps=check_steps,
            verify=verify,
        )

    def _trigger_names(self, module: nn.Module) -> tuple[str, ...] | None:
        if not isinstance(self.allreduce_trigger_params, tuple) or not isinstance(module, nn.Module):
            return None
        triggers = {id(tensor) for tensor in self.allreduce_trigger_params}
        return tuple(name for name, parameter in module.named_parameters() if id(parameter) in triggers)

    def _scaling(self, world_size: int) -> Scaling | None:
        """apex's: divide by the factor before the sum, and multiply by factor / world after it, for the mean.

        With a factor of 1 the mean's division comes first, where it costs nothing.
        """
        factor, in_float32 = self.gradient_predivide_factor, _is_on(self.allreduce_always_fp32)
        if not _is_positive(factor) or (factor == 1.0 and not in_float32):
            return None  # `check` refuses the former
        if not _is_on(self.gradient_average):
            return Scaling(1.0 / factor, in_float32=in_float32)
        if factor == 1.0:
            return Scaling(1.0 / world_size, in_float32=in_float32)
        return Scaling(1.0 / factor, factor / world_size, in_float32)


def listed(parameters: Iterable[torch.Tensor] | None) -> Sequence[torch.Tensor] | None:
    """What may be a generator, as a tuple; anything else that is no list is left to `ApexArguments.check`."""
    if isinstance(parameters, torch.Tensor):  # of no dimension it has no elements to iterate over
        return parameters  # type: ignore[return-value]
    return tuple(parameters) if isinstance(parameters, Iterable) else parameters


def _is_on(switch: object) -> bool:
    """Whether it is True; what is neither True nor False is refused by `ApexArguments.check`."""
    return isinstance(switch, int) and switch == 1


def _is_positive(value: object) -> bool:
    return is_number(value) and 0 < value < math.inf


# What apex asks for its truth; 1 and 0 are taken too.
_SWITCHES = ("delay_allreduce", "retain_allreduce_buffers", "allreduce_always_fp32", "gradient_average")
