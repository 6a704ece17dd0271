"""One copy of the full parameters for all ranks of a host, where modules compute in another dtype than shards rest in.

The full parameters of a bucket lie in memory that the ranks have in common. Each rank casts its shards straight to
their places there, and a barrier makes that a gather: nothing is staged, sent or copied out.

States of a rank's places, by the communicator's ``partings``: *its own*, from the first parting after it released the
full parameters until it launches their next gather; *read by all*, from when every rank has launched that. Invariant: a
rank writes only to what is its own. A gather without a parting before it, as where a module runs twice in one forward
or was unsharded by hand, begins with a barrier: once all come to it, all have released.

The memory, one element of the compute dtype per parameter and host, is taken when it is first written, and goes with
the groups of all ranks. It is not given back in between: page faults would cost more than everything saved here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composable_fsdp._layout.plan import BucketPlan
from composable_fsdp._memory.shard_store import ShardStore
from composable_fsdp._runtime.params.optimizer_steps import optimizer_steps
from composable_fsdp._runtime.params.sharded_param import ShardedParameter

__all__ = ["SharedUnshardedBuffer"]


class SharedUnshardedBuffer:
    """This rank's part of one bucket's full parameters. Final.

    Args:
        plan: whose ``residence`` is ``COMMON``.
        parameters: those of the bucket.
        store: their shards.
        rank: of the shard axis.
        full: ``(plan.gather.places.numel,)``, the memory that ranks have in common.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[ShardedParameter],
        store: ShardStore,
        rank: int,
        full: torch.Tensor,
    ) -> None:
        lengths = [shards.padded_numel for shards in plan.gather.shards]
        self._parameters = parameters
        self._store = store
        self._shards = _pieces(store.flat, plan.gather.store.offsets, lengths)
        self._places = _pieces(full.data, plan.own_places(rank), lengths)
        self._cast_from: tuple[int, int] | None = None
        """What told of changes of the shards when they were last cast."""
        self.is_kept = False
        """Whether the next gather is one of what is there: a smaller mesh gathers what forward saw."""

    def fill(self) -> None:
        """Casts the shards to their places.

        In backward only if they may have changed since: what torch does not count, as a change through ``.data``, then
        shows from the next forward on.
        """
        if self.is_kept:
            return
        counted = [*(p.sharded for p in self._parameters), *self._store.counted]
        changes = sum(tensor._version for tensor in counted), optimizer_steps()
        if changes == self._cast_from and torch._C._current_graph_task_id() != -1:
            return
        torch._foreach_copy_(self._places, self._shards)
        self._cast_from = changes


def _pieces(flat: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
    return [flat[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
