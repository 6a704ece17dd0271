"""The reduce kind of encoded gradients: each rank decodes and sums the messages that it receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch

from composable_fsdp._core.comm import Communicator, Transfer
from composable_fsdp._core.gather import AnyBucket
from composable_fsdp._core.layout import aligned_bytes
from composable_fsdp._core.mesh import DataParallelAxes
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.reduce import BucketReducer, ReduceScatterBuffers
from composable_fsdp.codecs._encoder import Encoder, GradientCodec
from composable_fsdp.codecs.cast import Cast
from composable_fsdp.plugins.codecs.chosen_codecs import encodable_among, name_of_own_bucket, policy_of, resolved

Absent: TypeAlias = Callable[[], torch.Tensor | None]


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
    absent: Absent

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

    ``values``, ``(numel,)`` fp32, hold the result after :meth:`finish`. The rest is as for :class:`CodecMessage`.
    """

    def __init__(
        self, encoders: Mapping[str, Encoder], values: torch.Tensor, flags: torch.Tensor, absent: Absent
    ) -> None:
        pieces, self._sums = encoders["pieces"], encoders["sums"]
        self._values, self._absent = values, absent
        self._shape = (pieces.num_rows, pieces.numel)
        self._total = values.new_empty(pieces.numel)
        self._received: torch.Tensor | None = None
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
        device, nbytes = self._values.device, self._sums.row_bytes
        sent = communicator.allocate(nbytes, torch.uint8, device)
        absent = self._absent_pieces()
        own = None if absent is None else absent[communicator.rank].view(1, -1)
        self._sums.encode(self._total.view(1, -1), sent.view(1, nbytes), own)
        self._received = communicator.allocate(communicator.size * nbytes, torch.uint8, device)
        return Transfer(self._received, sent)

    def finish(self) -> None:
        received, self._received = self._received, None
        assert received is not None
        rows = received.view(self._shape[0], self._sums.row_bytes)
        self._values.copy_(self._sums.decode(rows).view(-1)[: self._values.numel()])


class EncodedReduce:
    """The encoded messages of one bucket.

    Attributes:
        encoders: those of each collective: ``"shard"``, and ``"pieces"`` and ``"sums"`` of the replicate axis.
    """

    def __init__(self, kind: EncodedGradients, bucket: BucketReducer, former: EncodedReduce | None) -> None:
        self._layout, self._pgs, self._parameters = bucket.plan.reduce, bucket.pgs, bucket.parameters
        self._version_before: int | None = None if former is None else former._version_before
        """The version of the shards before the first reduction of the step, if that has changed residuals."""
        self.encoders: dict[str, Encoder] = {}
        numel, num_replicas = self._layout.gradient_numel, bucket.pgs.replicate.size
        if former is not None and former._layout == self._layout:
            self.encoders = former.encoders  # with their residuals, which belong to these offsets
            return
        if kind.shard is not None:
            self.encoders["shard"] = Encoder(kind.shard, bucket.pgs.axes.shard.size, numel)
        if kind.replicate is not None:
            piece = aligned_bytes(-(-numel // num_replicas) * 4) // 4  # the values are fp32
            self.encoders["pieces"] = Encoder(kind.replicate, num_replicas, piece)
            self.encoders["sums"] = Encoder(kind.replicate, 1, piece)

    @property
    def row_bytes(self) -> int | None:
        return self.encoders["shard"].row_bytes + self._layout.num_flags if "shard" in self.encoders else None

    @property
    def all_reduce_bytes(self) -> int | None:
        if "pieces" not in self.encoders:
            return None
        pieces = aligned_bytes(self.encoders["pieces"].row_bytes + self._layout.num_flags)
        return self._pgs.replicate.size * (pieces + self.encoders["sums"].row_bytes)

    @property
    def remembers(self) -> bool:
        return any(encoder.remembers for encoder in self.encoders.values())

    def message(
        self, bucket: BucketReducer, gradients: list[torch.Tensor | None], buffers: ReduceScatterBuffers
    ) -> CodecMessage:
        take_rows = partial(bucket.packed_rows, gradients)
        return CodecMessage(self.encoders["shard"], take_rows, *self._values(bucket, buffers))

    def all_reduce(self, bucket: BucketReducer, buffers: ReduceScatterBuffers) -> EncodedAllReduce | None:
        if "pieces" not in self.encoders:
            return None
        return EncodedAllReduce(self.encoders, *self._values(bucket, buffers))

    def _values(
        self, bucket: BucketReducer, buffers: ReduceScatterBuffers
    ) -> tuple[torch.Tensor, torch.Tensor, Absent]:
        """Return the values and flags in the output of ``buffers``, and a function that returns the absent values."""
        if self._version_before is None and self.remembers:
            self._version_before = self._version
        flags = bucket.flags_of(buffers)
        return buffers.output[: self._layout.gradient_numel], flags, partial(self._absent, buffers.present, flags)

    def _absent(self, present: frozenset[int], flags: torch.Tensor) -> torch.Tensor | None:
        """Return which values of a row have a zero in ``flags``; ``None`` if no gradient will be dropped for that.

        A message without flags is that of one parameter, and is sent because of its gradient.
        """
        if len(present) == len(self._layout.indices) or not flags.numel() or self._pgs.reduces_unused:
            return None
        widths = self._layout.packed_widths
        return torch.cat([flag.expand(width) for flag, width in zip(flags.eq(0), widths, strict=False)])

    # -- residuals of error feedback

    @property
    def has_changed(self) -> bool:
        """True if residuals have changed since the last :meth:`commit` or :meth:`roll_back`."""
        return self._version_before is not None

    @property
    def shards_changed(self) -> bool:
        """True if the shards were changed in place since the first reduction of the step."""
        return self._version != self._version_before

    def commit(self) -> None:
        self._version_before = None
        for encoder in self.encoders.values():
            encoder.commit()

    def roll_back(self) -> None:
        self._version_before = None
        for encoder in self.encoders.values():
            encoder.roll_back()

    @property
    def _version(self) -> int:
        return sum(p.local._version + p.sharded._version + p.was_flipped for p in self._parameters)


def encoders_of(bucket: AnyBucket) -> Mapping[str, Encoder]:
    """Return the encoders of the gradients of ``bucket``, by their collective."""
    own = bucket.reducer.own
    return own.encoders if isinstance(own, EncodedReduce) else {}


@dataclass(frozen=True, slots=True)
class EncodedGradients:
    """The reduce kind of gradients with codecs, and of those that are sent with them.

    A reduction with encoded gradients takes one all-to-all, so all others of the same axes are sent in it too.

    Args:
        shard: the codec over the shard axis, if any.
        replicate: the same over the replicate axis.
        alone: the name of a parameter that needs a bucket of its own.
    """

    shard: GradientCodec | None = None
    replicate: GradientCodec | None = None
    alone: str = ""

    def claim(self, parameters: Sequence[ShardedParameter]) -> dict[ShardedParameter, EncodedGradients]:
        if not any(p.communication for p in parameters):
            return {}
        encodable = encodable_among(parameters)
        chosen = {p: _chosen_for(p) if p in encodable else EncodedGradients() for p in parameters}
        codecs_on: dict[DataParallelAxes, tuple[GradientCodec | None, GradientCodec | None]] = {}
        for p, own in chosen.items():
            shard, replicate = codecs_on.get(p.sharding.axes, (None, None))
            codecs_on[p.sharding.axes] = shard or own.shard, replicate or own.replicate
        for p, own in chosen.items():
            shard, replicate = own.shard, own.replicate
            if p.dtype.itemsize <= torch.float32.itemsize:
                others = codecs_on[p.sharding.axes]
                shard, replicate = shard or (others[0] and EXACT), replicate or (others[1] and EXACT)
            chosen[p] = replace(own, shard=shard, replicate=replicate)
        return {p: own for p, own in chosen.items() if own.shard is not None or own.replicate is not None}

    def make(self, bucket: BucketReducer, former: EncodedReduce | None) -> EncodedReduce:
        return EncodedReduce(self, bucket, former)


EXACT = Cast(torch.float32)
"""The codec of gradients that are sent and summed together with encoded ones, unchanged."""


def _chosen_for(parameter: ShardedParameter) -> EncodedGradients:
    """Return the user's codecs, but none on an axis of one rank."""
    chosen, axes = policy_of(parameter), parameter.sharding.axes
    shard, replicate = (resolved(codec, parameter) for codec in (chosen.reduce_scatter, chosen.all_reduce))
    return EncodedGradients(
        shard if axes.shard.size > 1 else None,
        replicate if axes.replicate.size > 1 else None,
        alone=name_of_own_bucket(parameter),
    )
