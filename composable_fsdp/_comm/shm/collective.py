"""What ranks of one host do together: what each stages for the others, and what it makes of what they staged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from composable_fsdp._comm.communicator import Transfer
from composable_fsdp._comm.ordered_sum import add_up
from composable_fsdp._comm.shm.segment import SLOT_BYTES, Segment
from composable_fsdp._comm.shm.staging import Piece, Round, StagedRange, plan_rounds

__all__ = ["Barrier", "Collective", "Operation", "all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


class Operation(Protocol):
    """One entry of the sequence in which all ranks do the same."""

    @property
    def label(self) -> str:
        """What errors call it."""
        ...

    @property
    def nbytes(self) -> int:
        """Its size in bytes, on which ranks must agree."""
        ...

    @property
    def shape(self) -> int:
        """A hash of how these bytes are divided, on which ranks must agree."""
        ...

    @property
    def num_rounds(self) -> int:
        """At least one."""
        ...

    @property
    def segment(self) -> Segment | None:
        """Memory that this rank shows to all others."""
        ...

    @property
    def staged_bytes(self) -> int:
        """What it needs of a staging block, from its start."""
        ...

    def stage(self, round: int, memory: torch.Tensor) -> None:
        """Writes what peers get in ``round`` into this rank's staging block."""
        ...

    def deliver(self, round: int, memories: Sequence[torch.Tensor | None]) -> None:
        """Takes what every rank staged for ``round`` to its place."""
        ...


class _Moved(NamedTuple):
    """One tensor in and one out, 1-d. Either is one row, or one row of ``numel`` for every rank."""

    output: torch.Tensor
    input: torch.Tensor
    numel: int


class Collective:
    """A collective made of two choices: each peer gets a row of its own or all get one; rows are added up or placed.

    Its rounds take turns in the two slots of a staging block. Final.
    """

    segment: Segment | None = None

    def __init__(self, label: str, rank: int, size: int, moved: Sequence[_Moved], *, to_each: bool, sums: bool) -> None:
        self.label = label
        self._rank, self._size, self._to_each, self._sums = rank, size, to_each, sums
        # Data are written below autograd, as backends do: version counters stay.
        self._moved = [_Moved(m.output.data, m.input.data, m.numel) for m in moved]
        rows = size - 1 if to_each else 1
        extents = tuple(StagedRange(m.numel, m.input.itemsize, rows) for m in moved)
        self._rounds: tuple[Round, ...] = plan_rounds(extents, SLOT_BYTES)
        self.nbytes = sum(numel * itemsize for numel, itemsize, _ in extents)
        self.shape = hash(extents)

    @property
    def num_rounds(self) -> int:
        return len(self._rounds)

    @property
    def staged_bytes(self) -> int:
        if len(self._rounds) > 1:
            return 2 * SLOT_BYTES
        return max((p.offset + p.stride * (self._size if self._to_each else 1) for p in self._rounds[0]), default=0)

    def stage(self, round: int, memory: torch.Tensor) -> None:
        rows = [row for row in range(self._size) if row != self._rank] if self._to_each else [0]
        with torch.inference_mode():
            for piece in self._rounds[round]:
                tensor, numel = self._moved[piece.tensor].input, self._moved[piece.tensor].numel
                for place, row in enumerate(rows):
                    staged = _staged(memory, round, piece, place, tensor.dtype)
                    staged.copy_(tensor[row * numel + piece.start : row * numel + piece.stop])

    def deliver(self, round: int, memories: Sequence[torch.Tensor | None]) -> None:
        with torch.inference_mode():  # whose tensors may be written anywhere
            for piece in self._rounds[round]:
                self._deliver(round, piece, memories)

    def _deliver(self, round: int, piece: Piece, memories: Sequence[torch.Tensor | None]) -> None:
        output, _, numel = self._moved[piece.tensor]
        parts = [self._part(round, piece, source, memory) for source, memory in enumerate(memories)]
        if self._sums:
            add_up(parts, output[piece.start : piece.stop])
            return
        for source, part in enumerate(parts):
            place = output[source * numel + piece.start : source * numel + piece.stop]
            if place.data_ptr() != part.data_ptr():
                place.copy_(part)

    def _part(self, round: int, piece: Piece, source: int, memory: torch.Tensor | None) -> torch.Tensor:
        """What ``source`` has for this rank."""
        _, tensor, numel = self._moved[piece.tensor]
        in_place = self._sums and not self._to_each  # then the sum overwrites the tensor, but not what is staged of it
        if source == self._rank and not in_place:
            row = self._rank if self._to_each else 0
            return tensor[row * numel + piece.start : row * numel + piece.stop]
        assert memory is not None
        place = (self._rank if self._rank < source else self._rank - 1) if self._to_each else 0
        return _staged(memory, round, piece, place, tensor.dtype)


def _staged(memory: torch.Tensor, round: int, piece: Piece, place: int, dtype: torch.dtype) -> torch.Tensor:
    begin = round % 2 * SLOT_BYTES + piece.offset + place * piece.stride
    return memory[begin : begin + (piece.stop - piece.start) * dtype.itemsize].view(dtype)


def all_gather(rank: int, size: int, transfers: Sequence[Transfer], label: str) -> Collective:
    moved = [_Moved(t.output, t.input, t.input.numel()) for t in transfers]
    return Collective(label, rank, size, moved, to_each=False, sums=False)


def reduce_scatter(rank: int, size: int, transfers: Sequence[Transfer], label: str) -> Collective:
    moved = [_Moved(t.output, t.input, t.output.numel()) for t in transfers]
    return Collective(label, rank, size, moved, to_each=True, sums=True)


def all_to_all(rank: int, size: int, transfers: Sequence[Transfer], label: str) -> Collective:
    moved = [_Moved(t.output, t.input, t.input.numel() // size) for t in transfers]
    return Collective(label, rank, size, moved, to_each=True, sums=False)


def all_reduce(rank: int, size: int, tensors: Sequence[torch.Tensor], label: str) -> Collective:
    moved = [_Moved(tensor, tensor, tensor.numel()) for tensor in tensors]
    return Collective(label, rank, size, moved, to_each=False, sums=True)


class Barrier:
    """Ranks wait until all have come; rank 0 may bring memory for all of them. Final.

    Attributes:
        memory: after the meeting, what rank 0 brought.
    """

    num_rounds = 1
    staged_bytes = 0
    shape = 0

    def __init__(self, label: str, nbytes: int = 0, segment: Segment | None = None) -> None:
        self.label, self.nbytes, self.segment = label, nbytes, segment
        self.memory: torch.Tensor | None = None

    def stage(self, round: int, memory: torch.Tensor) -> None:
        """There is nothing to stage."""

    def deliver(self, round: int, memories: Sequence[torch.Tensor | None]) -> None:
        self.memory = memories[0]
