"""What codecs with scales share: how large a scale is, what it does to its block, and where it lies in a message."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from composable_fsdp.errors import ConfigurationError

__all__ = [
    "check_block",
    "empty_payload",
    "num_blocks",
    "payload_size",
    "scale_up_",
    "scaled_down",
    "scales_in",
    "scales_of",
]

_SCALE_BYTES = 4
"""Scales are fp32."""
_FLOAT = torch.finfo(torch.float32)


def check_block(block: int) -> None:
    """Raises ``ConfigurationError`` unless ``block`` is a number of elements."""
    if type(block) is not int or block < 1:
        raise ConfigurationError(f"a block is a whole number of elements, at least one, not {block!r}.")


def num_blocks(numel: int, block: int) -> int:
    """Blocks in a row of ``numel`` elements, of which the last one may be shorter."""
    return -(-numel // block)


# -- what a scale does


def scales_of(rows: torch.Tensor, block: int, limit: float) -> torch.Tensor:
    """``(num_rows, num_blocks)`` fp32 by which ``rows``, ``(num_rows, numel)``, are divided to be within ``limit``.

    "Within" but for rounding, a few units of the last place. Zero where a block has nothing but zeros, or values so
    small that the scale would be subnormal and not exact; nan where a block has a nan or an infinity.
    """
    # Two reductions read the rows twice; abs() would write them too.
    largest = torch.cat([torch.maximum(part.amax(2), -part.amin(2)) for part in _blocks(rows, block)], dim=1).float()
    # Rounded up, the scale of the largest floats would take their product beyond what a float can be.
    scales = (largest / limit).clamp_(max=_FLOAT.max / limit * (1 - _FLOAT.eps))
    scales = torch.where(scales < _FLOAT.tiny, 0.0, scales)
    return torch.where(largest.isfinite(), scales, torch.nan)


def scaled_down(rows: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """A new fp32 tensor: each block of ``rows`` divided by its scale; zeros where that is zero or nan."""
    out = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    divisors = torch.where(scales > 0, scales, torch.inf)
    parts = zip(_blocks(rows, block), _columns(divisors, rows, block), _blocks(out, block), strict=True)
    for values, divisor, part in parts:
        if (
            torch.compiler.is_compiling()
        ):  # which fuses what it can see as a value, and cannot write to views by ``out``
            part.copy_(values / divisor)
        else:
            torch.div(values, divisor, out=part)
    return out.nan_to_num_(nan=0.0)


def scale_up_(values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """The other way round, in place."""
    for part, factor in zip(_blocks(values, block), _columns(scales, values, block), strict=True):
        part.mul_(factor)
    return values


def _blocks(rows: torch.Tensor, block: int) -> Iterator[torch.Tensor]:
    """Views: whole blocks, ``(num_rows, n, block)``, and the shorter last one if there is one, ``(num_rows, 1, rest)``.

    Two parts rather than one that is padded, which would copy a large message for the sake of its end.
    """
    whole = rows.size(1) // block
    yield rows[:, : whole * block].unflatten(1, (whole, block))
    if rows.size(1) % block:
        yield rows[:, whole * block :].unsqueeze(1)


def _columns(scales: torch.Tensor, rows: torch.Tensor, block: int) -> Iterator[torch.Tensor]:
    """Scales in the parts of :func:`_blocks`, to be broadcast."""
    whole = rows.size(1) // block
    yield scales[:, :whole].unsqueeze(2)
    if rows.size(1) % block:
        yield scales[:, whole:].unsqueeze(2)


# -- where it lies: behind the values of the same row, on the next boundary


def payload_size(used: int, blocks: int) -> int:
    """Bytes of a row whose values take ``used`` of them."""
    return _aligned(used) + _SCALE_BYTES * blocks


def empty_payload(used: int, scales: torch.Tensor) -> torch.Tensor:
    """Rows of bytes with ``scales``, ``(num_rows, num_blocks)``, in place, and ``[:, :used]`` yet to be written."""
    rows, blocks = scales.shape
    payload = torch.empty(rows, payload_size(used, blocks), dtype=torch.uint8, device=scales.device)
    payload[:, used : _aligned(used)] = 0
    payload[:, _aligned(used) :] = scales.view(-1).view(torch.uint8).view(rows, _SCALE_BYTES * blocks)
    return payload


def scales_in(payload: torch.Tensor, used: int, blocks: int) -> torch.Tensor:
    """The scales of a payload, which may be strided along dim 0."""
    scales = payload[:, _aligned(used) : payload_size(used, blocks)]
    return scales.reshape(-1).view(torch.float32).view(payload.size(0), blocks)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _SCALE_BYTES) * _SCALE_BYTES
