"""All-gathers of encoded parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch

from composable_fsdp._core.gather import AllGatherBuffers, AnyBucket, Bucket
from composable_fsdp._core.group import GatherKind
from composable_fsdp._core.group_plan import BucketPlan, GatherClaim
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp.codecs._encoder import encode_rows, row_runs
from composable_fsdp.codecs.protocol import Codec
from composable_fsdp.plugins.codecs.chosen_codecs import encodable_among, name_of_own_bucket, policy_of, resolved


class EncodedParameters(GatherKind):
    """Gathers parameters with the codec that the ``CommunicationPolicy`` has for them."""

    def find(self) -> None:
        parameters = self.group.parameters
        self._encodable = encodable_among(parameters) if any(p.communication for p in parameters) else ()

    def claim(self, parameter: ShardedParameter) -> GatherClaim | None:
        if parameter not in self._encodable or parameter.sharding.axes.shard.size == 1:
            return None
        codec = policy_of(parameter).all_gather
        if codec is None:
            return None
        return GatherClaim(EncodedParameters, (resolved(codec, parameter), name_of_own_bucket(parameter)))

    def make(self, plan: BucketPlan) -> AnyBucket:
        return self.group.make_plain(plan, EncodedBucket)


class EncodedBucket(Bucket):
    """A bucket whose shards are encoded, all in one message, and whose received rows are decoded."""

    @property
    def _codec(self) -> Codec:
        codec, _ = cast(Any, self.plan.gather_claim).key
        return cast(Codec, codec)

    def sent_bytes(self) -> tuple[list[tuple[int, int]], int]:
        packed_numel = self.plan.gather.packed_numel
        return [(self._codec.payload_bytes(packed_numel), 1)] if packed_numel else [], 0

    @property
    def cached_part(self) -> None:
        return None

    def prepare_gather(self, cast: torch.Tensor | None) -> AllGatherBuffers:
        gather = super().prepare_gather(cast)
        gather.payloads = [encode_rows(self._codec, each.unsqueeze(0)).view(-1) for each in gather.payloads]
        return gather

    def finish_gather(self, gather: AllGatherBuffers) -> None:
        if gather.payloads:
            self.buffer.allocate()
        for run in self._runs() if gather.payloads else ():
            self.unpack(self._codec.decode(gather.rows[0][run], self.plan.gather.packed_numel), run)

    def _runs(self) -> Iterator[slice]:
        """Yield the ranks whose rows are decoded together: a few at a time, so that the temporary is small.

        They are decoded all at once if a parameter is not the concatenation of its rows.
        """
        layout = self.plan.gather
        in_rows = all(layout.shards[i].concatenates for i in layout.packed)
        yield from row_runs(layout.num_shards, layout.packed_numel) if in_rows else (slice(0, layout.num_shards),)
