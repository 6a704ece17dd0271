"""8-bit and 4-bit integers with one scale per block.

A message is encoded row by row, and a row is what one rank sends to or gets from another. So no block spans ranks, and
scales need no collective. Blocks as in ZeRO++ (Wang et al. 2023, arXiv:2306.10209, section 3.1), symmetric.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composable_fsdp.codecs._compiled import fused
from composable_fsdp.codecs._scales import (
    check_block,
    empty_payload,
    num_blocks,
    payload_size,
    scale_up_,
    scaled_down,
    scales_in,
    scales_of,
)


@dataclass(frozen=True, slots=True)
class Int8:
    """Signed 8-bit integers with one fp32 scale per ``block`` values.

    The error of a value is at most half of the largest magnitude in its block divided by 127. A block with a nan or an
    infinity decodes to all nan, so that checks for such values find them.

    Args:
        block: elements per scale.
    """

    block: int = 256

    def __post_init__(self) -> None:
        check_block(self.block)

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of an encoded row of ``numel`` elements."""
        return payload_size(numel, num_blocks(numel, self.block))

    @fused
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode ``(num_rows, numel)`` of any float dtype into ``(num_rows, payload_bytes(numel))`` uint8."""
        integers, scales = _quantize(rows, self.block, 127)
        numel = integers.size(1)
        payload = empty_payload(numel, scales)
        payload[:, :numel].view(torch.int8).copy_(integers)
        return payload

    @fused
    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Decode a payload of :meth:`encode`, which may be strided along dim 0, into ``(num_rows, numel)`` fp32."""
        integers = payload[:, :numel].view(torch.int8).float()
        return scale_up_(integers, scales_in(payload, numel, num_blocks(numel, self.block)), self.block)


@dataclass(frozen=True, slots=True)
class Int4:
    """Signed 4-bit integers, two per byte, with one fp32 scale per ``block`` values.

    The error of a value is at most half of the largest magnitude in its block divided by 7. Nan and infinity as in
    :class:`Int8`.
    """

    block: int = 128

    def __post_init__(self) -> None:
        check_block(self.block)

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of an encoded row of ``numel`` elements."""
        return payload_size(_half(numel), num_blocks(numel, self.block))

    @fused
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode ``(num_rows, numel)`` of any float dtype into ``(num_rows, payload_bytes(numel))`` uint8."""
        integers, scales = _quantize(rows, self.block, 7)
        # The first half of a row is in the low four bits, the second half in the high ones. So both are contiguous
        # runs; neighbours in one byte would need strided access.
        half = _half(integers.size(1))
        low, high = integers[:, :half].to(torch.int8), integers[:, half:].to(torch.int8)
        payload = empty_payload(half, scales)
        packed = payload[:, :half]
        packed.copy_(low.add_(8).view(torch.uint8))
        packed[:, : high.size(1)].bitwise_or_(high.add_(8).view(torch.uint8).bitwise_left_shift_(4))
        return payload

    @fused
    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Decode a payload of :meth:`encode`, which may be strided along dim 0, into ``(num_rows, numel)`` fp32."""
        half = _half(numel)
        packed = payload[:, :half]
        nibbles = torch.cat([packed & 15, packed[:, : numel - half] >> 4], dim=1)
        integers = nibbles.view(torch.int8).sub_(8).float()
        return scale_up_(integers, scales_in(payload, half, num_blocks(numel, self.block)), self.block)


def _half(numel: int) -> int:
    return -(-numel // 2)


def _quantize(rows: torch.Tensor, block: int, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers in [-limit, limit], of the shape of ``rows`` in fp32, and scales, ``(num_rows, num_blocks)``."""
    scales = scales_of(rows, block, limit)
    return scaled_down(rows, scales, block).round_(), scales
