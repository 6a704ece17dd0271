"""One copy of the full parameters for all ranks of a host, if the compute dtype differs from the dtype of the shards.

The full parameters of a bucket are in shared memory. Each rank casts its shards directly to their places there, and a
barrier completes the all-gather: nothing is staged, sent or copied out.

A barrier ends each epoch; the communicator counts them (``epoch``). A rank's range of the buffer has two states. It is
*private* from the end of the epoch in which the rank freed the full parameters until it launches their next all-gather.
It is *shared* once every rank has launched that. Invariant: a rank writes to its range only while it is private. An
all-gather in the same epoch, as when a module runs twice in one forward or after ``unshard()``, starts with a barrier,
so that all ranks have freed the parameters before any of them writes.

The memory, one element of the compute dtype per parameter and host, is allocated at the first write and released with
the groups of all ranks. It is not freed in between, because page faults would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composable_fsdp._layout.plan import BucketPlan
from composable_fsdp._memory.buffers import ShardStore
from composable_fsdp._runtime.params.optimizer_steps import optimizer_steps
from composable_fsdp._runtime.params.sharded_param import ShardedParameter

__all__ = ["SharedUnshardedBuffer"]


class SharedUnshardedBuffer:
    """This rank's part of one bucket's full parameters in shared memory. Final.

    Args:
        plan: a plan with ``unsharded_storage`` ``SHARED``.
        parameters: the bucket's parameters.
        store: their shards.
        rank: this rank on the shard axis.
        full: ``(plan.gather.places.numel,)``, the shared memory.
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
        self._places = _pieces(full.data, plan.shard_offsets(rank), lengths)
        self._cast_from: tuple[int, int] | None = None
        """Version counters and optimizer steps at the last cast of the shards."""
        self.is_kept = False
        """True if the next all-gather, on a smaller mesh, reuses the values of forward."""

    def fill(self) -> None:
        """Cast the shards to their places.

        In backward only if their version counters changed: other changes, such as through ``.data``, take effect in the
        next forward.
        """
        if self.is_kept:
            return
        tensors = [*(p.sharded for p in self._parameters), *self._store.versioned]
        changes = sum(tensor._version for tensor in tensors), optimizer_steps()
        if changes == self._cast_from and torch._C._current_graph_task_id() != -1:
            return
        torch._foreach_copy_(self._places, self._shards)
        self._cast_from = changes


def _pieces(flat: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
    return [flat[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
