"""Scales of codecs: their size, their application to blocks, and their place in a payload."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from composable_fsdp.errors import ConfigurationError

_SCALE_BYTES = 4
"""Bytes of a scale, which is fp32."""
_FLOAT = torch.finfo(torch.float32)


def check_block(block: int) -> None:
    """Raise ``ConfigurationError`` unless ``block`` is a number of elements."""
    if type(block) is not int or block < 1:
        raise ConfigurationError(f"a block is a whole number of elements, at least one, not {block!r}.")


def num_blocks(numel: int, block: int) -> int:
    """Return the number of blocks in a row of ``numel`` elements; the last one may be shorter."""
    return -(-numel // block)


# -- scaling


def scales_of(rows: torch.Tensor, block: int, limit: float) -> torch.Tensor:
    """Return the scales, ``(num_rows, num_blocks)`` fp32, that divide ``rows``, ``(num_rows, numel)``, into ``limit``.

    The quotients may exceed ``limit`` by rounding, a few units of the last place. A scale is zero if its block has only
    zeros, or values so small that the scale would be subnormal and inexact. It is nan if the block has a nan or an
    infinity.
    """
    # Two reductions read the rows twice; abs() would write them too.
    largest = torch.cat([torch.maximum(part.amax(2), -part.amin(2)) for part, _ in _blocks(rows, block)], dim=1).float()
    # Rounded up, the scale of the largest floats would take their product beyond what a float can be.
    scales = (largest / limit).clamp_(max=_FLOAT.max / limit * (1 - _FLOAT.eps))
    return torch.where(largest.isfinite(), scales.masked_fill(scales < _FLOAT.tiny, 0.0), torch.nan)


def scaled_down(rows: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Return ``rows`` in fp32, each block divided by its scale; zeros where the scale is zero or nan."""
    out = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    divisors = torch.where(scales > 0, scales, torch.inf)
    for (values, at), (part, _) in zip(_blocks(rows, block), _blocks(out, block), strict=True):
        divisor = divisors[:, at].unsqueeze(2)
        if torch.compiler.is_compiling():  # the compiler fuses this, and cannot write to views with ``out``
            part.copy_(values / divisor)
        else:
            torch.div(values, divisor, out=part)
    return out.nan_to_num_(nan=0.0)


def scale_up_(values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply each block of ``values`` by its scale, in place."""
    for part, at in _blocks(values, block):
        part.mul_(scales[:, at].unsqueeze(2))
    return values


def _blocks(rows: torch.Tensor, block: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield views of full blocks, ``(num_rows, n, block)``, and of a shorter last one, ``(num_rows, 1, rest)``.

    Each comes with the columns of its scales.
    """
    # One padded view would copy a large message. Torch's compiler refuses a view without elements.
    whole, rest = divmod(rows.size(1), block)
    if whole or not rest:
        yield rows[:, : whole * block].unflatten(1, (whole, block)), slice(0, whole)
    if rest:
        yield rows[:, whole * block :].unsqueeze(1), slice(whole, whole + 1)


# -- payload layout: the scales follow the values of the same row, aligned


def payload_size(used: int, blocks: int) -> int:
    """Return the bytes of a row whose values take ``used`` bytes."""
    return _aligned(used) + _SCALE_BYTES * blocks


def empty_payload(used: int, scales: torch.Tensor) -> torch.Tensor:
    """Return rows of bytes with ``scales``, ``(num_rows, num_blocks)``, in place and ``[:, :used]`` not yet written."""
    rows, blocks = scales.shape
    payload = torch.empty(rows, payload_size(used, blocks), dtype=torch.uint8, device=scales.device)
    payload[:, used : _aligned(used)] = 0
    payload[:, _aligned(used) :] = scales.view(-1).view(torch.uint8).view(rows, _SCALE_BYTES * blocks)
    return payload


def scales_in(payload: torch.Tensor, used: int, blocks: int) -> torch.Tensor:
    """Return the scales of a payload, which may be strided along dim 0."""
    scales = payload[:, _aligned(used) : payload_size(used, blocks)]
    return scales.reshape(-1).view(torch.float32).view(payload.size(0), blocks)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _SCALE_BYTES) * _SCALE_BYTES
