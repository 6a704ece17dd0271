"""Reductions of encoded values: an all-to-all of encoded shards, which each rank decodes and sums.

Every bucket contributes one encoded message. The messages of all buckets that share a communicator are columns of one
byte tensor with one row per rank. So a group's gradients take one all-to-all, whatever their codecs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from composable_fsdp._comm.communicator import Collective, Communicator, Transfer, Work
from composable_fsdp._layout.bucket_layout import aligned_bytes
from composable_fsdp.codecs._encoder import Encoder

__all__ = ["CodecMessage", "EncodedAllReduce", "EncodedMessage", "EncodedReduceScatter"]


class EncodedMessage(Protocol):
    """The encoded message of one bucket."""

    @property
    def row_bytes(self) -> int:
        """The number of bytes for each rank, the same on all ranks."""
        ...

    def write(self, rows: torch.Tensor) -> None:
        """Encode into ``rows``, ``(num_ranks, row_bytes)`` uint8, contiguous along the last dim only."""
        ...

    def read(self, rows: torch.Tensor) -> None:
        """Decode and sum the received ``rows``, of the same form."""
        ...


class EncodedReduceScatter:
    """A reduce-scatter of encoded messages, encoded on construction: call :meth:`launch`, wait, call :meth:`finish`.

    It keeps the sent message alive, whose memory may come from another stream.
    """

    def __init__(self, messages: Sequence[EncodedMessage], communicator: Communicator, device: torch.device) -> None:
        self._messages = messages
        self._communicator = communicator
        self._columns: list[slice] = []
        end = 0
        for message in messages:
            self._columns.append(slice(end, end + message.row_bytes))
            end += aligned_bytes(message.row_bytes)
        self._shape = (communicator.size, end)
        self._sent = communicator.allocate(communicator.size * end, torch.uint8, device)
        self._received: torch.Tensor | None = None
        for message, columns in zip(messages, self._columns, strict=True):
            message.write(self._sent.view(self._shape)[:, columns])

    def launch(self, label: str) -> Work:
        """Launch the all-to-all."""
        self._received = self._communicator.allocate(self._sent.numel(), torch.uint8, self._sent.device)
        return self._communicator.launch(Collective.ALL_TO_ALL, [Transfer(self._received, self._sent)], label)

    def finish(self) -> None:
        """Decode and sum the received messages."""
        received, self._received = self._received, None
        assert received is not None
        for message, columns in zip(self._messages, self._columns, strict=True):
            message.read(received.view(self._shape)[:, columns])


@dataclass
class CodecMessage:
    """A message of encoded values and plain flags.

    Args:
        encoder: encodes one row per rank.
        take_values: returns ``(num_ranks, numel)`` fp32, the r-th row for rank r. Called once, when the message is
            built.
        total: ``(numel,)``, receives the sum of all ranks' values for this rank.
        flags: ``(num_flags,)``, this rank's flags; becomes nonzero where any rank's flag is.
        absent: returns which values are of parameters without a gradient, for each row or the same for all; ``None`` if
            all have one.
    """

    encoder: Encoder
    take_values: Callable[[], torch.Tensor]
    total: torch.Tensor
    flags: torch.Tensor
    absent: Callable[[], torch.Tensor | None]

    @property
    def row_bytes(self) -> int:
        return self.encoder.row_bytes + self.flags.numel()

    def write(self, rows: torch.Tensor) -> None:
        split, absent = self.encoder.row_bytes, self.absent()
        values = self.take_values()
        self.encoder.encode(values, rows[:, :split], None if absent is None else absent.expand(values.shape))
        rows[:, split:] = self.flags.ne(0)

    def read(self, rows: torch.Tensor) -> None:
        split = self.encoder.row_bytes
        self.encoder.decode_sum(rows[:, :split], self.total)
        self.flags.copy_(rows[:, split:].any(dim=0))


class EncodedAllReduce:
    """An all-reduce with codecs: a reduce-scatter of encoded chunks, then an all-gather of their encoded sums.

    Every rank decodes the same bytes, its own included, so the result is bitwise the same on all ranks.

    Args:
        pieces: encodes one chunk per rank.
        sums: encodes the sum of one chunk.
        values: ``(numel,)`` fp32; holds the result after :meth:`finish`.
        flags: as for :class:`CodecMessage`.
        absent: the same, for ``values``.
    """

    def __init__(
        self,
        pieces: Encoder,
        sums: Encoder,
        values: torch.Tensor,
        flags: torch.Tensor,
        absent: Callable[[], torch.Tensor | None],
    ) -> None:
        self._sums = sums
        self._values = values
        self._shape = (pieces.num_rows, pieces.numel)
        self._total = values.new_empty(pieces.numel)
        self._received: torch.Tensor | None = None
        self._absent = absent
        self.message = CodecMessage(pieces, lambda: self._pieces(values), self._total, flags, self._absent_pieces)

    def _pieces(self, values: torch.Tensor) -> torch.Tensor:
        num_rows, numel = self._shape
        rows = values.new_zeros(num_rows * numel)
        rows[: values.numel()] = values
        return rows.view(num_rows, numel)

    def _absent_pieces(self) -> torch.Tensor | None:
        absent = self._absent()
        return None if absent is None else self._pieces(absent)

    def gather(self, communicator: Communicator) -> Transfer:
        """Encode this rank's sum and return the transfer of the all-gather."""
        device, nbytes = self._values.device, self._sums.row_bytes
        sent = communicator.allocate(nbytes, torch.uint8, device)
        absent = self._absent_pieces()
        own = None if absent is None else absent[communicator.rank].view(1, -1)
        self._sums.encode(self._total.view(1, -1), sent.view(1, nbytes), own)
        self._received = communicator.allocate(communicator.size * nbytes, torch.uint8, device)
        return Transfer(self._received, sent)

    def finish(self) -> None:
        """Decode the gathered sums into the values."""
        received, self._received = self._received, None
        assert received is not None
        rows = received.view(self._shape[0], self._sums.row_bytes)
        self._values.copy_(self._sums.decode(rows).view(-1)[: self._values.numel()])
