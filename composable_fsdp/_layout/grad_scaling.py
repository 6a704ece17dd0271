"""How gradients are averaged: which operation on the wire, and what is divided before and after it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["ReduceOp", "Reduction", "divide", "plan_reduction"]

_LARGEST_EXPONENT = 100
"""Of powers of two whose reciprocals are normal numbers in fp32, in which products of narrower floats are made too."""


class ReduceOp(Enum):
    """The operation that a communicator applies while it reduces."""

    SUM = "sum"
    AVERAGE = "average"


@dataclass(frozen=True, slots=True)
class Reduction:
    """Divide by ``pre_divide``, reduce with ``op`` over every axis, divide by ``post_divide``.

    Invariant: for ``ReduceOp.SUM`` the two divisors multiply to the divide factor.
    """

    op: ReduceOp
    pre_divide: float = 1.0
    post_divide: float = 1.0


def plan_reduction(
    dtype: torch.dtype, num_ranks: int, *, averages: bool, divide_factor: float | None = None, sum_only: bool = False
) -> Reduction:
    """The reduction of gradients of ``dtype`` over ``num_ranks`` data-parallel ranks.

    Args:
        dtype: dtype on the wire. A 16-bit float with few exponent bits (fp16) is divided in two halves, so that neither
            the sum overflows nor the summands underflow.
        num_ranks: shard ranks times replicate ranks.
        averages: whether the communicators can average by themselves.
        divide_factor: what the sum is divided by; ``None`` is ``num_ranks``, the mean.
        sum_only: never ask the communicator to average.
    """
    factor = float(num_ranks if divide_factor is None else divide_factor)
    if dtype not in (torch.float32, torch.float64, torch.bfloat16) and dtype.is_floating_point:
        pre = _half_way_divisor(factor)
        return Reduction(ReduceOp.SUM, pre_divide=pre, post_divide=factor / pre)
    if averages and not sum_only and factor == num_ranks:
        return Reduction(ReduceOp.AVERAGE)
    return Reduction(ReduceOp.SUM, post_divide=factor)


def divide(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    """``tensor``, divided in place. Where the reciprocal is a power of two, it is a product with that: the bits are
    the same, and processors divide more slowly.
    """
    if divisor == 1.0:
        return tensor
    mantissa, exponent = math.frexp(divisor)
    exact = abs(mantissa) == 0.5 and abs(exponent) <= _LARGEST_EXPONENT
    return tensor.mul_(1.0 / divisor) if exact else tensor.div_(divisor)


def _half_way_divisor(factor: float) -> float:
    """The smallest power of two that reaches the square root of ``factor``, so that dividing by it is exact."""
    divisor = 1.0
    while factor / divisor > divisor:
        divisor *= 2
    return divisor
