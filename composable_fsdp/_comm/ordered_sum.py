"""Sums that are the same on every rank and from run to run: in fp32, in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["add_up"]

_ADDED_AT_ONCE = 1 << 18
"""Elements that are added up at a time, so that the sum stays in cache."""


def add_up(summands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The sum in their order; floats narrower than fp32 in fp32, rounded once at the end if ``out`` is narrow too."""
    if len(summands) == 1:
        out.copy_(summands[0])
        return
    narrow = out.dtype.is_floating_point and out.dtype.itemsize < torch.float32.itemsize
    alike = not narrow and summands[0].dtype == out.dtype
    for start in range(0, out.numel(), _ADDED_AT_ONCE):
        run = slice(start, start + _ADDED_AT_ONCE)
        place = out[run]
        if alike:
            total = torch.add(summands[0][run], summands[1][run], out=place)
        else:
            total = summands[0][run].float() if narrow else place.copy_(summands[0][run])
        for summand in summands[2 if alike else 1 :]:
            total.add_(summand[run])
        if narrow:
            place.copy_(total)
