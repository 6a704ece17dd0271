"""Gradient averaging: the reduce operation, its sum in rank order, and the divisions before and after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["ReduceOp", "Reduction", "add_up", "divide", "plan_reduction"]

_LARGEST_EXPONENT = 100
"""Largest exponent of a power of two whose reciprocal is a normal fp32 number. Narrower floats multiply in fp32 too."""

_CHUNK_NUMEL = 1 << 18
"""The number of elements summed at a time, so that the sum stays in cache."""


class ReduceOp(Enum):
    """The operation that a communicator reduces with."""

    SUM = "sum"
    AVERAGE = "average"


@dataclass(frozen=True, slots=True)
class Reduction:
    """Divide by ``pre_divide``, reduce with ``op`` over every axis, divide by ``post_divide``.

    Invariant: for ``ReduceOp.SUM`` the product of the two divisors is the divide factor.
    """

    op: ReduceOp
    pre_divide: float = 1.0
    post_divide: float = 1.0


def plan_reduction(
    dtype: torch.dtype, num_ranks: int, *, averages: bool, divide_factor: float | None = None, sum_only: bool = False
) -> Reduction:
    """Return how to reduce gradients of ``dtype`` over ``num_ranks`` data-parallel ranks.

    Args:
        dtype: dtype on the wire. For a 16-bit float with few exponent bits (fp16) the division is split in two, before
            and after the sum, so that neither the sum overflows nor the summands underflow.
        num_ranks: shard ranks times replicate ranks.
        averages: True if the communicators support ``ReduceOp.AVERAGE``.
        divide_factor: the divisor of the sum; ``None`` is ``num_ranks``, the mean.
        sum_only: never use ``ReduceOp.AVERAGE``.
    """
    factor = float(num_ranks if divide_factor is None else divide_factor)
    if dtype not in (torch.float32, torch.float64, torch.bfloat16) and dtype.is_floating_point:
        pre = _half_way_divisor(factor)
        return Reduction(ReduceOp.SUM, pre_divide=pre, post_divide=factor / pre)
    if averages and not sum_only and factor == num_ranks:
        return Reduction(ReduceOp.AVERAGE)
    return Reduction(ReduceOp.SUM, post_divide=factor)


def add_up(summands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Sum ``summands`` in order into ``out``: in fp32 if they are narrower, rounded once if ``out`` is narrow too.

    In rank order, the sum is the same on every rank and in every run.
    """
    if len(summands) == 1:
        out.copy_(summands[0])
        return
    narrow = out.dtype.is_floating_point and out.dtype.itemsize < torch.float32.itemsize
    same_dtype = not narrow and summands[0].dtype == out.dtype
    for start in range(0, out.numel(), _CHUNK_NUMEL):
        chunk = slice(start, start + _CHUNK_NUMEL)
        target = out[chunk]
        if same_dtype:
            total = torch.add(summands[0][chunk], summands[1][chunk], out=target)
        else:
            total = summands[0][chunk].float() if narrow else target.copy_(summands[0][chunk])
        for summand in summands[2 if same_dtype else 1 :]:
            total.add_(summand[chunk])
        if narrow:
            target.copy_(total)


def divide(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide ``tensor`` in place and return it.

    If the reciprocal is a power of two this multiplies instead: the result is bitwise the same, and faster.
    """
    if divisor == 1.0:
        return tensor
    mantissa, exponent = math.frexp(divisor)
    exact = abs(mantissa) == 0.5 and abs(exponent) <= _LARGEST_EXPONENT
    return tensor.mul_(1.0 / divisor) if exact else tensor.div_(divisor)


def _half_way_divisor(factor: float) -> float:
    """Return the smallest power of two not below the square root of ``factor``. Dividing by it is exact."""
    divisor = 1.0
    while factor / divisor > divisor:
        divisor *= 2
    return divisor
