"""The reduce kind of encoded gradients: each rank decodes and sums the messages that it receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import HELD_GRADIENTS
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.reduce import BucketReducer, ReduceScatterBuffers
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import FSDPState
from composable_fsdp.codecs._encoder import Encoder, GradientCodec
from composable_fsdp.codecs.cast import Cast
from composable_fsdp.codecs.error_feedback import ErrorFeedback
from composable_fsdp.plugins.codecs.chosen_codecs import encodable_among, name_of_own_bucket, policy_of, resolved

EXACT = Cast(torch.float32)
"""The codec of gradients that are sent and summed together with encoded ones, unchanged."""


@dataclass
class CodecMessage:
    """A message of encoded values and plain flags.

    Args:
        encoder: encodes one row per rank.
        take_values: returns ``(num_ranks, numel)`` fp32, the r-th row for rank r. Called once, when the message is
            built.
        total: ``(numel,)``, receives the sum of all ranks' values for this rank.
        flags: ``(num_flags,)``, this rank's flags; becomes nonzero where any rank's flag is.
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


class EncodedReduce:
    """The encoded messages of one bucket."""

    def __init__(self, codec: GradientCodec, bucket: BucketReducer, former: EncodedReduce | None) -> None:
        self._layout = bucket.plan.reduce
        if former is not None and former._layout == self._layout:
            self.encoder: Encoder = former.encoder  # with its residual, which belongs to these offsets
        else:
            self.encoder = Encoder(codec, bucket.pgs.axes.shard.size, self._layout.gradient_numel)

    @property
    def row_bytes(self) -> int:
        return self.encoder.row_bytes + self._layout.num_flags

    @property
    def remembers(self) -> bool:
        return self.encoder.remembers

    def message(
        self, bucket: BucketReducer, gradients: list[torch.Tensor | None], buffers: ReduceScatterBuffers
    ) -> CodecMessage:
        total, flags = buffers.output[: self._layout.gradient_numel], bucket.flags_of(buffers)
        return CodecMessage(self.encoder, partial(bucket.packed_rows, gradients), total, flags)


@dataclass(frozen=True, slots=True)
class EncodedGradients:
    """The reduce kind of gradients with codecs, and of those that are sent with them.

    A reduction with encoded gradients takes one all-to-all, so all others of the same axes are sent in it too.

    Args:
        codec: the codec over the shard axis.
        alone: the name of a parameter that needs a bucket of its own.
    """

    codec: GradientCodec = EXACT
    alone: str = ""

    def claim(self, parameters: Sequence[ShardedParameter]) -> dict[ShardedParameter, EncodedGradients]:
        if not any(p.communication for p in parameters):
            return {}
        chosen = {}
        for p in encodable_among(parameters):
            codec = resolved(policy_of(p).reduce_scatter, p)
            if codec is not None and p.sharding.axes.shard.size > 1:
                chosen[p] = EncodedGradients(codec, name_of_own_bucket(p))
        axes = {p.sharding.axes for p in chosen}
        others = (p for p in parameters if p.sharding.axes in axes and p.dtype.itemsize <= torch.float32.itemsize)
        return dict.fromkeys(others, EncodedGradients()) | chosen

    def make(self, bucket: BucketReducer, former: EncodedReduce | None) -> EncodedReduce:
        return EncodedReduce(self.codec, bucket, former)


class Residuals(Observer):
    """Commits the residuals of one root at its first forward after a step, and rolls them back in a reset."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        """The progress when the last forward began; ``None`` before the first, and if none of its gradients is left."""

    def for_root(self, root: ObservedRoot) -> Observer | None:
        parameters = (p for state in root.states.values() for p in state.group.parameters)
        return Residuals() if any(isinstance(policy_of(p).reduce_scatter, ErrorFeedback) for p in parameters) else None

    def begin_forward(self, root: ObservedRoot, outermost: FSDPState) -> None:
        changed = _changed(root)
        if not root.queue.are_in_flight and not any(_waits(group) for group, _ in changed):
            self._last = None  # they were used or dropped
        self._commit(root)
        self._last = _progress(root)

    def after_reset(self, root: ObservedRoot) -> None:
        self._commit(root)  # those of the step before, if this rank failed in between
        for _, encoder in _changed(root):
            encoder.roll_back()

    def _commit(self, root: ObservedRoot) -> None:
        """Commit the residuals if a step was made since the last forward began."""
        changed = _changed(root)
        for _, encoder in changed if changed and _progress(root) != self._last else ():
            encoder.commit()


def _progress(root: ObservedRoot) -> tuple[int, int]:
    """Return the number of optimizer steps, and one that changes with the shards, as in a step by hand."""
    parameters = (p for state in root.states.values() for p in state.group.parameters)
    return root.planner.steps.number, sum(p.sharded._version for p in parameters)


def _changed(root: ObservedRoot) -> list[tuple[ParamGroup, Encoder]]:
    """Return the encoders whose residuals have changed since they were committed, and their groups."""
    groups = [state.group for state in root.states.values()]
    every = [(group, bucket.reducer.own) for group in groups for bucket in group.buckets]
    return [(group, own.encoder) for group, own in every if isinstance(own, EncodedReduce) and own.encoder.has_changed]


def _waits(group: ParamGroup) -> bool:
    """Return True if gradients wait for an optimizer, in the sharded parameters, or for a later reduction."""
    return group.gradient_state in HELD_GRADIENTS or any(p.sharded.grad is not None for p in group.parameters)
