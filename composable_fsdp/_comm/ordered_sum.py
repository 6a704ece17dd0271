"""Deterministic sums: in fp32 and in rank order, so that they are the same on every rank and in every run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["add_up"]

_CHUNK_NUMEL = 1 << 18
"""The number of elements summed at a time, so that the sum stays in cache."""


def add_up(summands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Sum ``summands`` in order into ``out``: in fp32 if they are narrower, rounded once if ``out`` is narrow too."""
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
