"""What codecs with scales share: how large a scale is, and where it lies in a message of bytes."""

from __future__ import annotations

import torch

from composable_fsdp.errors import ConfigurationError

__all__ = ["SCALE_BYTES", "aligned", "bytes_of", "check_block", "floats_of", "scales_of"]

SCALE_BYTES = 4
"""Scales are fp32."""


def check_block(block: int) -> None:
    """Raises ``ConfigurationError`` unless ``block`` is a number of elements."""
    if block < 1:
        raise ConfigurationError(f"a block must have at least one element, not {block!r}.")


def aligned(nbytes: int) -> int:
    """The next place in a row where a scale may begin."""
    return -(-nbytes // SCALE_BYTES) * SCALE_BYTES


def scales_of(blocks: torch.Tensor, limit: float) -> torch.Tensor:
    """By what ``blocks``, ``(num_rows, num_blocks, block)`` fp32, are divided so that none exceeds ``limit``.

    Zero where a block has nothing but zeros, or values so small that the scale would be subnormal and not exact; nan
    where a block has a nan or an infinity.
    """
    if not blocks.numel():
        return blocks.new_zeros(blocks.shape[:2])
    largest = blocks.abs().amax(dim=2)
    scales = largest / limit
    # Rounded up, the scale of the largest floats would take their product beyond what a float can be.
    scales = torch.where((scales * limit).isinf(), torch.nextafter(scales, torch.zeros_like(scales)), scales)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    return torch.where(largest.isfinite(), scales, torch.nan)


def bytes_of(scales: torch.Tensor) -> torch.Tensor:
    """``(num_rows, num_blocks)`` fp32 as ``(num_rows, SCALE_BYTES * num_blocks)`` uint8."""
    num_rows, num_blocks = scales.shape
    return scales.contiguous().view(-1).view(torch.uint8).view(num_rows, SCALE_BYTES * num_blocks)


def floats_of(payload: torch.Tensor) -> torch.Tensor:
    """The other way round; ``payload`` may be strided along dim 0."""
    num_rows, nbytes = payload.shape
    return payload.reshape(-1).view(torch.float32).view(num_rows, nbytes // SCALE_BYTES)
