"""Inductor's lowering of `pack` and `pack_into`, by which gradients are produced inside their bucket."""

import functools

import torch


@functools.cache
def register_pack_lowering() -> None:
    """Teach Inductor to place the parts of `compiled_ddp::pack` inside the packed buffer.

    Each part becomes a ReinterpretView of the buffer; a producer whose output Inductor allocates writes there, any
    other part is copied. The same as ConcatKernel's lowering of aten.cat, for parts of any rank; and the buffer itself
    may be a view of lent memory.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    ops = torch.ops.compiled_ddp

    @register_lowering([ops.pack.default, ops.pack_into.default], type_promotion_kind=None)
    def lower_pack(parts: list[ir.TensorBox], into: ir.TensorBox | None = None) -> ir.TensorBox:
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
        for part, size, numel in zip(parts, sizes, numels, strict=True):
            stride = ir.FlexibleLayout.contiguous_strides(size)
            place = ir.FixedLayout(layout.device, layout.dtype, size, stride, offset)
            placed.append(ir.ConcatKernel.realize_into(part, ir.ReinterpretView(data=storage, layout=place)))
            offset += numel
        kernel.name = V.graph.register_buffer(kernel)
        kernel.inputs = ir.ConcatKernel.unwrap_storage(placed)
        V.graph.register_operation(kernel)
        return ir.TensorBox(storage)
