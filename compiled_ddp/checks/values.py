"""What lies in a bucket before it is launched, compared with the same backward without the passes.

[Note: an account of its own] Ranks agree on garbage, so a bucket is compared with what it has not been made from: the
gradients of the traced backward, run operator by operator from the same saved tensors and tangents. The memory is
filled beforehand with a NaN whose bits no kernel produces, which shows elements that were never written.

[Note: how far rounding goes] A compiler adds up in another order, keeps float32 where operators round to 16 bits, and
contracts. How far that takes a gradient depends on what cancels on the way: the gradient of a bias before a
normalisation is nothing but rounding. So the reference is run twice, once with every operator's result rounded at
random, and what that changes is the scale. On top comes a part of the gradient itself, as a comparison that rounding
turns round (a ReLU at zero, a maximum of equals) changes an element by more than rounding. A fault is far above: a
gradient that is stale, swapped, or scaled twice, is off by half of itself and more. Where the tolerance comes near
that, or the gradient is zero or not finite, what compares equal is not held for compared.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compiled_ddp.checks.sums import smallest
from compiled_ddp.plan import Bucket

# Quiet NaNs with a payload of their own, by bytes of an element.
_PATTERNS = {2: 0x7FEB, 4: 0x7FEBAD5A, 8: 0x7FFBAD5ABAD5ABAD}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

_OF_ITSELF = 2.0**-6  # of a gradient, that an honest one may be off
_LOW_PRECISION = 2.0**-11  # an epsilon from which on sums are kept more exactly than their terms
_SIGMAS = {True: 4.0, False: 512.0}  # by whether it is low: long sums in float32 round more than one operator does
_OF_A_SMALL_SAMPLE = 16.0  # what one element has rounded to tells little

_TELLS_BELOW = 0.4  # of a gradient: a tolerance above that lets through one that is halved

# Why a comparison tells nothing. Of the first two a later backward may tell more.
ZERO, INFINITE = "zero gradients so far", "gradients that are not finite"
_UNSTABLE = "not finite where its backward is rounded otherwise, so that its tolerance is unknown"
_ROUNDING = "nothing but rounding"

# What was found, in the order in which it explains.
UNWRITTEN, NOT_FINITE, DIFFERENT = 3, 2, 1
_WORDS = {
    UNWRITTEN: "element {element} was never written into its bucket",
    NOT_FINITE: "element {element} is not finite in its bucket, and finite without compiled_ddp's passes",
    DIFFERENT: "it is not what the same backward without compiled_ddp's passes gives, most in element {element}",
}
_ELEMENT_BITS = 56


def encoded(kind: int, element: int) -> int:
    """A finding as one number, of which ranks take the largest."""
    return (kind << _ELEMENT_BITS) | element


def explained(finding: int) -> str:
    return _WORDS[finding >> _ELEMENT_BITS].format(element=finding & ((1 << _ELEMENT_BITS) - 1))


def fill_with_pattern(flat_buffer: torch.Tensor) -> None:
    """Leave in memory what no kernel does."""
    real = torch.view_as_real(flat_buffer) if flat_buffer.is_complex() else flat_buffer
    if real.element_size() in _PATTERNS:
        real.view(_INTEGERS[real.element_size()]).fill_(_PATTERNS[real.element_size()])


@dataclass(frozen=True)
class Expected:
    """A gradient of the backward without the passes, scaled as in its bucket; how far rounding has taken it.

    What is not finite for its noise is unknown.
    """

    value: torch.Tensor
    noise_norm: float
    noise_most: float
    epsilon: float  # the largest of what it was computed with

    @functools.cached_property
    def _sizes(self) -> tuple[float, float, bool]:
        """The norm of what is finite, its largest element, and whether all is. Reads from the device."""
        value = _real(self.value)
        if not value.numel():
            return 0.0, 0.0, True
        wide = value.to(_wide(value.dtype))
        finite = wide.nan_to_num(0.0, 0.0, 0.0)
        read = torch.stack((torch.linalg.vector_norm(finite), finite.abs().max(), wide.isfinite().all().to(wide.dtype)))
        norm, most, is_finite = read.tolist()
        return norm, most, bool(is_finite)

    def tolerances(self) -> tuple[float, float]:
        """What the difference may have for a norm, and for its largest element.

        Where few sigmas cover most of a gradient in float32, it is what cancels, and may be computed in more bits than
        the coarsest values of its graph: then only what is far beyond rounding counts.
        """
        by_graph = self._tolerances(_SIGMAS[self.epsilon >= _LOW_PRECISION])
        may_be_finer = torch.finfo(self.value.dtype).eps < _LOW_PRECISION
        if may_be_finer and by_graph[0] >= _TELLS_BELOW * self._sizes[0]:
            return self._tolerances(_SIGMAS[False])
        return by_graph

    def _tolerances(self, sigmas: float) -> tuple[float, float]:
        numel, (norm, most, _) = max(self.value.numel(), 1), self._sizes
        least = smallest(self.value.dtype)
        factor = sigmas * (1.0 + _OF_A_SMALL_SAMPLE / math.sqrt(numel))
        return (
            factor * self.noise_norm + _OF_ITSELF * norm + 64.0 * least * math.sqrt(numel),
            factor * self.noise_most + _OF_ITSELF * most + 64.0 * least,
        )

    @property
    def has_known_noise(self) -> bool:
        return math.isfinite(self.noise_norm)

    @property
    def why_vacuous(self) -> str:
        """Why nothing is known of a bucket that compares equal to this; empty where it is what it should be."""
        norm, _, is_finite = self._sizes
        if not is_finite:
            return INFINITE
        if not self.value.numel():
            return ""
        if norm == 0.0:
            return ZERO
        if not self.has_known_noise:
            return _UNSTABLE
        return "" if self.tolerances()[0] < _TELLS_BELOW * norm else _ROUNDING


@dataclass(frozen=True)
class Reference:
    """What a run of a graph is expected to give, by parameter; `why_not` tells why where nothing is known."""

    expected: Mapping[int, Expected]
    why_not: str = ""


@torch.no_grad()
def compare(bucket: Bucket, flat_buffer: torch.Tensor, reference: Reference) -> dict[int, int]:
    """What is wrong in a bucket that is about to be launched, by parameter: see `explained`. Reads from the device."""
    found = {}
    for gradient in bucket.gradients:
        expected = reference.expected.get(gradient.index)
        if expected is None or gradient.numel == 0:
            continue
        finding = _finding(bucket.view(gradient, flat_buffer), expected)
        if finding is not None:
            found[gradient.index] = finding
    return found


def _finding(view: torch.Tensor, expected: Expected) -> int | None:
    found, value = _real(view), _real(expected.value)
    difference = (found.to(_wide(found.dtype)) - value.to(_wide(found.dtype))).abs()
    norm, most = torch.stack((torch.linalg.vector_norm(difference), difference.max())).tolist()
    allowed, allowed_most = expected.tolerances()
    if norm <= allowed and most <= allowed_most:
        return None
    unwritten = _unwritten(found)
    if unwritten is not None:
        return encoded(UNWRITTEN, _element(unwritten, view))
    if not expected.has_known_noise:
        return None
    safe = value.abs() <= torch.finfo(value.dtype).max / 2  # neither infinite nor close to it, and a number
    not_finite = safe & ~found.isfinite()
    if bool(not_finite.any()):
        return encoded(NOT_FINITE, _element(_first(not_finite), view))
    difference = torch.where(safe & difference.isfinite(), difference, 0.0)
    norm, most = torch.stack((torch.linalg.vector_norm(difference), difference.max())).tolist()
    if norm <= allowed and most <= allowed_most:
        return None
    return encoded(DIFFERENT, _element(int(difference.argmax()), view))


def _unwritten(found: torch.Tensor) -> int | None:
    size = found.element_size()
    if size not in _PATTERNS:
        return None
    places = found.contiguous().view(_INTEGERS[size]) == _PATTERNS[size]
    return _first(places) if bool(places.any()) else None


def _first(mask: torch.Tensor) -> int:
    return int(mask.flatten().to(torch.uint8).argmax())


def _element(place: int, view: torch.Tensor) -> int:
    """In the gradient's own order; the two parts of a complex number are one."""
    return place // 2 if view.is_complex() else place


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype
