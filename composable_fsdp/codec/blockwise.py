"""Integers of few bits with one scale per block: 8-bit and 4-bit.

A message is encoded row by row, each row what one rank sends or gets, so that no block straddles ranks and a scale
needs no collective. Scales lie behind the integers of the same row. Blocks of ZeRO++ (Wang et al. 2023,
arXiv:2306.10209, section 3.1), symmetric.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composable_fsdp.codec.scales import SCALE_BYTES, aligned, bytes_of, check_block, floats_of, scales_of

__all__ = ["Int4", "Int8"]


@dataclass(frozen=True, slots=True)
class Int8:
    """Values as signed 8-bit integers with one fp32 scale per ``block`` of them.

    The error of a value is at most half of the largest magnitude in its block divided by 127. A block that has a nan or
    an infinity comes out as nan, all of it, so that who looks for such values finds them.
    """

    block: int = 256

    def __post_init__(self) -> None:
        check_block(self.block)

    def payload_bytes(self, numel: int) -> int:
        """Bytes of a row of ``numel`` elements."""
        return aligned(numel) + SCALE_BYTES * _blocks(numel, self.block)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """``(num_rows, numel)`` of any float dtype as ``(num_rows, payload_bytes(numel))`` of uint8."""
        integers, scales = _quantize(rows, self.block, 127)
        return _join(integers.view(torch.uint8), scales, rows.size(1))

    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """``(num_rows, numel)`` fp32 of what :meth:`encode` made, which may be strided along dim 0."""
        integers = payload[:, :numel].contiguous().view(torch.int8)
        return _dequantize(integers, _scales(payload, numel, numel, self.block), self.block)


@dataclass(frozen=True, slots=True)
class Int4:
    """Values as signed 4-bit integers, two in a byte, with one fp32 scale per ``block`` of them.

    The error of a value is at most half of the largest magnitude in its block divided by 7. Nan and infinity as in
    :class:`Int8`.
    """

    block: int = 128

    def __post_init__(self) -> None:
        check_block(self.block)

    def payload_bytes(self, numel: int) -> int:
        """Bytes of a row of ``numel`` elements."""
        return aligned(-(-numel // 2)) + SCALE_BYTES * _blocks(numel, self.block)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """``(num_rows, numel)`` of any float dtype as ``(num_rows, payload_bytes(numel))`` of uint8."""
        integers, scales = _quantize(rows, self.block, 7)
        if rows.size(1) % 2:
            integers = torch.nn.functional.pad(integers, (0, 1))
        nibbles = (integers + 8).view(torch.uint8)
        return _join(nibbles[:, ::2] | (nibbles[:, 1::2] << 4), scales, -(-rows.size(1) // 2))

    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """``(num_rows, numel)`` fp32 of what :meth:`encode` made, which may be strided along dim 0."""
        packed_bytes = -(-numel // 2)
        packed = payload[:, :packed_bytes]
        nibbles = torch.stack([packed & 15, packed >> 4], dim=2).reshape(payload.size(0), 2 * packed_bytes)
        integers = nibbles[:, :numel].to(torch.int8) - 8
        return _dequantize(integers, _scales(payload, packed_bytes, numel, self.block), self.block)


def _blocks(numel: int, block: int) -> int:
    return -(-numel // block)


def _quantize(rows: torch.Tensor, block: int, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers ``(num_rows, numel)`` in [-limit, limit], and scales ``(num_rows, num_blocks)``."""
    num_rows, numel = rows.shape
    num_blocks = _blocks(numel, block)
    padded = torch.nn.functional.pad(rows.float(), (0, num_blocks * block - numel))
    blocks = padded.view(num_rows, num_blocks, block)
    scales = scales_of(blocks, limit)
    scaled = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(2)
    kept = torch.where((scales > 0).unsqueeze(2), scaled, 0.0)
    integers = kept.round().clamp_(-limit, limit).to(torch.int8)
    return integers.view(num_rows, num_blocks * block)[:, :numel], scales


def _dequantize(integers: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    num_rows, numel = integers.shape
    whole = numel // block * block
    out = torch.empty(num_rows, numel, dtype=torch.float32, device=integers.device)
    head = integers[:, :whole].reshape(num_rows, whole // block, block)
    torch.mul(head, scales[:, : whole // block].unsqueeze(2), out=out[:, :whole].unflatten(1, (whole // block, block)))
    if whole < numel:
        torch.mul(integers[:, whole:], scales[:, -1:], out=out[:, whole:])
    return out


def _join(values: torch.Tensor, scales: torch.Tensor, used: int) -> torch.Tensor:
    """Values, then scales on their boundary, in each row."""
    num_rows = values.size(0)
    payload = values.new_zeros(num_rows, aligned(used) + SCALE_BYTES * scales.size(1), dtype=torch.uint8)
    payload[:, :used] = values
    payload[:, aligned(used) :] = bytes_of(scales)
    return payload


def _scales(payload: torch.Tensor, used: int, numel: int, block: int) -> torch.Tensor:
    start = aligned(used)
    return floats_of(payload[:, start : start + SCALE_BYTES * _blocks(numel, block)])
