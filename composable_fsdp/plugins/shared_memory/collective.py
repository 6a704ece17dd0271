"""Operations of ranks on one host: what each rank stages in shared memory, and how it uses what the others staged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

import torch

from composable_fsdp._core.comm import Collective, Transfer
from composable_fsdp._core.layout import add_up
from composable_fsdp.plugins.shared_memory.segment import SLOT_BYTES, Segment

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


_MOST_BYTES = 480
"""Cut to this, the descriptions of ``NUM_SLOTS`` unread steps fit into a socket. They are longer if the label names
many modules.
"""


def described(label: str, sizes: str) -> bytes:
    """Return what ranks compare of an operation: ``label`` and ``sizes``, or the beginning and a checksum if long."""
    text = (f"{label} ({sizes})" if sizes else label).encode()
    return text if len(text) <= _MOST_BYTES else text[: _MOST_BYTES - 16] + f"... {crc32(text):08x}".encode()


class _Pair(NamedTuple):
    """A 1-d output and input. Each is one row of ``numel`` elements, or one such row per rank."""

    output: torch.Tensor
    input: torch.Tensor
    numel: int


class StagedCollective:
    """A collective in which peers receive different rows or the same row, and sum or concatenate them.

    Attributes:
        label: the name of the operation in errors.
        about: the description that ranks compare.
        rounds: at least one. Each is staged in one slot.
        segment: memory that this rank shares with all others, or ``None``.
    """

    segment: Segment | None = None

    def __init__(self, kind: Collective, rank: int, size: int, transfers: Sequence[Transfer], label: str) -> None:
        self.label, self._rank, self._size = label, rank, size
        self._to_each = kind in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
        self._sums = kind in (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
        rows = size if kind is Collective.ALL_TO_ALL else 1  # in the smaller of two tensors
        # Written below autograd, as backends do, so that version counters do not change.
        self._pairs = [
            _Pair(t.output.data, t.input.data, min(t.output.numel(), t.input.numel()) // rows) for t in transfers
        ]
        staged_rows = size - 1 if self._to_each else 1
        ranges = tuple([StagedRange(m.numel, m.input.itemsize, staged_rows) for m in self._pairs])
        self.rounds = plan_rounds(ranges, SLOT_BYTES)
        nbytes = sum([numel * itemsize for numel, itemsize, _ in ranges])
        self.about = described(label, f"{nbytes} bytes in {len(ranges)} tensors, {hash(ranges) & 0xFFFF:04x}")

    def stage(self, round: int, slot: torch.Tensor) -> None:
        """Copy in what peers receive in ``round``, to this rank's ``slot``."""
        rows = [row for row in range(self._size) if row != self._rank] if self._to_each else [0]
        with torch.inference_mode():
            for piece in self.rounds[round]:
                _, tensor, numel = self._pairs[piece.tensor]
                for index, row in enumerate(rows):
                    staged = _staged(slot, piece, index, tensor.dtype)
                    staged.copy_(tensor[row * numel + piece.start : row * numel + piece.stop])

    def deliver(self, round: int, slots: Sequence[torch.Tensor]) -> None:
        """Copy out, or sum, what every rank staged for ``round`` in its slot; ``slots`` are by rank."""
        with torch.inference_mode():  # inference mode permits in-place writes to any tensor
            for piece in self.rounds[round]:
                output, _, numel = self._pairs[piece.tensor]
                parts = [self._contribution(piece, source, slot) for source, slot in enumerate(slots)]
                if self._sums:
                    add_up(parts, output[piece.start : piece.stop])
                    continue
                for source, part in enumerate(parts):
                    target = output[source * numel + piece.start : source * numel + piece.stop]
                    if target.data_ptr() != part.data_ptr():
                        target.copy_(part)

    def _contribution(self, piece: Piece, source: int, slot: torch.Tensor) -> torch.Tensor:
        """Return what ``source`` contributes to this rank's output."""
        _, tensor, numel = self._pairs[piece.tensor]
        in_place = self._sums and not self._to_each  # the sum overwrites the tensor, but not its staged copy
        if source == self._rank and not in_place:
            row = self._rank if self._to_each else 0
            return tensor[row * numel + piece.start : row * numel + piece.stop]
        index = (self._rank if self._rank < source else self._rank - 1) if self._to_each else 0
        return _staged(slot, piece, index, tensor.dtype)


def _staged(slot: torch.Tensor, piece: Piece, index: int, dtype: torch.dtype) -> torch.Tensor:
    begin = piece.offset + index * piece.stride
    return slot[begin : begin + (piece.stop - piece.start) * dtype.itemsize].view(dtype)


class Barrier:
    """An operation that completes when all ranks have launched it; each rank may share memory with it.

    Attributes:
        memories: the memory of each rank, once the barrier is done; a staging slot for one that shared none.
    """

    rounds: tuple[Round, ...] = ((),)

    def __init__(self, label: str, nbytes: int = 0, segment: Segment | None = None) -> None:
        self.label, self.about, self.segment = label, described(label, f"{nbytes} bytes" if nbytes else ""), segment
        self.memories: Sequence[torch.Tensor] = ()

    def stage(self, round: int, slot: torch.Tensor) -> None: ...

    def deliver(self, round: int, slots: Sequence[torch.Tensor]) -> None:
        self.memories = slots


Operation = StagedCollective | Barrier
"""One entry of the sequence of operations, which is the same on all ranks."""
