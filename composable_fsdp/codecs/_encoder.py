"""Encoding of rows of values into bytes and decoding of their sum, with optional error feedback."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from composable_fsdp.codecs.error_feedback import ErrorFeedback
from composable_fsdp.codecs.protocol import Codec
from composable_fsdp.errors import ConfigurationError

GradientCodec = Codec | ErrorFeedback

_ELEMENTS_AT_ONCE = 1 << 20
"""Rows are encoded in chunks of about this many elements: small temporaries, and few calls for short rows."""


def row_runs(num_rows: int, numel: int) -> Iterator[slice]:
    """Split ``num_rows`` rows of ``numel`` elements into slices of limited size."""
    step = max(1, _ELEMENTS_AT_ONCE // max(1, numel))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def encode_rows(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    """Encode ``rows`` with ``codec``.

    Raises:
        ConfigurationError: the payload does not have the dtype or the size that the codec declares.
    """
    payload, expected = codec.encode(rows), (rows.size(0), codec.payload_bytes(rows.size(1)))
    if payload.dtype != torch.uint8 or tuple(payload.shape) != expected:
        raise ConfigurationError(
            f"{codec!r}.encode made a tensor of {tuple(payload.shape)}, {payload.dtype}, out of one of "
            f"{tuple(rows.shape)}; its payload_bytes say {expected}, torch.uint8."
        )
    return payload


class Encoder:
    """Encodes ``num_rows`` rows of ``numel`` values, and sums rows that other ranks encoded in the same way.

    Invariant: with error feedback, everything decoded so far on the receiving side plus the residual is everything
    encoded so far, apart from ``decay`` and from what ``keep`` rounds.

    The residual from before a training step is kept beside the new one until :meth:`commit`, so that :meth:`roll_back`
    can undo a failed step. It takes as much memory as the residual, from the first :meth:`encode` of the step until
    then.
    """

    def __init__(self, codec: GradientCodec, num_rows: int, numel: int) -> None:
        self.num_rows, self.numel = num_rows, numel
        self._feedback = codec if isinstance(codec, ErrorFeedback) else None
        self._codec = codec.codec if isinstance(codec, ErrorFeedback) else codec
        self._residual: torch.Tensor | None = None
        """The error so far, encoded by ``ErrorFeedback.keep``."""
        self._before_step: torch.Tensor | None = None
        """Set from the first encoding of a step until the step is committed or rolled back."""

    @property
    def row_bytes(self) -> int:
        """The number of bytes of an encoded row."""
        return self._codec.payload_bytes(self.numel)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Encode ``values``, ``(num_rows, numel)`` fp32, into ``out``, ``(num_rows, row_bytes)`` uint8.

        ``values`` is overwritten; ``out`` may be strided along dim 0.
        """
        feedback = self._feedback
        old, new = self._begin_reduction(values.device) if feedback is not None else (values, values)
        for rows in row_runs(self.num_rows, self.numel):
            run = values[rows]
            if feedback is not None:
                run.add_(feedback.keep.decode(old[rows], self.numel), alpha=feedback.decay)
            payload = encode_rows(self._codec, run)
            out[rows] = payload
            if feedback is not None:
                lost = run.sub_(self._codec.decode(payload, self.numel)).nan_to_num_(0.0, 0.0, 0.0)
                new[rows] = feedback.keep.encode(lost)

    def decode_sum(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum of encoded rows into ``out``, ``(numel,)`` fp32, summed in fp32 in the order of rows."""
        out.zero_()
        for rows in row_runs(payload.size(0), self.numel) if self.numel else ():  # rows without bytes are not aligned
            for values in self._codec.decode(payload[rows], self.numel):
                out.add_(values)

    # -- error feedback

    @property
    def remembers(self) -> bool:
        """True if a residual is kept from step to step."""
        return self._feedback is not None

    @property
    def has_changed(self) -> bool:
        """True if something was encoded with error feedback since the last :meth:`commit` or :meth:`roll_back`."""
        return self._before_step is not None

    def commit(self) -> None:
        """End a step: keep its residual and release the one from before it."""
        self._before_step = None

    def roll_back(self) -> None:
        """Restore the residual from before the step, if anything was encoded in it."""
        if self._before_step is not None:
            self._residual, self._before_step = self._before_step, None

    def _begin_reduction(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows with the old residual and the rows for the new one.

        They are the same from the second reduction of a step on.
        """
        assert self._feedback is not None, "called only with error feedback"
        if self._residual is None:
            zeros = torch.zeros(1, self.numel, dtype=torch.float32, device=device)
            self._residual = self._feedback.keep.encode(zeros).repeat(self.num_rows, 1)
        old = self._residual
        if self._before_step is None:
            self._before_step, self._residual = old, torch.empty_like(old)
        return old, self._residual
