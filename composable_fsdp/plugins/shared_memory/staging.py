"""Plan how tensors pass through a slot of staging memory in rounds, and their offsets in it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

__all__ = ["Piece", "Round", "StagedRange", "plan_rounds"]

_ALIGNMENT = 64
"""Bytes of a cache line. Pieces are aligned, so that no two ranks write to and read from the same line."""


class StagedRange(NamedTuple):
    """The staged elements of one tensor: ``rows`` (one for all peers, or one for each) of ``numel`` elements."""

    numel: int
    itemsize: int
    rows: int


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of every row of one tensor. Row i is staged at byte ``offset + i * stride``."""

    tensor: int
    start: int
    stop: int
    offset: int
    stride: int


Round = tuple[Piece, ...]


@lru_cache(maxsize=1024)
def plan_rounds(ranges: tuple[StagedRange, ...], capacity: int) -> tuple[Round, ...]:
    """Cut tensors into pieces, and assign these to rounds of at most ``capacity`` bytes.

    Invariant: the pieces of a tensor, in order, tile its elements exactly. There is at least one round, even for no
    elements, because ranks synchronize in it.
    """
    rounds: list[Round] = []
    pieces: list[Piece] = []
    used = 0
    for index, (numel, itemsize, rows) in enumerate(ranges):
        full_room = capacity // rows // _ALIGNMENT * _ALIGNMENT // itemsize
        start = 0
        while start < numel:
            room = (capacity - used) // rows // _ALIGNMENT * _ALIGNMENT // itemsize
            if room < min(numel - start, full_room // 8):  # too small a piece
                rounds.append(tuple(pieces))
                pieces, used = [], 0
                continue
            stop = min(numel, start + room)
            stride = -(-(stop - start) * itemsize // _ALIGNMENT) * _ALIGNMENT
            pieces.append(Piece(index, start, stop, used, stride))
            used += rows * stride
            start = stop
    return (*rounds, tuple(pieces))
