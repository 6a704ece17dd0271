"""Integers of few bits with one scale per block: 8-bit and 4-bit.

A message is encoded row by row, each row what one rank sends or gets, so that no block straddles ranks and a scale
needs no collective. Blocks of ZeRO++ (Wang et al. 2023, arXiv:2306.10209, section 3.1), symmetric; their rotation as in
SDP4Bit (Jia et al. 2024, arXiv:2410.15526), which rotates gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composable_fsdp.codecs._compiled import fused
from composable_fsdp.codecs._hadamard import check_rotatable, hadamard_
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

__all__ = ["Int4", "Int8"]


@dataclass(frozen=True, slots=True)
class Int8:
    """Values as signed 8-bit integers with one fp32 scale per ``block`` of them.

    The error of a value is at most half of the largest magnitude in its block divided by 127. A block that has a nan or
    an infinity comes out as nan, all of it, so that who looks for such values finds them.

    Args:
        block: elements per scale.
        rotate: multiply each block by the normalised Walsh-Hadamard matrix first, and again once it has arrived: what
            is large is spread over the whole block. The root of the mean squared error of a block, rather than the
            error of each value, is then at most half of the largest magnitude in the *rotated* block divided by 127;
            what this error would make too large for fp32 comes out as its largest. ``block`` must be a power of two;
            whole blocks travel, the last one padded with zeros.
    """

    block: int = 256
    rotate: bool = False

    def __post_init__(self) -> None:
        _check(self.block, self.rotate)

    @property
    def compiles(self) -> bool:
        """The stages of a rotation, unrolled, keep the compiler busy for minutes."""
        return not self.rotate

    def payload_bytes(self, numel: int) -> int:
        """Bytes of a row of ``numel`` elements."""
        return payload_size(_sent(numel, self), num_blocks(numel, self.block))

    @fused
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """``(num_rows, numel)`` of any float dtype as ``(num_rows, payload_bytes(numel))`` of uint8."""
        integers, scales = _quantize(rows, self, 127)
        sent = integers.size(1)
        payload = empty_payload(sent, scales)
        payload[:, :sent].view(torch.int8).copy_(integers)
        return payload

    @fused
    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """``(num_rows, numel)`` fp32 of what :meth:`encode` made, which may be strided along dim 0."""
        sent = _sent(numel, self)
        integers = payload[:, :sent].view(torch.int8).float()
        return _dequantize(integers, scales_in(payload, sent, num_blocks(numel, self.block)), self, numel)


@dataclass(frozen=True, slots=True)
class Int4:
    """Values as signed 4-bit integers, two in a byte, with one fp32 scale per ``block`` of them.

    The error of a value is at most half of the largest magnitude in its block divided by 7. Nan, infinity and
    ``rotate`` as in :class:`Int8`, with 7 for 127.
    """

    block: int = 128
    rotate: bool = False

    def __post_init__(self) -> None:
        _check(self.block, self.rotate)

    @property
    def compiles(self) -> bool:
        """The stages of a rotation, unrolled, keep the compiler busy for minutes."""
        return not self.rotate

    def payload_bytes(self, numel: int) -> int:
        """Bytes of a row of ``numel`` elements."""
        return payload_size(_half(_sent(numel, self)), num_blocks(numel, self.block))

    @fused
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """``(num_rows, numel)`` of any float dtype as ``(num_rows, payload_bytes(numel))`` of uint8."""
        integers, scales = _quantize(rows, self, 7)
        # The first half of a row in the low four bits, the second in the high ones: whole runs of elements, where
        # neighbours in a byte would be every other one.
        half = _half(integers.size(1))
        low, high = integers[:, :half].to(torch.int8), integers[:, half:].to(torch.int8)
        payload = empty_payload(half, scales)
        packed = payload[:, :half]
        packed.copy_(low.add_(8).view(torch.uint8))
        packed[:, : high.size(1)].bitwise_or_(high.add_(8).view(torch.uint8).bitwise_left_shift_(4))
        return payload

    @fused
    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """``(num_rows, numel)`` fp32 of what :meth:`encode` made, which may be strided along dim 0."""
        sent = _sent(numel, self)
        half = _half(sent)
        packed = payload[:, :half]
        nibbles = torch.cat([packed & 15, packed[:, : sent - half] >> 4], dim=1)
        integers = nibbles.view(torch.int8).sub_(8).float()
        return _dequantize(integers, scales_in(payload, half, num_blocks(numel, self.block)), self, numel)


def _check(block: int, rotate: bool) -> None:
    check_block(block)
    if rotate:
        check_rotatable(block)


def _sent(numel: int, codec: Int8 | Int4) -> int:
    """Integers that travel for a row of ``numel`` elements."""
    return num_blocks(numel, codec.block) * codec.block if codec.rotate else numel


def _half(numel: int) -> int:
    return -(-numel // 2)


def _quantize(rows: torch.Tensor, codec: Int8 | Int4, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers in [-limit, limit], ``(num_rows, sent)`` of fp32, and scales ``(num_rows, num_blocks)``."""
    block = codec.block
    if not codec.rotate:
        return _rounded(rows, block, limit)
    missing = _sent(rows.size(1), codec) - rows.size(1)
    padded = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
    # Divided by the largest of its block before any are added, so that no sum of huge values overflows.
    largest = scales_of(padded, block, 1)
    integers, steps = _rounded(hadamard_(scaled_down(padded, largest, block), block), block, limit)
    # Two transforms by ones and minus ones, without the roots that would normalise them.
    return integers, largest * (steps / block)


def _rounded(rows: torch.Tensor, block: int, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    scales = scales_of(rows, block, limit)
    return scaled_down(rows, scales, block).round_(), scales


def _dequantize(integers: torch.Tensor, scales: torch.Tensor, codec: Int8 | Int4, numel: int) -> torch.Tensor:
    """The ``(num_rows, numel)`` that ``integers``, ``(num_rows, sent)`` of fp32, stand for; takes their memory."""
    if not codec.rotate:
        return scale_up_(integers, scales, codec.block)
    largest = torch.finfo(torch.float32).max
    values = scale_up_(hadamard_(integers, codec.block), scales, codec.block)
    return values.clamp_(-largest, largest)[:, :numel].contiguous()
