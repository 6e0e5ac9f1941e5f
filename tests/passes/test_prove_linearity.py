"""`prove_linearity`: which backward graphs scale with their tangents, by hand-built graphs and by real ones."""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_module, make_boxed_func
from growth import assert_linear
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from compiled_ddp.passes.linear_ops import LINEAR_OPS, linear_in
from compiled_ddp.passes.ops import meets_other_ranks
from compiled_ddp.passes.prove_linearity import LinearityProof, prove_linearity
from compiled_ddp.torch_private.for_tests import inner_compiler_replaced
from compiled_ddp.torch_private.inductor import Rewriting, compile_captured

aten = torch.ops.aten
prims = torch.ops.prims


class HandBuilt:
    """A backward graph written by hand: each call also computes the value that AOTAutograd would record."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.tangents: list[Node] = []

    def tangent(self, *size: int, dtype: torch.dtype = torch.float32) -> Node:
        self.tangents.append(self._placeholder(f"tangents_{len(self.tangents) + 1}", torch.ones(size, dtype=dtype)))
        return self.tangents[-1]

    def saved(self, *size: int, dtype: torch.dtype = torch.float32) -> Node:
        return self._placeholder("saved", torch.ones(size, dtype=dtype))

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(op, args, kwargs)
        args, kwargs = torch.fx.node.map_arg((args, kwargs), lambda producer: producer.meta["val"])
        node.meta["val"] = op(*args, **kwargs)
        return node

    def prove(self, *gradients: Node) -> LinearityProof:
        self.graph.output(gradients)
        self.graph.lint()
        return prove_linearity(self.graph, self.tangents, gradients)

    def _placeholder(self, name: str, value: Tensor) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node


@pytest.fixture
def built() -> HandBuilt:
    return HandBuilt()


# ---- the allow-list --------------------------------------------------------------------------------------------------


# Arguments that torch has renamed: in which versions (from, below) an op has the name.
RENAMED_IN_2_14 = {"grad": ((0, 0), (2, 14)), "grad_output": ((2, 14), (9, 0))}
RENAMED_ARGUMENTS = {
    "aten._cdist_backward.default": RENAMED_IN_2_14,
    "aten._pdist_backward.default": RENAMED_IN_2_14,
}
# Registered only once Inductor has been imported.
OPS_OF_INDUCTOR = ("prims.fma.default", "prims.inductor_force_stride_order.default")


def is_of_this_torch(op: str, argument: str) -> bool:
    lowest, beyond = RENAMED_ARGUMENTS.get(op, {}).get(argument, ((0, 0), (9, 0)))
    return lowest <= tuple(map(int, torch.__version__.split(".")[:2])) < beyond


def faults_of_listing(name: str) -> list[str]:
    """What an op of the allow-list does not have, of what its rules say."""
    namespace, packet, overload = name.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    if str(op) != name:
        return [f"{name} does not exist"]
    declared = {argument.name for argument in op._schema.arguments}
    named = {argument for rule in LINEAR_OPS[name] for argument in rule.argument_names()}
    wrong = {argument for argument in named if (argument in declared) != is_of_this_torch(name, argument)}
    return [f"{name} has other arguments than {wrong}"] * bool(wrong) + [f"{name} mutates"] * op._schema.is_mutable


def test_every_listed_op_exists_has_the_named_arguments_and_mutates_nothing() -> None:
    faults = [fault for name in LINEAR_OPS if name not in OPS_OF_INDUCTOR for fault in faults_of_listing(name)]
    assert not faults, faults


def test_one_rule_of_each_op_is_of_this_torch() -> None:
    fitting = {
        name: sum(all(is_of_this_torch(name, argument) for argument in rule.argument_names()) for rule in rules)
        for name, rules in LINEAR_OPS.items()
    }
    wrong = {name: number for name, number in fitting.items() if number != 1}
    assert not wrong, wrong


def test_only_what_is_in_the_table_is_said_to_be_renamed() -> None:
    for name, versions in RENAMED_ARGUMENTS.items():
        assert versions.keys() == {argument for rule in LINEAR_OPS[name] for argument in rule.argument_names()}


def test_a_rule_for_other_arguments_than_the_op_has_proves_nothing(
    built: HandBuilt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LINEAR_OPS, "aten.neg.default", (linear_in("an_argument_of_another_torch"),))
    constant = built.call(aten.neg.default, built.saved(3))
    scaled = built.call(aten.mul.Tensor, built.tangent(3), constant)
    assert built.prove(scaled).proven
    negated = HandBuilt()
    proof = negated.prove(negated.call(aten.neg.default, negated.tangent(3)))
    assert proof.reason == "neg_default: aten.neg.default is not known to be linear in argument 0 (self)"


def test_gradients_of_distances_are_proven(built: HandBuilt) -> None:
    points, distances = built.saved(4, 2), built.saved(4, 4)
    gradient = built.call(aten._cdist_backward.default, built.tangent(4, 4), points, points, 2.0, distances)
    pairwise = built.call(aten._pdist_backward.default, built.tangent(6), points, 2.0, built.saved(6))
    assert built.prove(gradient, pairwise).proven


# ---- sums: every addend linear or zero -------------------------------------------------------------------------------


def test_a_sum_of_tangents_is_proven(built: HandBuilt) -> None:
    total = built.call(aten.add.Tensor, built.tangent(3), built.tangent(3), alpha=2)
    assert built.prove(total) == LinearityProof(True, "")


def test_a_tangent_plus_a_zero_is_proven(built: HandBuilt) -> None:
    zeros = built.call(aten.full.default, [3], 0.0)
    reshaped = built.call(aten.view.default, zeros, [3])
    assert built.prove(built.call(aten.sub.Tensor, reshaped, built.tangent(3))).proven


def test_a_tangent_plus_a_saved_value_is_not_proven(built: HandBuilt) -> None:
    affine = built.call(aten.add.Tensor, built.tangent(3), built.saved(3))
    assert built.prove(affine).reason == (
        "add_tensor: aten.add.Tensor combines a value that depends on the tangents with one that does not (saved)"
    )


def test_a_tangent_plus_a_number_is_proven_only_for_zero(built: HandBuilt) -> None:
    tangent = built.tangent(3)
    assert built.prove(built.call(aten.add.Scalar, tangent, 0)).proven
    affine = HandBuilt()
    proof = affine.prove(affine.call(aten.add.Tensor, affine.tangent(3), 1e-6))
    assert proof.reason.startswith("add_tensor: aten.add.Tensor combines") and "(1e-06)" in proof.reason


def test_a_concatenation_is_proven_only_of_tangents_and_zeros(built: HandBuilt) -> None:
    tangent, zeros = built.tangent(2), built.call(aten.zeros.default, [2])
    assert built.prove(built.call(aten.cat.default, [tangent, zeros, tangent])).proven
    affine = HandBuilt()
    joined = affine.call(aten.cat.default, [affine.tangent(2), affine.call(aten.ones.default, [2])])
    assert affine.prove(joined).reason.startswith("cat_default: aten.cat.default combines")


def test_where_is_proven_with_an_independent_condition(built: HandBuilt) -> None:
    condition = built.call(aten.gt.Scalar, built.saved(3), 0)
    assert built.prove(built.call(aten.where.ScalarOther, condition, built.tangent(3), 0.0)).proven


def test_where_with_a_condition_made_of_the_tangent_is_not_proven(built: HandBuilt) -> None:
    tangent = built.tangent(3)
    condition = built.call(aten.gt.Scalar, tangent, 0)
    proof = built.prove(built.call(aten.where.self, condition, tangent, tangent))
    assert proof.reason == "gt_scalar: aten.gt.Scalar is not known to be linear in argument 0 (self)"


@pytest.mark.parametrize(("fill", "proven"), [(0, True), (0.0, True), (float("-inf"), False), (1.0, False)])
def test_masking_and_padding_are_proven_only_with_zero(fill: float, proven: bool) -> None:
    masked, padded = HandBuilt(), HandBuilt()
    mask = masked.saved(3, dtype=torch.bool)
    assert masked.prove(masked.call(aten.masked_fill.Scalar, masked.tangent(3), mask, fill)).proven is proven
    assert padded.prove(padded.call(aten.constant_pad_nd.default, padded.tangent(3), [1, 1], fill)).proven is proven


# ---- products: one linear factor -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.mm.default, prims.mul.default])
def test_a_product_with_one_tangent_is_proven_in_either_place(op: Callable[..., Any]) -> None:
    for first in (True, False):
        built = HandBuilt()
        tangent, saved = built.tangent(2, 2), built.saved(2, 2)
        assert built.prove(built.call(op, tangent, saved) if first else built.call(op, saved, tangent)).proven


@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.mm.default])
def test_a_product_of_two_tangents_is_not_proven(built: HandBuilt, op: Callable[..., Any]) -> None:
    product = built.call(op, built.tangent(2, 2), built.tangent(2, 2))
    assert built.prove(product).reason == (
        f"{product.name}: {op} multiplies values that both depend on the tangents (tangents_1 and tangents_2)"
    )


def test_a_quotient_is_proven_in_the_numerator_only(built: HandBuilt) -> None:
    assert built.prove(built.call(aten.div.Tensor, built.tangent(3), built.saved(3))).proven
    inverse = HandBuilt()
    proof = inverse.prove(inverse.call(aten.div.Tensor, inverse.saved(3), inverse.tangent(3)))
    assert proof.reason == "div_tensor: aten.div.Tensor is not known to be linear in argument 1 (other)"


def test_a_rounded_quotient_is_not_proven(built: HandBuilt) -> None:
    floored = built.call(aten.div.Tensor_mode, built.tangent(3), built.saved(3), rounding_mode="floor")
    assert "is linear only with rounding_mode in (None,), not with 'floor'" in built.prove(floored).reason


def test_addmm_is_proven_for_a_zero_or_linear_addend_and_scalar_factors(built: HandBuilt) -> None:
    tangent, weight = built.tangent(2, 2), built.saved(2, 2)
    first = built.call(aten.addmm.default, built.call(aten.zeros.default, [2]), tangent, weight, beta=0.5, alpha=2)
    second = built.call(aten.addmm.default, tangent, weight, first)
    assert built.prove(first, second).proven


def test_addmm_with_a_bias_is_not_proven(built: HandBuilt) -> None:
    biased = built.call(aten.addmm.default, built.saved(2), built.tangent(2, 2), built.saved(2, 2))
    assert built.prove(biased).reason.startswith("addmm_default: aten.addmm.default combines")


# ---- indices, writes, tuples -----------------------------------------------------------------------------------------


def test_gather_and_index_are_proven_at_independent_places(built: HandBuilt) -> None:
    tangent, places = built.tangent(3), built.saved(3, dtype=torch.int64)
    gathered = built.call(aten.gather.default, tangent, 0, places)
    indexed = built.call(aten.index.Tensor, gathered, [places])
    assert built.prove(gathered, built.call(aten.cumsum.default, indexed, 0)).proven


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put_is_proven_into_zeros_and_not_into_saved_values(accumulate: bool) -> None:
    for into_zeros in (True, False):
        built = HandBuilt()
        into = built.call(aten.new_zeros.default, built.saved(4), [4]) if into_zeros else built.saved(4)
        places = built.saved(2, dtype=torch.int64)
        written = built.call(aten.index_put.default, into, [places], built.tangent(2), accumulate)
        assert built.prove(written).proven is into_zeros


@pytest.mark.parametrize(("reduce", "proven"), [("sum", True), ("mean", True), ("prod", False), ("amax", False)])
def test_scatter_reduce_is_proven_only_for_sum_and_mean(built: HandBuilt, reduce: str, proven: bool) -> None:
    zeros, places = built.call(aten.zeros.default, [3]), built.saved(3, dtype=torch.int64)
    assert built.prove(built.call(aten.scatter_reduce.two, zeros, 0, places, built.tangent(3), reduce)).proven is proven


def test_an_index_made_of_the_tangent_is_not_proven(built: HandBuilt) -> None:
    tangent = built.tangent(3)
    order = built.call(aten.argsort.default, tangent)
    proof = built.prove(built.call(aten.index.Tensor, tangent, [order]))
    assert proof.reason.startswith("argsort_default: aten.argsort.default is not known to be linear in argument 0")


def test_parts_of_a_split_tangent_are_proven(built: HandBuilt) -> None:
    parts = built.call(aten.split.Tensor, built.tangent(4), 2)
    halves = [built.call(operator.getitem, parts, place) for place in (0, 1)]
    assert built.prove(built.call(aten.stack.default, halves)).proven


# ---- backwards that stay whole ---------------------------------------------------------------------------------------


def layer_norm_backward(built: HandBuilt, grad: Node, weight: Node, **kwargs: Any) -> list[Node]:
    mean = built.saved(2, 1)
    outputs = built.call(
        aten.native_layer_norm_backward.default, grad, built.saved(2, 3), [3], mean, mean, weight, **kwargs
    )
    return [built.call(operator.getitem, outputs, place) for place in range(3)]


def test_a_whole_backward_is_proven_in_the_incoming_gradient(built: HandBuilt) -> None:
    weight = built.saved(3)
    outputs = layer_norm_backward(built, built.tangent(2, 3), weight, bias=weight, output_mask=[True, True, True])
    assert built.prove(*outputs).proven


def test_a_whole_backward_is_not_proven_in_another_argument(built: HandBuilt) -> None:
    weight = built.saved(3)
    outputs = layer_norm_backward(
        built, built.tangent(2, 3), built.tangent(3), bias=weight, output_mask=[True, True, True]
    )
    assert built.prove(*outputs).reason == (
        "native_layer_norm_backward_default: aten.native_layer_norm_backward.default "
        "is not known to be linear in argument 5 (weight)"
    )


def test_an_output_that_is_masked_out_does_not_stop_the_proof(built: HandBuilt) -> None:
    weight = built.saved(3)
    grad_input, _, _ = layer_norm_backward(
        built, built.tangent(2, 3), weight, bias=None, output_mask=[True] + [False] * 2
    )
    assert built.prove(grad_input).proven


# ---- what depends on no tangent --------------------------------------------------------------------------------------


def test_a_constant_gradient_is_not_proven(built: HandBuilt) -> None:
    tangent = built.tangent(3)
    proof = built.prove(tangent, built.call(aten.full.default, [3], 0.01))
    assert proof.reason == (
        "full_default: aten.full.default is a gradient that depends on no tangent and is not known to be zero"
    )


def test_a_zero_gradient_is_proven(built: HandBuilt) -> None:
    zeros = built.call(aten.zeros_like.default, built.saved(3))
    assert built.prove(zeros, built.call(aten.mul.Tensor, zeros, built.saved(3))).proven


def test_any_op_of_saved_values_alone_may_stand_in_the_graph(built: HandBuilt) -> None:
    saved = built.call(aten.clamp.default, built.call(aten.rsqrt.default, built.saved(3)), 0, 1)
    assert built.prove(built.call(aten.mul.Tensor, built.tangent(3), saved)).proven


def test_the_shape_of_a_tangent_may_be_read(built: HandBuilt) -> None:
    tangent = built.tangent(3)
    size = built.call(aten.sym_size.int, tangent, 0)
    zeros = built.call(aten.full_like.default, tangent, 0)
    filled = built.call(aten.add.Tensor, zeros, built.call(aten.expand.default, built.tangent(1), [size]))
    assert built.prove(filled).proven


def test_what_no_gradient_is_made_of_does_not_matter(built: HandBuilt) -> None:
    tangent = built.tangent(3)
    built.call(aten.clamp.default, tangent, 0, 1)
    assert built.prove(tangent).proven


def test_a_graph_with_no_gradient_is_proven(built: HandBuilt) -> None:
    built.tangent(3)
    assert built.prove().proven


# ---- what is never proven --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten.clamp.default, (-1, 1)),
        (aten.relu.default, ()),
        (aten.abs.default, ()),
        (aten.sign.default, ()),
        (aten.pow.Tensor_Scalar, (2,)),
        (aten.amax.default, ()),
        (aten.linalg_vector_norm.default, ()),
        (aten.nan_to_num.default, ()),
        (aten.rand_like.default, ()),
        (aten.bernoulli.p, (0.5,)),
        (aten.view.dtype, (torch.int32,)),
    ],
)
def test_a_nonlinear_function_of_a_tangent_is_not_proven(op: Any, arguments: tuple[Any, ...]) -> None:
    built = HandBuilt()
    value = built.call(op, built.tangent(3), *arguments)
    assert built.prove(value).reason == f"{value.name}: {op} is not known to be linear in argument 0 (self)"


def test_a_clamped_tangent_that_is_used_further_is_named_itself(built: HandBuilt) -> None:
    clamped = built.call(aten.clamp.default, built.tangent(2, 2), -1, 1)
    assert built.prove(built.call(aten.mm.default, clamped, built.saved(2, 2))).reason.startswith("clamp_default: ")


def test_a_higher_order_op_on_a_tangent_is_not_proven(built: HandBuilt) -> None:
    tangent = built.tangent(3)
    branch = built.graph.get_attr("branch")
    node = built.graph.call_function(torch.ops.higher_order.cond, (built.saved(), branch, branch, (tangent,)))
    assert built.prove(node).reason == "cond: cond is not known to be linear in argument 3"


def test_a_float16_tangent_is_not_proven(built: HandBuilt) -> None:
    tangent = built.tangent(3, dtype=torch.float16)
    assert built.prove(tangent).reason == (
        "tangents_1: placeholder tangents_1 depends on a tangent in torch.float16, "
        "which may underflow when it is scaled"
    )


@pytest.mark.parametrize(
    ("dtype", "proven"),
    [
        (torch.bfloat16, True),
        (torch.float64, True),
        (torch.float16, False),
        (torch.float8_e4m3fn, False),
        (torch.int32, False),
        (torch.bool, False),
    ],
)
def test_a_conversion_is_proven_only_to_a_dtype_that_scales(dtype: torch.dtype, proven: bool) -> None:
    for op, arguments in ((prims.convert_element_type.default, (dtype,)), (aten._to_copy.default, ())):
        built = HandBuilt()
        converted = built.call(op, built.tangent(3), *arguments, **({} if arguments else {"dtype": dtype}))
        back = built.call(prims.convert_element_type.default, converted, torch.float32)
        proof = built.prove(back)
        assert proof.proven is proven
        assert proven or (proof.reason.startswith(f"{converted.name}: {op}") and str(dtype) in proof.reason)


def test_float16_values_that_no_tangent_reaches_do_not_matter(built: HandBuilt) -> None:
    saved = built.call(aten._to_copy.default, built.saved(3, dtype=torch.float16), dtype=torch.float32)
    assert built.prove(built.call(aten.mul.Tensor, built.tangent(3), saved)).proven


def test_a_value_of_unknown_dtype_is_not_proven(built: HandBuilt) -> None:
    node = built.call(aten.neg.default, built.tangent(3))
    del node.meta["val"]
    assert built.prove(node).reason.startswith("neg_default: aten.neg.default depends on a tangent and has no tensor")


# ---- effects ---------------------------------------------------------------------------------------------------------


def test_writing_the_tangent_into_a_buffer_of_zeros_is_not_proven(built: HandBuilt) -> None:
    zeros = built.call(aten.zeros.default, [3])
    built.call(aten.copy_.default, zeros, built.tangent(3))
    proof = built.prove(zeros)
    assert proof.reason.startswith("copy__default: aten.copy_.default writes into zeros_default")


def test_memory_made_for_saved_values_may_be_written_in_place(built: HandBuilt) -> None:
    """As the derivative of SiLU has it where nothing has functionalised it: 1 - sigmoid."""
    tangent, sigmoid = built.tangent(3), built.saved(3)
    ones = built.call(aten.fill_.Scalar, built.call(aten.empty_like.default, sigmoid), 1.0)
    difference = built.call(aten.sub_.Tensor, ones, sigmoid)
    assert built.prove(built.call(aten.mul.Tensor, tangent, difference)).proven


def test_what_is_written_where_nothing_else_reads_is_as_if_it_were_not_in_place(built: HandBuilt) -> None:
    """As derivatives of GroupNorm and of an LSTM are, where nothing has functionalised them."""
    tangent, saved = built.tangent(3), built.saved(3)
    sums = built.call(aten.unsqueeze_.default, built.call(aten.mul.Tensor, tangent, saved), 0)
    both = built.call(aten.add_.Tensor, sums, built.call(aten.neg.default, tangent))
    assert built.prove(both).proven
    assert not built.prove(built.call(aten.add_.Tensor, built.call(aten.neg.default, tangent), saved)).proven
    other = HandBuilt()
    negative = other.call(aten.neg.default, other.tangent(3))
    other.call(aten.mul_.Tensor, negative, 2.0)
    assert "writes into neg" in other.prove(negative, other.call(aten.neg.default, negative)).reason, "it is read"
    again = HandBuilt()
    view = again.call(aten.view.default, again.call(aten.neg.default, again.tangent(3)), [3])
    assert "writes into view" in again.prove(again.call(aten.mul_.Tensor, view, 2.0)).reason


def test_a_long_chain_of_writes_is_proven_in_as_many_steps(built: HandBuilt) -> None:
    def prove(length: int) -> Callable[[], object]:
        own = HandBuilt()
        node = own.call(aten.neg.default, own.tangent(3))
        for _ in range(length):
            node = own.call(aten.mul_.Tensor, node, 2.0)
        return lambda: own.prove(node)

    assert prove(2000)() == LinearityProof(proven=True, reason="")  # more than Python has frames
    assert_linear(prove)


def test_zeros_that_are_written_are_none(built: HandBuilt) -> None:
    """Read by their name, by that of a view, or written through a view that nobody reads."""
    tangent, saved = built.tangent(3), built.saved(3)
    zeros = built.call(aten.zeros.default, [3])
    written = built.call(aten.add_.Tensor, zeros, saved)
    assert "writes into zeros" in built.prove(built.call(aten.add.Tensor, tangent, zeros)).reason
    assert "writes into zeros" in built.prove(built.call(aten.add.Tensor, tangent, written)).reason
    other = HandBuilt()
    tangent, zeros = other.tangent(3), other.call(aten.zeros.default, [3])
    other.call(aten.fill_.Scalar, other.call(aten.view.default, zeros, [3]), 1.0)
    assert "writes into view" in other.prove(other.call(aten.add.Tensor, tangent, zeros)).reason


def test_memory_made_for_saved_values_is_no_place_for_a_tangent(built: HandBuilt) -> None:
    tangent, memory = built.tangent(3), built.call(aten.empty_like.default, built.saved(3))
    copied = built.call(aten.copy_.default, memory, tangent)
    assert built.prove(copied).proven, "nothing but its result reads that"
    read = built.call(aten.neg.default, memory)
    assert "while it depends on the tangents" in built.prove(copied).reason
    assert "while it depends on the tangents" in built.prove(read).reason
    assert "while it depends on the tangents" in built.prove(built.call(aten.neg.default, tangent)).reason


def test_an_op_that_takes_up_memory_of_another_is_not_proven(built: HandBuilt) -> None:
    tangent, saved = built.tangent(3), built.saved(3)
    taken = built.call(aten.set_.source_Tensor, built.call(aten.empty_like.default, saved), tangent)
    assert not built.prove(taken).proven


def test_updating_a_graph_input_with_a_saved_value_does_not_stop_the_proof(built: HandBuilt) -> None:
    tangent = built.tangent(3)
    built.call(aten.copy_.default, built.saved(3), built.call(aten.ones.default, [3]))
    assert built.prove(tangent).proven


def test_updating_a_graph_input_with_a_tangent_is_not_proven(built: HandBuilt) -> None:
    tangent = built.tangent(3)
    built.call(aten.copy_.default, built.saved(3), tangent)
    assert "while it depends on the tangents" in built.prove(tangent).reason


# ---- a model's own collectives ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max"])
def test_a_models_own_all_reduce_is_never_part_of_a_proof(reduce_op: str) -> None:
    built = HandBuilt()
    tangent = built.tangent(3)
    launch = built.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (tangent, reduce_op, "group"))
    wait = built.graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (launch,))
    launch.meta["val"] = wait.meta["val"] = tangent.meta["val"]
    assert built.prove(wait).reason == (
        "all_reduce_default: _c10d_functional.all_reduce.default meets other ranks, whose values may not be scaled"
    )


def test_a_collective_that_no_gradient_is_made_of_ends_the_proof_too() -> None:
    """What it tells the other ranks would be scaled."""
    built = HandBuilt()
    tangent = built.tangent(3)
    built.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (tangent, "sum", "group"))
    assert "meets other ranks" in built.prove(built.call(aten.neg.default, tangent)).reason


def test_a_collective_of_what_no_tangent_enters_leaves_the_proof_whole() -> None:
    """Statistics of a recomputed forward are the same whatever the tangents are."""
    built = HandBuilt()
    tangent, saved = built.tangent(3), built.saved(3)
    launch = built.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (saved, "sum", "group"))
    launch.meta["val"] = saved.meta["val"]
    assert built.prove(built.call(aten.mul.Tensor, tangent, launch)).proven


def test_no_op_of_the_allow_listmeets_other_ranks() -> None:
    assert not [name for name in LINEAR_OPS if "c10d" in name]
    graph = torch.fx.Graph()
    for name in LINEAR_OPS:
        namespace, packet, overload = name.split(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
        assert op is None or not meets_other_ranks(graph.call_function(op, ()))


# ---- real models -----------------------------------------------------------------------------------------------------


class GPTBlock(nn.Module):
    """Embedding, LayerNorm, attention, dropout, GELU, a head tied to the embedding, cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.first, self.second, self.last = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.project = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.tokens(tokens) + self.places.weight, 0.1)
        q, k, v = self.qkv(self.first(x)).view(*tokens.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(x.shape))
        x = x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)
        logits = self.last(x) @ self.tokens.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class ConvNet(nn.Module):
    """Convolutions, batch and group norm, ReLU, max, average and adaptive pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.LeakyReLU(), nn.AvgPool2d(2)),
            *(nn.ConvTranspose2d(4, 4, 2), nn.Hardswish(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return F.nll_loss(self.layers(images).log_softmax(1), torch.arange(len(images)))


class LSTMCell(nn.Module):
    """An LSTM cell written in ops, two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.from_input, self.from_state = nn.Linear(3, 16), nn.Linear(4, 16)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        h = c = inputs.new_zeros(inputs.shape[0], 4)
        for x in inputs.unbind(1):
            i, f, g, o = (self.from_input(x) + self.from_state(h)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h, c


class Activations(nn.Module):
    """An MLP with the usual activations, softmax and losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
        functions = (F.silu, torch.tanh, torch.sigmoid, F.mish, F.elu, F.softplus, F.hardtanh, F.relu6)
        self.functions = (*functions, lambda x: F.gelu(x, approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        for layer, function in zip(self.layers, self.functions, strict=True):
            x = function(layer(x))
        weights = x.softmax(-1)
        target = weights.detach().flip(0)
        losses = (
            F.mse_loss(weights, target),
            F.smooth_l1_loss(x, target),
            F.kl_div(weights.log(), target, reduction="sum"),
        )
        return sum(losses) + F.binary_cross_entropy_with_logits(x, target)


class RMSNorms(nn.Module):
    """RMSNorm written out (pow and rsqrt of saved values), torch's own, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(8)), nn.RMSNorm(8)
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        x = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.scale
        return self.norm(x)


class Indexing(nn.Module):
    """Gather, scatter, indexing, cumulative sums, einsum, maxima, padding, rolling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.tensor([[3, 1], [0, 0], [2, 2], [1, 3]])
        y = torch.einsum("ij,bjk,kl->bil", self.a, x, self.b)
        gathered = self.a.gather(1, places) + self.b[places[:, 0], :2]
        scattered = torch.zeros(4, 4).scatter_add(1, places, gathered).index_add(0, places[:, 1], self.b)
        written = self.b.masked_fill(self.a > 0, 0.0).index_put((places[:, 0],), self.a[0])
        y = y.cumsum(1) + F.pad(scattered[1:, :-1], (1, 0, 1, 0)) + written.roll(1, 0).tril()
        return y.amax(1).sum() + y.max(2).values.mean() + self.a.repeat(2, 1).norm() + torch.stack([y, y]).var()


class AutocastBFloat16(nn.Module):
    """A model whose matrix products are in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.head = RMSNorms(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.gelu(self.head(F.layer_norm(self.norms(x), (8,))))


class ReversedGradient(torch.autograd.Function):
    """Linear though not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.3 * grad


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return ReversedGradient.apply(self.layer(x))


def tokens() -> Tensor:
    return torch.arange(12).view(2, 6) % 11


LINEAR_MODELS: dict[type[nn.Module], Callable[[], Tensor]] = {
    GPTBlock: tokens,
    ConvNet: lambda: torch.randn(2, 3, 14, 14),
    LSTMCell: lambda: torch.randn(2, 2, 3),
    Activations: lambda: torch.randn(3, 4),
    RMSNorms: lambda: torch.randn(3, 8),
    Indexing: lambda: torch.randn(2, 4, 4),
    AutocastBFloat16: lambda: torch.randn(3, 8),
    Adversarial: lambda: torch.randn(3, 4),
}


# ---- real models whose backward is not linear ------------------------------------------------------------------------


class AuxiliaryLoss(torch.autograd.Function):
    """What mixtures of experts do: the balance loss gets a gradient of one, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=grad.dtype)


class ClampedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-3, 1e-3)


class NormalisedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-6)


class WithAuxiliaryLoss(Adversarial):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return AuxiliaryLoss.apply(y, y.softmax(-1).square().sum())


class WithSeparateAuxiliaryLoss(WithAuxiliaryLoss):
    """The balance loss alone reaches the router, so that its gradient depends on no tangent at all."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return AuxiliaryLoss.apply(self.layer(x), self.router(x).softmax(-1).square().sum())


class WithClampedGradient(Adversarial):
    def forward(self, x: Tensor) -> Tensor:
        return ClampedGradient.apply(self.layer(x))


class WithNormalisedGradient(Adversarial):
    def forward(self, x: Tensor) -> Tensor:
        return NormalisedGradient.apply(self.layer(x))


class WithClampingHook(Adversarial):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return y.tanh()


class WithGatingHook(Adversarial):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.register_hook(lambda grad: torch.where(grad.abs() > 0.2, 0.0, grad))
        return y.tanh()


NONLINEAR_MODELS: dict[type[nn.Module], str] = {
    WithAuxiliaryLoss: "combines a value that depends on the tangents with one that does not",
    WithSeparateAuxiliaryLoss: "is a gradient that depends on no tangent",
    WithClampedGradient: "aten.clamp.default is not known to be linear",
    WithNormalisedGradient: "is not known to be linear in argument 0",
    WithClampingHook: "aten.clamp.default is not known to be linear",
    WithGatingHook: "aten.abs.default is not known to be linear",
}

# What AOTAutograd is given: nothing (as the backend "aot_eager" does), or the core ATen decompositions.
DECOMPOSITIONS = {"whole": dict, "decomposed": lambda: dict(torch.export.default_decompositions().items())}


class Captured:
    """A model's backward graph, and the inputs it ran with."""

    def __init__(self, model: nn.Module, inputs: Tensor, decompositions: Mapping[Any, Any]) -> None:
        def keep(module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                self.inputs = args
                return module(*args)

            self.module = module
            return make_boxed_func(run)

        compiled = aot_module(
            model,
            fw_compiler=lambda module, _: make_boxed_func(module.forward),
            bw_compiler=keep,
            decompositions=decompositions,
        )
        outputs = compiled(inputs)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])

    def prove(self) -> LinearityProof:
        nodes = list(self.module.graph.nodes)
        tangents = [node for node in nodes if node.op == "placeholder" and node.name.startswith("tangents")]
        assert tangents
        return prove_linearity(self.module.graph, tangents, [value for value in nodes[-1].args[0] if value is not None])

    def gradients(self, factor: float) -> list[Tensor]:
        """The graph's outputs with every tangent scaled by `factor`."""
        names = [node.name for node in self.module.graph.nodes if node.op == "placeholder"]
        inputs = [
            value * factor if name.startswith("tangents") else value
            for name, value in zip(names, self.inputs, strict=True)
        ]
        return [value for value in self.module(*inputs) if value is not None]


@pytest.mark.parametrize("form", DECOMPOSITIONS)
@pytest.mark.parametrize("model", LINEAR_MODELS)
def test_the_backward_of_a_usual_model_is_proven_and_scales(model: type[nn.Module], form: str) -> None:
    torch.manual_seed(0)
    captured = Captured(model(), LINEAR_MODELS[model](), DECOMPOSITIONS[form]())
    assert captured.prove() == LinearityProof(True, "")
    # A power of two changes no mantissa, so that only the order of sums may round otherwise.
    for quarter, whole in zip(captured.gradients(0.25), captured.gradients(1.0), strict=True):
        torch.testing.assert_close(quarter * 4, whole)


@pytest.mark.parametrize("form", DECOMPOSITIONS)
@pytest.mark.parametrize("model", NONLINEAR_MODELS)
def test_a_backward_that_does_not_scale_is_not_proven(model: type[nn.Module], form: str) -> None:
    torch.manual_seed(0)
    captured = Captured(model(), torch.randn(3, 4), DECOMPOSITIONS[form]())
    proof = captured.prove()
    assert not proof.proven
    assert NONLINEAR_MODELS[model] in proof.reason
    assert not all(
        torch.allclose(quarter * 4, whole)
        for quarter, whole in zip(captured.gradients(0.25), captured.gradients(1.0), strict=True)
    )


def test_a_model_under_float16_autocast_is_not_proven() -> None:
    class AutocastFloat16(Adversarial):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return self.layer(x)

    proof = Captured(AutocastFloat16(), torch.randn(3, 4), {}).prove()
    assert "torch.float16, which may underflow" in proof.reason


class Seen(Exception):
    """The graph is in the form that Inductor lowers, and is not to be lowered."""


@pytest.mark.inductor
@pytest.mark.parametrize("model", [GPTBlock, ConvNet, RMSNorms])
def test_a_usual_model_is_proven_in_the_form_that_inductor_lowers(model: type[nn.Module]) -> None:
    proofs: list[LinearityProof | None] = []

    def prove(graph: Graph) -> None:
        tangents = [node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents")]
        outputs = graph.output_node().args[0]
        gradients = [value for value in outputs if value is not None]
        proofs.append(prove_linearity(graph, tangents, gradients) if tangents else None)
        raise Seen

    def run_whole(compile_inner: Callable[..., Any], module: GraphModule, *args: Any, **kwargs: Any) -> Any:
        """Only Inductor's passes, on a copy: its kernels, which are most of the time, say nothing of linearity."""
        seen = len(proofs)
        with pytest.raises(Exception, match="Seen"):
            compile_inner(copy.deepcopy(module), *args, **kwargs)
        assert len(proofs) == seen + 1
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": prove, "fx_graph_cache": False}
    backend = partial(compile_captured, backend="inductor", options=options, rewriting=Rewriting, cached=False)
    with inner_compiler_replaced(run_whole):
        torch.compile(model(), backend=backend)(LINEAR_MODELS[model]()).sum().backward()
    assert proofs == [None, LinearityProof(True, "")]
