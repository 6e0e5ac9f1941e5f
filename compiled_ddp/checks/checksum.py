"""Checksums of bit patterns: equal tensors have equal ones, whatever their strides and wherever they lie in memory."""

import functools

import torch

_ROW = 512  # words that are added up before they are weighted
_WORD_BYTES = 8


def checksum(values: torch.Tensor) -> torch.Tensor:
    """A hash of the bits of `values`, one-dimensional and contiguous: int64, shape (), on its device.

    Two tensors that differ in one element differ in it, and so do practically all others that differ. A plain sum of
    int64 words modulo 2**64, in rows that are weighted by odd numbers: by far the fastest that torch has on a CPU, and
    exact, so that it does not depend on the order of summation.
    """
    if values.is_complex():
        values = torch.view_as_real(values).reshape(-1)
    if values.storage_offset() * values.element_size() % _WORD_BYTES:
        values = values.clone()  # which begins at a whole word
    raw = values.view(torch.uint8)
    words = raw[: raw.numel() // _WORD_BYTES * _WORD_BYTES].view(torch.int64)
    rows = words.numel() // _ROW
    parts = [
        words[: rows * _ROW].view(rows, _ROW).sum(1),
        words[rows * _ROW :],
        raw[words.numel() * _WORD_BYTES :],
    ]
    # Not torch.dot, which CUDA has for floating point alone.
    stream = None if values.is_cpu else torch.accelerator.current_stream(values.device)
    sums = [(_weights(part.numel(), part.device, stream) * part).sum() for part in parts if part.numel()]
    return functools.reduce(lambda before, added: 3 * before + added, sums, values.new_zeros((), dtype=torch.int64))


@functools.lru_cache(maxsize=32)
def _weights(numel: int, device: torch.device, stream: torch.Stream | None) -> torch.Tensor:
    """Other ones for every `stream`, on which nothing waits for what another one has made."""
    return torch.arange(1, 2 * numel + 1, 2, dtype=torch.int64, device=device)


def as_row(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The elements of `tensor`, one-dimensional, as they lie in memory when it has `stride`, which is dense."""
    if tuple(tensor.stride()) != stride:
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
