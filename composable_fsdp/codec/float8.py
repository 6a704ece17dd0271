"""8-bit floats (e4m3) with one scale per block or per row of a message."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composable_fsdp.codec.scales import SCALE_BYTES, aligned, bytes_of, check_block, floats_of, scales_of

__all__ = ["Float8"]

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class Float8:
    """Values as ``float8_e4m3fn``, scaled so that the largest of a block just fits; 3 bits of mantissa.

    The error of a value is at most 1/16 of it, or of the largest in its block divided by 2**18, whichever is more. A
    block that has a nan or an infinity comes out as nan, all of it.

    Args:
        block: elements per scale; ``None`` is one scale for all that a rank sends in one message.
    """

    block: int | None = None

    def __post_init__(self) -> None:
        if self.block is not None:
            check_block(self.block)

    def payload_bytes(self, numel: int) -> int:
        """Bytes of a row of ``numel`` elements."""
        return aligned(numel) + SCALE_BYTES * self._blocks(numel)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """``(num_rows, numel)`` of any float dtype as ``(num_rows, payload_bytes(numel))`` of uint8."""
        num_rows, numel = rows.shape
        block, blocks = self._block(numel), self._blocks(numel)
        padded = torch.nn.functional.pad(rows.float(), (0, blocks * block - numel)).view(num_rows, blocks, block)
        scales = scales_of(padded, _LARGEST)
        scaled = padded / torch.where(scales > 0, scales, 1.0).unsqueeze(2)
        kept = torch.where((scales > 0).unsqueeze(2), scaled, 0.0).clamp_(-_LARGEST, _LARGEST)
        payload = rows.new_zeros(num_rows, self.payload_bytes(numel), dtype=torch.uint8)
        payload[:, :numel] = kept.to(torch.float8_e4m3fn).view(torch.uint8).view(num_rows, blocks * block)[:, :numel]
        payload[:, aligned(numel) :] = bytes_of(scales)
        return payload

    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """``(num_rows, numel)`` fp32 of what :meth:`encode` made, which may be strided along dim 0."""
        block, blocks = self._block(numel), self._blocks(numel)
        values = payload[:, :numel].contiguous().view(torch.float8_e4m3fn).float()
        start = aligned(numel)
        scales = floats_of(payload[:, start : start + SCALE_BYTES * blocks])
        return values.mul_(scales.repeat_interleave(block, dim=1)[:, :numel])

    def _block(self, numel: int) -> int:
        return numel if self.block is None else self.block

    def _blocks(self, numel: int) -> int:
        if not numel:
            return 0
        return 1 if self.block is None else -(-numel // self.block)
