"""Operations of ranks on one host: what each rank stages in shared memory, and how it uses what the others staged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

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


class _Pair(NamedTuple):
    """A 1-d output and input. Each is one row of ``numel`` elements, or one such row per rank."""

    output: torch.Tensor
    input: torch.Tensor
    numel: int


class StagedCollective:
    """A collective in which peers receive different rows or the same row, and sum or concatenate them.

    Its rounds alternate between the two slots of a staging block.

    Attributes:
        label: the name of the operation in errors.
        num_rounds: the number of rounds, at least one.
        nbytes: the size in bytes, which must be the same on all ranks.
        shape: a hash of the tensors' sizes, which must be the same on all ranks.
        segment: memory that this rank shares with all others, or ``None``.
    """

    segment: Segment | None = None

    def __init__(self, label: str, rank: int, size: int, pairs: Sequence[_Pair], *, to_each: bool, sums: bool) -> None:
        self.label = label
        self._rank, self._size, self._to_each, self._sums = rank, size, to_each, sums
        # Written below autograd, as backends do, so that version counters do not change.
        self._pairs = [_Pair(m.output.data, m.input.data, m.numel) for m in pairs]
        rows = size - 1 if to_each else 1
        ranges = tuple(StagedRange(m.numel, m.input.itemsize, rows) for m in pairs)
        self._rounds: tuple[Round, ...] = plan_rounds(ranges, SLOT_BYTES)
        self.num_rounds = len(self._rounds)
        self.nbytes = sum(numel * itemsize for numel, itemsize, _ in ranges)
        self.shape = hash(ranges)

    @property
    def staged_bytes(self) -> int:
        """The bytes used in this rank's staging block, from its start."""
        if len(self._rounds) > 1:
            return 2 * SLOT_BYTES
        return max((p.offset + p.stride * (self._size if self._to_each else 1) for p in self._rounds[0]), default=0)

    def stage(self, round: int, memory: torch.Tensor) -> None:
        """Copy in what peers receive in ``round``, to this rank's staging block ``memory``."""
        rows = [row for row in range(self._size) if row != self._rank] if self._to_each else [0]
        with torch.inference_mode():
            for piece in self._rounds[round]:
                tensor, numel = self._pairs[piece.tensor].input, self._pairs[piece.tensor].numel
                for index, row in enumerate(rows):
                    staged = _staged(memory, round, piece, index, tensor.dtype)
                    staged.copy_(tensor[row * numel + piece.start : row * numel + piece.stop])

    def deliver(self, round: int, memories: Sequence[torch.Tensor | None]) -> None:
        """Copy out, or sum, what every rank staged for ``round``; ``memories`` are the staging blocks by rank."""
        with torch.inference_mode():  # inference mode permits in-place writes to any tensor
            for piece in self._rounds[round]:
                self._deliver(round, piece, memories)

    def _deliver(self, round: int, piece: Piece, memories: Sequence[torch.Tensor | None]) -> None:
        output, _, numel = self._pairs[piece.tensor]
        parts = [self._contribution(round, piece, source, memory) for source, memory in enumerate(memories)]
        if self._sums:
            add_up(parts, output[piece.start : piece.stop])
            return
        for source, part in enumerate(parts):
            target = output[source * numel + piece.start : source * numel + piece.stop]
            if target.data_ptr() != part.data_ptr():
                target.copy_(part)

    def _contribution(self, round: int, piece: Piece, source: int, memory: torch.Tensor | None) -> torch.Tensor:
        """Return what ``source`` contributes to this rank's output in ``round``."""
        _, tensor, numel = self._pairs[piece.tensor]
        in_place = self._sums and not self._to_each  # the sum overwrites the tensor, but not its staged copy
        if source == self._rank and not in_place:
            row = self._rank if self._to_each else 0
            return tensor[row * numel + piece.start : row * numel + piece.stop]
        assert memory is not None
        index = (self._rank if self._rank < source else self._rank - 1) if self._to_each else 0
        return _staged(memory, round, piece, index, tensor.dtype)


def _staged(memory: torch.Tensor, round: int, piece: Piece, index: int, dtype: torch.dtype) -> torch.Tensor:
    begin = round % 2 * SLOT_BYTES + piece.offset + index * piece.stride
    return memory[begin : begin + (piece.stop - piece.start) * dtype.itemsize].view(dtype)


def collective(kind: Collective, rank: int, size: int, transfers: Sequence[Transfer], label: str) -> StagedCollective:
    """Return the operation for a collective of ``kind``, which is no barrier."""
    rows = size if kind is Collective.ALL_TO_ALL else 1  # in the smaller of two tensors
    pairs = [_Pair(t.output, t.input, min(t.output.numel(), t.input.numel()) // rows) for t in transfers]
    to_each = kind in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
    sums = kind in (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
    return StagedCollective(label, rank, size, pairs, to_each=to_each, sums=sums)


class Barrier:
    """An operation that completes when all ranks have launched it; rank 0 may share memory with it.

    Attributes:
        memory: the memory that rank 0 shared, once the barrier is done.
    """

    num_rounds = 1
    staged_bytes = 0
    shape = 0

    def __init__(self, label: str, nbytes: int = 0, segment: Segment | None = None) -> None:
        self.label, self.nbytes, self.segment = label, nbytes, segment
        self.memory: torch.Tensor | None = None

    def stage(self, round: int, memory: torch.Tensor) -> None:
        """Do nothing."""

    def deliver(self, round: int, memories: Sequence[torch.Tensor | None]) -> None:
        self.memory = memories[0]


Operation = StagedCollective | Barrier
"""One entry of the sequence of operations, which is the same on all ranks."""
