"""Which ops are linear, and in which arguments: the allow-list that `prove_linearity` reads.

A rule says of what the result is made: a sum of terms, each a product of named arguments. `linear_in("grad_output")`
is one term with one factor, `addmm` is `self + mat1 @ mat2`. An argument that no term names must not depend on the
tangents at all. Ops are named by overload as `str(torch.ops.aten.sum.dim_IntList)` spells them, less the namespace and
`.default`, because a private op may be missing in one torch version and an op of Inductor is registered only once
Inductor has been imported. An op whose argument torch has renamed has a rule for each name: the installed one decides.

Absent on purpose: anything not linear (clamp, abs, sign, max, norms, comparisons), anything that draws random
numbers, bit casts (`view.dtype`), mutating ops, ops of mkldnn and of quantisation, higher-order ops, and collectives.

[Note: ranks that meet inside the backward] An all-reduce is linear in what all ranks give to it together, and this
graph has only one rank's part. Another rank may run its local variant (by hooks, under another compiler's limits) with
unscaled tangents: the sum would mix both, and be the same wrong number on all ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LinearityRule:
    """The result is the sum of `terms`; each term is the product of the arguments it names.

    A term of which an argument is None is absent (a missing bias). An argument that is a list counts element by
    element. Of `shape_only` arguments no value is read. `only_when` holds (argument, allowed values) pairs outside of
    which the op is not linear. `constant` marks a result that no argument's values enter, such as a size.
    """

    terms: tuple[tuple[str, ...], ...]
    shape_only: tuple[str, ...] = ()
    only_when: tuple[tuple[str, tuple[object, ...]], ...] = ()
    constant: bool = False

    def argument_names(self) -> Iterator[str]:
        """Every argument the rule speaks of. An op that lacks one of them is not what the rule was written for."""
        for term in self.terms:
            yield from term
        yield from self.shape_only
        for name, _ in self.only_when:
            yield name


def linear_in(name: str) -> LinearityRule:
    return LinearityRule(terms=((name,),))


def jointly_linear_in(*names: str) -> LinearityRule:
    """Like a sum: linear when every one of `names` is linear in the tangents or zero."""
    return LinearityRule(terms=tuple((name,) for name in names))


def bilinear_in(*names: str) -> LinearityRule:
    """Like a product: linear when exactly one of `names` is linear in the tangents and the others are independent."""
    return LinearityRule(terms=(names,))


def sum_of(*terms: tuple[str, ...]) -> LinearityRule:
    return LinearityRule(terms=terms)


def zero(*, shape_of: str | None = None) -> LinearityRule:
    return LinearityRule(terms=(), shape_only=(shape_of,) if shape_of else ())


def filled_with(value: str, *, shape_of: str | None = None) -> LinearityRule:
    return replace(linear_in(value), shape_only=(shape_of,) if shape_of else ())


def constant_for_shape_of(name: str) -> LinearityRule:
    return LinearityRule(terms=(), shape_only=(name,), constant=True)


def only_when(rule: LinearityRule, **allowed: tuple[object, ...]) -> LinearityRule:
    return replace(rule, only_when=tuple(allowed.items()))


_ATEN: tuple[tuple[LinearityRule, str], ...] = (
    # Movement of elements, and changes of dtype or device (prove_linearity looks at the dtype itself).
    (
        linear_in("self"),
        """_conj _conj_physical _neg_view _reshape_alias _to_copy _unsafe_index.Tensor _unsafe_view alias as_strided
        channel_shuffle clone conj_physical contiguous detach diag_embed diagonal expand flip gather index.Tensor
        index_select lift_fresh_copy masked_select narrow permute pixel_shuffle pixel_unshuffle repeat reshape
        resolve_conj resolve_neg roll rot90 select.int slice.Tensor split.Tensor split_with_sizes squeeze squeeze.dim
        squeeze.dims t take transpose.int tril triu unbind.int unfold unsqueeze view view_as_complex view_as_real""",
    ),
    # Sums, and maps with constant weights.
    (
        linear_in("self"),
        """_adaptive_avg_pool2d _adaptive_avg_pool3d _fft_c2c _fft_c2r _fft_r2c avg_pool2d avg_pool3d col2im cumsum
        im2col imag mean mean.dim neg real reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
        replication_pad2d replication_pad3d sum sum.dim_IntList trace upsample_bilinear2d upsample_nearest1d
        upsample_nearest2d upsample_nearest3d""",
    ),
    # Pointwise arithmetic.
    (jointly_linear_in("self", "other"), "add.Scalar add.Tensor rsub.Scalar rsub.Tensor sub.Scalar sub.Tensor"),
    (jointly_linear_in("self", "other"), "where.ScalarOther where.ScalarSelf where.self"),
    (jointly_linear_in("self", "end"), "lerp.Scalar lerp.Tensor"),
    (jointly_linear_in("real", "imag"), "complex"),
    (bilinear_in("self", "other"), "mul.Scalar mul.Tensor"),
    (linear_in("self"), "div.Scalar div.Tensor"),
    (only_when(linear_in("self"), rounding_mode=(None,)), "div.Scalar_mode div.Tensor_mode"),
    (sum_of(("self",), ("tensor1", "tensor2")), "addcmul"),
    (sum_of(("self",), ("tensor1",)), "addcdiv"),
    # Matrix products.
    (bilinear_in("self", "mat2"), "bmm bmm.dtype mm mm.dtype"),
    (bilinear_in("self", "other"), "linalg_cross matmul vdot"),
    (bilinear_in("self", "vec"), "mv"),
    (bilinear_in("self", "tensor"), "dot"),
    (bilinear_in("i1", "i2", "i3"), "_trilinear"),
    (sum_of(("self",), ("mat1", "mat2")), "addmm addmm.dtype"),
    (sum_of(("self",), ("batch1", "batch2")), "addbmm baddbmm baddbmm.dtype"),
    (sum_of(("self",), ("mat", "vec")), "addmv"),
    (sum_of(("self",), ("vec1", "vec2")), "addr"),
    (sum_of(("self", "mat2"), ("bias",)), "_grouped_mm"),
    (sum_of(("input", "weight"), ("bias",)), "convolution linear"),
    (linear_in("B"), "linalg_solve_triangular"),
    # Joining, writing at independent places, filling.
    (linear_in("tensors"), "cat stack"),
    (jointly_linear_in("self", "value"), "constant_pad_nd masked_fill.Scalar masked_fill.Tensor scatter.value"),
    (jointly_linear_in("self", "src"), "as_strided_scatter diagonal_scatter scatter.src scatter_add"),
    (jointly_linear_in("self", "src"), "select_scatter slice_scatter"),
    (only_when(jointly_linear_in("self", "src"), reduce=("add",)), "scatter.reduce"),
    (only_when(jointly_linear_in("self", "src"), reduce=("sum", "mean")), "scatter_reduce.two"),
    (jointly_linear_in("self", "source"), "index_add index_copy masked_scatter put"),
    (jointly_linear_in("self", "values"), "_unsafe_index_put _unsafe_masked_index_put_accumulate index_put"),
    (jointly_linear_in("self", "fill"), "_unsafe_masked_index"),
    (linear_in("weight"), "embedding"),
    (filled_with("src", shape_of="self"), "copy"),
    (filled_with("value", shape_of="self"), "fill.Scalar fill.Tensor"),
    (filled_with("fill_value", shape_of="self"), "full_like new_full"),
    (filled_with("fill_value"), "full"),
    (filled_with("s"), "scalar_tensor"),
    (zero(), "zeros"),
    (zero(shape_of="self"), "new_zeros zeros_like"),
    # What reads the shape alone.
    (constant_for_shape_of("self"), "empty_like new_empty new_empty_strided new_ones ones_like"),
    (constant_for_shape_of("self"), "sym_numel sym_size sym_size.int sym_storage_offset sym_stride sym_stride.int"),
    # Backwards that stay whole: linear in the gradient that comes in, whatever was saved for them.
    (
        linear_in("grad_output"),
        """_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _log_softmax_backward_data _prelu_kernel_backward
        _softmax_backward_data _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
        adaptive_max_pool2d_backward adaptive_max_pool3d_backward avg_pool2d_backward avg_pool3d_backward
        binary_cross_entropy_backward convolution_backward cudnn_batch_norm_backward diagonal_backward elu_backward
        embedding_dense_backward fractional_max_pool2d_backward gelu_backward glu_backward grid_sampler_2d_backward
        grid_sampler_3d_backward hardsigmoid_backward hardswish_backward hardtanh_backward huber_loss_backward
        leaky_relu_backward log_sigmoid_backward logit_backward masked_scatter_backward max_pool2d_with_indices_backward
        max_pool3d_with_indices_backward miopen_batch_norm_backward mish_backward mse_loss_backward
        native_dropout_backward nll_loss2d_backward nll_loss_backward reflection_pad1d_backward
        reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward
        replication_pad3d_backward rrelu_with_noise_backward select_backward sigmoid_backward silu_backward
        slice_backward smooth_l1_loss_backward softplus_backward softshrink_backward tanh_backward threshold_backward
        upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        upsample_trilinear3d_backward""",
    ),
    (
        linear_in("grad_out"),
        """_flash_attention_backward _fused_rms_norm_backward _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_fused_attention_overrideable_backward batch_norm_backward hardshrink_backward
        native_batch_norm_backward native_group_norm_backward native_layer_norm_backward""",
    ),
    (linear_in("grad_out_"), "_efficient_attention_backward _scaled_dot_product_efficient_attention_backward"),
    (linear_in("grad"), "_ctc_loss_backward _ctc_loss_backward.Tensor _embedding_bag_dense_backward"),
    (linear_in("grad"), "_embedding_bag_per_sample_weights_backward"),
    (linear_in("grad"), "_cdist_backward _pdist_backward"),  # up to torch 2.13
    (linear_in("grad_output"), "_cdist_backward _pdist_backward"),  # from torch 2.14 on
    (linear_in("grad_in"), "unfold_backward"),
    (linear_in("grad_w"), "_weight_norm_interface_backward"),
    (linear_in("grad_hy"), "_thnn_fused_gru_cell_backward"),
    (jointly_linear_in("grad_hy", "grad_cy"), "_thnn_fused_lstm_cell_backward_impl"),
    (jointly_linear_in("grad_output", "grad_hy", "grad_cy"), "_cudnn_rnn_backward"),
)

_PRIMS: tuple[tuple[LinearityRule, str], ...] = (
    (linear_in("self"), "clone conj_physical fft_c2c fft_c2r fft_r2c imag neg real"),
    (linear_in("a"), "broadcast_in_dim collapse collapse_view conj convert_element_type copy_strided device_put"),
    (linear_in("a"), "reshape rev split_dim squeeze transpose view_of"),
    (linear_in("inp"), "sum"),
    (linear_in("input"), "inductor_force_stride_order"),
    (linear_in("tensors"), "cat"),
    (jointly_linear_in("self", "other"), "add sub"),
    (bilinear_in("self", "other"), "mul"),
    (linear_in("self"), "div"),
    (jointly_linear_in("a", "b"), "where"),
    (jointly_linear_in("self", "src"), "as_strided_scatter"),
    (sum_of(("a", "b"), ("c",)), "fma"),
    (filled_with("s"), "scalar_tensor"),
)


def _by_overload() -> dict[str, tuple[LinearityRule, ...]]:
    rules: dict[str, tuple[LinearityRule, ...]] = {}
    for namespace, table in (("aten", _ATEN), ("prims", _PRIMS)):
        for rule, names in table:
            for name in names.split():
                overload = f"{namespace}.{name}" + ("" if "." in name else ".default")
                rules[overload] = (*rules.get(overload, ()), rule)
    return rules


# From `str(overload)`, e.g. "aten.mm.default", to its rules: more than one where torch has renamed an argument.
LINEAR_OPS: dict[str, tuple[LinearityRule, ...]] = _by_overload()
