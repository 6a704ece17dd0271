"""8-bit floats (e4m3) with one scale per block, per row of a parameter, or per message."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from composable_fsdp.errors import ConfigurationError

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class Float8:
    """Values as ``float8_e4m3fn`` with 3 bits of mantissa, scaled so that the largest of a block just fits.

    The error of a value is at most 1/16 of it, or of the largest in its block divided by 2**18, whichever is more. A
    block with a nan or an infinity decodes to all nan.

    Args:
        block: elements per scale; ``None`` is one scale for everything that a rank sends in one message.
        per_row: one scale for each row of the parameter, which is one index of its first dim; a 1-d parameter is one
            row. Over the replicate axis messages begin anywhere in a row, and a scale is for as many elements as a row
            has. Such a codec cannot encode before :meth:`for_parameter` has set the length of a row. Not together with
            ``block``.
    """

    block: int | None = None
    per_row: bool = False

    def __post_init__(self) -> None:
        if self.block is not None:
            check_block(self.block)
            if self.per_row:
                raise ConfigurationError(f"Float8 takes block={self.block} or per_row=True, not both.")

    def for_parameter(self, shape: Sequence[int]) -> Float8:
        """Return the codec for a parameter, or for the shard of it that a rank sends, of this shape."""
        return Float8(block=max(1, math.prod(shape[1:] or shape))) if self.per_row else self

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of an encoded row of ``numel`` elements."""
        return payload_size(numel, num_blocks(numel, self._block(numel)))

    @fused
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode ``(num_rows, numel)`` of any float dtype into ``(num_rows, payload_bytes(numel))`` uint8."""
        numel = rows.size(1)
        block = self._block(numel)
        scales = scales_of(rows, block, _LARGEST)
        payload = empty_payload(numel, scales)
        payload[:, :numel].view(torch.float8_e4m3fn).copy_(scaled_down(rows, scales, block))
        return payload

    @fused
    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Decode a payload of :meth:`encode`, which may be strided along dim 0, into ``(num_rows, numel)`` fp32."""
        block = self._block(numel)
        scales = scales_in(payload, numel, num_blocks(numel, block))
        # Moving sign, exponent and mantissa to their positions in fp16 gives exactly 2**-8 of the value. Torch's own
        # conversion takes six times as long on CPU.
        halves = payload[:, :numel].view(torch.int8).short().bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
        return scale_up_(halves.view(torch.float16).float(), scales * 2**8, block)

    def _block(self, numel: int) -> int:
        if self.per_row:
            raise ConfigurationError(
                "Float8(per_row=True) does not know how long a row is. Call for_parameter(shape), and encode with what "
                "that returns."
            )
        return max(1, numel) if self.block is None else self.block
