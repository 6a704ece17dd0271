"""Reductions whose summands travel encoded: each rank sends every other one its part, and adds up what it gets.

What one bucket sends is a *parcel*. The parcels of all buckets that share a communicator are columns of one message of
bytes, with one row per rank, so that a group's gradients travel in one all-to-all whatever their codecs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from composable_fsdp._comm.communicator import Communicator, Transfer, Work
from composable_fsdp._layout.bucket_layout import ALIGNMENT_BYTES, aligned_bytes
from composable_fsdp.codecs._encoder import Encoder

__all__ = ["EncodedAllReduce", "EncodedParcel", "Exchange", "Parcel", "aligned_piece"]


class Parcel(Protocol):
    """What one bucket sends and makes of what it gets."""

    @property
    def row_bytes(self) -> int:
        """Bytes for each rank; the same on all ranks."""
        ...

    def write(self, rows: torch.Tensor) -> None:
        """Fills ``rows``, ``(num_ranks, row_bytes)`` of uint8, contiguous along the last dim only."""
        ...

    def read(self, rows: torch.Tensor) -> None:
        """Takes what came, in the same form."""
        ...


class Exchange:
    """Parcels on their way: encoded when this is made; :meth:`launch`, wait for its work, :meth:`finish`.

    What is sent stays alive as long as this does, for it may come from the memory of another stream.
    """

    def __init__(self, parcels: Sequence[Parcel], communicator: Communicator, device: torch.device) -> None:
        self._parcels = parcels
        self._communicator = communicator
        self._columns: list[slice] = []
        end = 0
        for parcel in parcels:
            self._columns.append(slice(end, end + parcel.row_bytes))
            end += aligned_bytes(parcel.row_bytes)
        self._shape = (communicator.size, end)
        self._sent = communicator.allocate(communicator.size * end, torch.uint8, device)
        self._received: torch.Tensor | None = None
        for parcel, columns in zip(parcels, self._columns, strict=True):
            parcel.write(self._sent.view(self._shape)[:, columns])

    def launch(self, label: str) -> Work:
        """Sends."""
        self._received = self._communicator.allocate(self._sent.numel(), torch.uint8, self._sent.device)
        return self._communicator.all_to_all([Transfer(self._received, self._sent)], label)

    def finish(self) -> None:
        """Decodes and adds up what came."""
        received, self._received = self._received, None
        assert received is not None
        for parcel, columns in zip(self._parcels, self._columns, strict=True):
            parcel.read(received.view(self._shape)[:, columns])


@dataclass
class EncodedParcel:
    """Values that are encoded, and flags that are not.

    Args:
        encoder: of the values.
        take_values: gives ``(num_ranks, numel)`` fp32, the r-th row for rank r. Called once, when it is time to send.
        total: ``(numel,)``, where the sum of the ranks' values for this one goes.
        flags: ``(num_flags,)``, what this rank says; becomes not zero where any rank's is not.
    """

    encoder: Encoder
    take_values: Callable[[], torch.Tensor]
    total: torch.Tensor
    flags: torch.Tensor

    @property
    def row_bytes(self) -> int:
        return self.encoder.row_bytes + self.flags.numel()

    def write(self, rows: torch.Tensor) -> None:
        split = self.encoder.row_bytes
        self.encoder.encode(self.take_values(), rows[:, :split])
        rows[:, split:] = self.flags.ne(0)

    def read(self, rows: torch.Tensor) -> None:
        split = self.encoder.row_bytes
        self.encoder.decode_sum(rows[:, :split], self.total)
        self.flags.copy_(rows[:, split:].any(dim=0))


class EncodedAllReduce:
    """An all-reduce in two encoded legs: pieces are exchanged and added up, and their sums, encoded again, gathered.

    Every rank decodes the same bytes, its own included, so all have the same result to the bit.

    Args:
        pieces: encodes a row per rank.
        sums: encodes one of them.
        values: ``(numel,)`` fp32; holds the result once :meth:`finish` has run.
        flags: as of :class:`EncodedParcel`.
    """

    def __init__(self, pieces: Encoder, sums: Encoder, values: torch.Tensor, flags: torch.Tensor) -> None:
        self._sums = sums
        self._values = values
        self._shape = (pieces.num_rows, pieces.numel)
        self._total = values.new_empty(pieces.numel)
        self._received: torch.Tensor | None = None
        self.parcel = EncodedParcel(pieces, self._pieces, self._total, flags)

    def _pieces(self) -> torch.Tensor:
        num_rows, numel = self._shape
        rows = self._values.new_zeros(num_rows * numel)
        rows[: self._values.numel()] = self._values
        return rows.view(num_rows, numel)

    def gather(self, communicator: Communicator) -> Transfer:
        """What travels once the sums are there."""
        device, nbytes = self._values.device, self._sums.row_bytes
        sent = communicator.allocate(nbytes, torch.uint8, device)
        self._sums.encode(self._total.view(1, -1), sent.view(1, nbytes))
        self._received = communicator.allocate(communicator.size * nbytes, torch.uint8, device)
        return Transfer(self._received, sent)

    def finish(self) -> None:
        """Puts the gathered sums where the values were."""
        received, self._received = self._received, None
        assert received is not None
        rows = received.view(self._shape[0], self._sums.row_bytes)
        self._values.copy_(self._sums.decode(rows).view(-1)[: self._values.numel()])


def aligned_piece(numel: int, num_pieces: int) -> int:
    """Elements of each of ``num_pieces`` pieces, together at least ``numel``, on boundaries of fp32 vectors."""
    step = ALIGNMENT_BYTES // torch.float32.itemsize
    return -(-numel // (num_pieces * step)) * step
