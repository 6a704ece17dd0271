"""8-bit and 4-bit integers with one scale per block.

A message is encoded row by row, and a row is what one rank sends to or gets from another. So no block spans ranks, and
scales need no collective. Blocks as in ZeRO++ (Wang et al. 2023, arXiv:2306.10209, section 3.1), symmetric; their
rotation as in SDP4Bit (Jia et al. 2024, arXiv:2410.15526), which rotates gradients.
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
from composable_fsdp.errors import ConfigurationError

__all__ = ["Int4", "Int8", "hadamard_"]


class _InBlocks:
    __slots__ = ()
    block: int
    rotate: bool

    def __post_init__(self) -> None:
        _check(self.block, self.rotate)

    @property
    def compiles(self) -> bool:
        """False with ``rotate``: the unrolled stages of the transform take the compiler minutes."""
        return not self.rotate


@dataclass(frozen=True, slots=True)
class Int8(_InBlocks):
    """Signed 8-bit integers with one fp32 scale per ``block`` values.

    The error of a value is at most half of the largest magnitude in its block divided by 127. A block with a nan or an
    infinity decodes to all nan, so that checks for such values find them.

    Args:
        block: elements per scale.
        rotate: multiply each block by the normalised Walsh-Hadamard matrix before encoding and after decoding, which
            spreads large values over the block. The bound above, for the largest magnitude of the *rotated* block, then
            holds for the root mean squared error of a block rather than for each value. Decoded values that would
            exceed fp32 are clamped to its largest. ``block`` must be a power of two, and the last block is sent padded
            with zeros.
    """

    block: int = 256
    rotate: bool = False

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of an encoded row of ``numel`` elements."""
        return payload_size(_sent(numel, self), num_blocks(numel, self.block))

    @fused
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode ``(num_rows, numel)`` of any float dtype into ``(num_rows, payload_bytes(numel))`` uint8."""
        integers, scales = _quantize(rows, self, 127)
        sent = integers.size(1)
        payload = empty_payload(sent, scales)
        payload[:, :sent].view(torch.int8).copy_(integers)
        return payload

    @fused
    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Decode a payload of :meth:`encode`, which may be strided along dim 0, into ``(num_rows, numel)`` fp32."""
        sent = _sent(numel, self)
        integers = payload[:, :sent].view(torch.int8).float()
        return _dequantize(integers, scales_in(payload, sent, num_blocks(numel, self.block)), self, numel)


@dataclass(frozen=True, slots=True)
class Int4(_InBlocks):
    """Signed 4-bit integers, two per byte, with one fp32 scale per ``block`` values.

    The error of a value is at most half of the largest magnitude in its block divided by 7. Nan, infinity and
    ``rotate`` as in :class:`Int8`, with 7 for 127.
    """

    block: int = 128
    rotate: bool = False

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of an encoded row of ``numel`` elements."""
        return payload_size(_half(_sent(numel, self)), num_blocks(numel, self.block))

    @fused
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode ``(num_rows, numel)`` of any float dtype into ``(num_rows, payload_bytes(numel))`` uint8."""
        integers, scales = _quantize(rows, self, 7)
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
        sent = _sent(numel, self)
        half = _half(sent)
        packed = payload[:, :half]
        nibbles = torch.cat([packed & 15, packed[:, : sent - half] >> 4], dim=1)
        integers = nibbles.view(torch.int8).sub_(8).float()
        return _dequantize(integers, scales_in(payload, half, num_blocks(numel, self.block)), self, numel)


def _check(block: int, rotate: bool) -> None:
    check_block(block)
    if rotate:
        _check_rotatable(block)


def _sent(numel: int, codec: Int8 | Int4) -> int:
    """Return how many integers are sent for a row of ``numel`` elements."""
    return num_blocks(numel, codec.block) * codec.block if codec.rotate else numel


def _half(numel: int) -> int:
    return -(-numel // 2)


def _quantize(rows: torch.Tensor, codec: Int8 | Int4, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers in [-limit, limit], ``(num_rows, sent)`` fp32, and scales, ``(num_rows, num_blocks)``."""
    block = codec.block
    if not codec.rotate:
        return _rounded(rows, block, limit)
    missing = _sent(rows.size(1), codec) - rows.size(1)
    padded = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
    # Divide by the largest of each block before the transform, so that sums of huge values do not overflow.
    largest = scales_of(padded, block, 1)
    integers, steps = _rounded(hadamard_(scaled_down(padded, largest, block), block), block, limit)
    # The division by ``block`` normalises both transforms.
    return integers, largest * (steps / block)


def _rounded(rows: torch.Tensor, block: int, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    scales = scales_of(rows, block, limit)
    return scaled_down(rows, scales, block).round_(), scales


def _dequantize(integers: torch.Tensor, scales: torch.Tensor, codec: Int8 | Int4, numel: int) -> torch.Tensor:
    """Return the ``(num_rows, numel)`` values of ``integers``, ``(num_rows, sent)`` fp32, in the same memory."""
    if not codec.rotate:
        return scale_up_(integers, scales, codec.block)
    largest = torch.finfo(torch.float32).max
    values = scale_up_(hadamard_(integers, codec.block), scales, codec.block)
    return values.clamp_(-largest, largest)[:, :numel].contiguous()


def _check_rotatable(block: int) -> None:
    """Raise ``ConfigurationError`` unless ``block`` is a power of two, the sizes that have a transform."""
    if block & (block - 1):
        raise ConfigurationError(f"with rotate=True, a block must be a power of two, not {block!r}.")


def hadamard_(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply each block of ``rows``, ``(num_rows, n * block)``, in place by the Hadamard matrix of ones and minus
    ones.

    Applied twice, it multiplies by ``block``. It is exact for integers as long as they stay below 2**24. It adds and
    subtracts two elements at a time, in an order that does not depend on the number of blocks, as that of a matrix
    product may: all ranks get the same bits.
    """
    blocks = rows.view(-1, block)
    half = 1
    while half < block:
        first, second = blocks.unflatten(1, (block // (2 * half), 2, half)).unbind(2)
        # Runs of two are slower than two long strides: on CPU, a third of the whole transform.
        pairs = zip(first.unbind(2), second.unbind(2), strict=True) if half == 2 else [(first, second)]
        for a, b in pairs:
            a.add_(b)
            torch.sub(a, b, alpha=2, out=b)  # (a + b) - 2 b, as the former a is overwritten
        half *= 2
    return rows
