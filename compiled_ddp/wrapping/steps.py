"""A step of this rank that takes another course than on others: it is skipped, or an exception has ended it."""

from collections.abc import Iterator, Sequence

from compiled_ddp import torch_private
from compiled_ddp.step.conductor import conductor
from compiled_ddp.wrapping.forwards import Forwards
from compiled_ddp.wrapping.parts import HasParts
from compiled_ddp.wrapping.watched_model import WatchedModel


class SkipsSteps(HasParts):
    """The part of a wrapper that is about them."""

    _forwards: Forwards  # of a wrapper in use
    _watched_model: WatchedModel

    def _skip_step(self, others: Sequence["SkipsSteps"]) -> None:
        self._check_in_use()
        for other in others:
            if not isinstance(other, SkipsSteps):
                raise TypeError(f"skip_step() takes further wrappers of this package, found {other!r}.")
        if torch_private.autograd.current_graph_task() != -1:
            raise RuntimeError("skip_step() was called inside a backward: call it in place of backward.")
        if not self._switches.synchronises:
            return
        skipped = [self, *others]
        wrappers = [w for one in skipped for w in (one, *one._wrappers_inside())]
        synchronised = [w for w in wrappers if w._switches.synchronises and not w._runtime.local]
        conductor.forget_unbegun()
        broken = conductor.finish_broken()
        skipping = [w for w in synchronised if w._runtime not in broken]
        for wrapper in sorted(skipping, key=lambda w: w._forwards.began):
            if not wrapper._runtime.awaits_backward:
                if wrapper._watched_model.look().changed:  # in the forward, on the other ranks
                    wrapper._watched_model.take_changes()
                wrapper._forwards.begin(with_gradients=True, training=wrapper.training)
                wrapper._switches.refresh_buffers(True)
        # In the order in which the other ranks' backward reaches them; their graphs wait in the middle of it.
        wrappers = [w for one in skipped for w in (one, *one._wrappers_inside(last_first=True))]
        skipping = sorted((w for w in wrappers if w in skipping), key=lambda w: w._forwards.ended, reverse=True)
        conductor.skip([wrapper._runtime for wrapper in skipping])

    def _abandon_backward(self, others: Sequence["SkipsSteps"]) -> None:
        awaited = [wrapper._runtime for wrapper in (self, *others) if wrapper._runtime.is_awaited()]
        broken = conductor.finish_broken()
        conductor.finish_broken(also=[waiting for waiting in awaited if waiting not in broken])

    def _wrappers_inside(self, *, last_first: bool = False) -> Iterator["SkipsSteps"]:
        """All wrappers inside the model, each before those inside it, in registration order or in its reverse."""
        inside = list(self._managed.wrappers_inside().items())
        for name, wrapper in reversed(inside) if last_first else inside:
            bare = torch_private.modules.without_compile_wrapper(wrapper)
            if not isinstance(bare, SkipsSteps):
                raise RuntimeError(f"{name} is wrapped by torch's DistributedDataParallel, which cannot skip a step.")
            yield bare
            yield from bare._wrappers_inside(last_first=last_first)
