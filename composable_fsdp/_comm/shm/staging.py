"""In which rounds tensors pass through a slot of staging memory, and where each lies there."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

__all__ = ["Piece", "Round", "StagedRange", "plan_rounds"]

_ALIGNMENT = 64
"""Bytes: a cache line, so that what one rank writes is not in the line of what another reads."""


class StagedRange(NamedTuple):
    """How much of one tensor is staged: ``rows`` (one for all peers, or one for each) of ``numel`` elements."""

    numel: int
    itemsize: int
    rows: int


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of every row of one tensor; row i lies at ``offset + i * stride`` bytes."""

    tensor: int
    start: int
    stop: int
    offset: int
    stride: int


Round = tuple[Piece, ...]


@lru_cache(maxsize=1024)
def plan_rounds(extents: tuple[StagedRange, ...], capacity: int) -> tuple[Round, ...]:
    """Cuts tensors into pieces such that those of a round fit into ``capacity`` bytes together.

    Invariant: the pieces of a tensor, in order, tile its elements exactly. There is a round even if there is nothing to
    move, as ranks meet in it.
    """
    rounds: list[Round] = []
    pieces: list[Piece] = []
    used = 0
    for index, (numel, itemsize, rows) in enumerate(extents):
        whole = capacity // rows // _ALIGNMENT * _ALIGNMENT // itemsize
        start = 0
        while start < numel:
            room = (capacity - used) // rows // _ALIGNMENT * _ALIGNMENT // itemsize
            if room < min(numel - start, whole // 8):  # not worth a piece of its own
                rounds.append(tuple(pieces))
                pieces, used = [], 0
                continue
            stop = min(numel, start + room)
            stride = -(-(stop - start) * itemsize // _ALIGNMENT) * _ALIGNMENT
            pieces.append(Piece(index, start, stop, used, stride))
            used += rows * stride
            start = stop
    return (*rounds, tuple(pieces))
