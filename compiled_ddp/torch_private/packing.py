"""Inductor's lowering of `pack` and `pack_into`, by which gradients are produced inside their bucket.

[Note: read in flight] What is produced inside a bucket has no memory of its own: whatever else reads it, as the weights
behind `a + b` read the gradient of both, would read the bucket, and nothing in Inductor keeps that reader before the
all-reduce that writes over it. So such a part has its own memory, and the bucket a copy.

[Note: bound, not written] A mix-order reduction (a sum over the rows and one over the columns of the same tensor, in
one kernel, as in LayerNorm's backward; on GPUs from 4,096 rows on) leaves partial sums in a workspace. Up to torch 2.14
Inductor binds their sum to the name of the result, in memory of its own, even where the result was to be written into a
view: `buf9 = workspace_0[...].sum(dim=0)`. A sum placed in a bucket would never arrive there. Which sums become such is
decided after the lowering, so all that may have their own memory, and the bucket a copy. Where one becomes an ordinary
reduction after all, the copy is fused into it: the kernel stores what it has computed into the bucket at once.
"""

import functools
import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from compiled_ddp.torch_private.versions import minor_version

# Views that schemas do not tell, and operators that Inductor may lower to their input itself.
_MAY_BE_THEIR_INPUT = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.positive.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.prims.device_put.default,
}


def is_read_elsewhere(part: Node, pack: Node) -> bool:
    """Whether anything but `pack` may read the memory of `part`, through whatever views: [Note: read in flight]"""
    origin = part
    while _may_be_its_input(origin):
        origin = origin.all_input_nodes[0]
    pending, seen = [origin], {origin, pack}
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            if not _may_be_its_input(user):
                return True
            seen.add(user)
            pending.append(user)
    return False


def _may_be_its_input(node: Node) -> bool:
    """Whether a node's result may lie in the memory of its first input, which it leaves as it is."""
    if node.target is operator.getitem:
        return _may_be_its_input(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload):
        return False
    returned = [result.alias_info for result in node.target._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    return len(node.all_input_nodes) > 0 and (is_view or node.target in _MAY_BE_THEIR_INPUT)


def _may_be_bound(part: Any) -> bool:
    """Whether a part may become the sum over the rows of a mix-order reduction: [Note: bound, not written]"""
    from torch._inductor import config, ir
    from torch._inductor.virtualized import V

    if minor_version() >= (2, 15) or V.graph.cpp_wrapper or part.get_device_or_error().type == "cpu":
        return False
    computed = part.data.data if isinstance(part.data, ir.StorageBox) else None  # a view is copied anyway
    loops = computed.data if isinstance(computed, ir.ComputedBuffer) else computed
    return isinstance(loops, ir.Reduction) and config.triton.mix_order_reduction


@functools.cache
def register_pack_lowering() -> None:
    """Teach Inductor to place the parts of `compiled_ddp::pack` inside the packed buffer.

    Each part becomes a ReinterpretView of the buffer; a producer whose output Inductor allocates writes there, unless
    others read it or Inductor may bind it, and any other part is copied. The same as ConcatKernel's lowering of
    aten.cat, for parts of any rank; and the buffer itself may be a view of lent memory.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import clone, register_lowering
    from torch._inductor.virtualized import V

    ops = torch.ops.compiled_ddp

    @register_lowering([ops.pack.default, ops.pack_into.default], type_promotion_kind=None)
    def lower_pack(parts: list[ir.TensorBox], into: ir.TensorBox | None = None) -> ir.TensorBox:
        pack = V.graph.current_node
        if len(dtypes := {*(part.get_dtype() for part in parts)}) > 1:
            raise AssertionError(f"gradients of several dtypes in one bucket, whose memory would not do: {dtypes}")
        sizes = [list(part.get_size()) for part in parts]
        numels = [V.graph.sizevars.guard_int(ir.sympy_product(size)) for size in sizes]
        layout = ir.FixedLayout(
            device=parts[0].get_device_or_error(), dtype=parts[0].get_dtype(), size=[sum(numels)], stride=[1]
        )
        place_of_all: ir.Layout = layout
        if into is not None:
            into.realize()
            place_of_all = ir.NonOwningLayout(ir.ReinterpretView(data=into.data, layout=layout))
        kernel = ir.ConcatKernel(name=None, layout=place_of_all, inputs=[])
        storage = ir.StorageBox(kernel)
        offset = 0
        placed = []
        nodes: Any = pack.args[0]
        for node, part, size, numel in zip(nodes, parts, sizes, numels, strict=True):
            if is_read_elsewhere(node, pack) or _may_be_bound(part):
                part.realize()
                part = clone(part)
            stride = ir.FlexibleLayout.contiguous_strides(size)
            place = ir.FixedLayout(layout.device, layout.dtype, size, stride, offset)
            placed.append(ir.ConcatKernel.realize_into(part, ir.ReinterpretView(data=storage, layout=place)))
            offset += numel
        kernel.name = V.graph.register_buffer(kernel)
        kernel.inputs = ir.ConcatKernel.unwrap_storage(placed)
        V.graph.register_operation(kernel)
        return ir.TensorBox(storage)
