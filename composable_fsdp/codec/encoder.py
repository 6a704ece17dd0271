"""Rows of values into bytes and back to their sum, with the residual of error feedback where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from composable_fsdp.codec.feedback import ErrorFeedback
from composable_fsdp.codec.protocol import Codec

__all__ = ["Encoder", "GradientCodec"]

GradientCodec = Codec | ErrorFeedback

_ELEMENTS_AT_ONCE = 1 << 20
"""Rows are encoded in runs of about so many elements: temporaries stay small, and few calls are made for short rows."""


@dataclass
class _Residual:
    """What was lost so far, encoded by ``ErrorFeedback.keep``, and in how many rounds."""

    rows: torch.Tensor
    rounds: int = 0


class Encoder:
    """Encodes ``num_rows`` rows of ``numel`` values each time, and adds up rows that others encoded alike.

    Invariant: with error feedback, what was decoded so far on the other side and the residual make up what was to be
    encoded so far, but for ``decay`` and for what ``keep`` rounds.
    """

    def __init__(self, codec: GradientCodec, num_rows: int, numel: int) -> None:
        self.num_rows, self.numel = num_rows, numel
        self._feedback = codec if isinstance(codec, ErrorFeedback) else None
        self._codec = codec.codec if isinstance(codec, ErrorFeedback) else codec
        self._residual: _Residual | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of an encoded row."""
        return self._codec.payload_bytes(self.numel)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``values``, ``(num_rows, numel)`` fp32, encoded into ``out``, ``(num_rows, row_bytes)`` of uint8.

        ``values`` is changed; ``out`` may be strided along dim 0.
        """
        residual = self._residual_for(values.device)
        for rows in self._runs(self.num_rows):
            run = values[rows]
            if self._feedback is not None and residual is not None:
                run.add_(self._feedback.keep.decode(residual.rows[rows], self.numel), alpha=self._feedback.decay)
            payload = self._codec.encode(run)
            out[rows] = payload
            if self._feedback is not None and residual is not None:
                lost = run.sub_(self._codec.decode(payload, self.numel)).nan_to_num_(0.0, 0.0, 0.0)
                residual.rows[rows] = self._feedback.keep.encode(lost)
        self._count_round()

    def decode(self, payload: torch.Tensor) -> torch.Tensor:
        """``(any, numel)`` fp32 of encoded rows."""
        if not self.numel:  # rows without bytes begin on no boundary
            return payload.new_empty(payload.size(0), 0, dtype=torch.float32)
        return self._codec.decode(payload, self.numel)

    def decode_sum(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the sum of encoded rows into ``out``, ``(numel,)`` fp32: added up in the order of rows, in fp32."""
        first = True
        for rows in self._runs(payload.size(0)):
            for values in self.decode(payload[rows]):
                if first:
                    out.copy_(values)
                else:
                    out.add_(values)
                first = False

    def _runs(self, num_rows: int) -> Iterator[slice]:
        step = max(1, _ELEMENTS_AT_ONCE // max(1, self.numel))
        return (slice(start, start + step) for start in range(0, num_rows, step))

    # -- error feedback

    @property
    def remembers(self) -> bool:
        """Whether there is a residual from step to step."""
        return self._feedback is not None

    @property
    def rounds(self) -> int:
        """How many rounds the residual is made of."""
        return 0 if self._residual is None else self._residual.rounds

    def residual(self, device: torch.device) -> torch.Tensor:
        """The residual as it rests, ``(num_rows, bytes)`` uint8; zeros where nothing was encoded so far."""
        residual = self._residual_for(device)
        assert residual is not None, "asked only where the encoder remembers"
        return residual.rows

    def restore(self, residual: torch.Tensor, rounds: int) -> None:
        """Goes on from a residual that :meth:`residual` gave, and its ``rounds``."""
        self._residual = _Residual(residual.clone(), rounds)

    def _residual_for(self, device: torch.device) -> _Residual | None:
        if self._feedback is not None and self._residual is None:
            self._residual = _Residual(self._nothing(self._feedback, device).repeat(self.num_rows, 1))
        return self._residual

    def _nothing(self, feedback: ErrorFeedback, device: torch.device) -> torch.Tensor:
        """A row of zeros as it rests."""
        return feedback.keep.encode(torch.zeros(1, self.numel, dtype=torch.float32, device=device))

    def _count_round(self) -> None:
        if self._feedback is None or self._residual is None:
            return
        self._residual.rounds += 1
        if self._residual.rounds == self._feedback.reset_every:
            # In place: one that was restored is memory of another stream, which might take it while this one reads.
            self._residual.rows.copy_(self._nothing(self._feedback, self._residual.rows.device))
            self._residual.rounds = 0
