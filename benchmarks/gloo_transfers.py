"""Measures all-gather and reduce-scatter of four tensors over gloo and in shared memory, against gloo's collectives.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/gloo_transfers.py

Over gloo, each tensor is sent separately without a copy, or all tensors are copied into one message and out of it. The
size from which the first method is faster is the threshold of ``plugins/gloo/gloo_communicator.py``. Gloo's collectives
get one message, as in every library. Memory is shared if all ranks are on one host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import interleaved, parser, publish, ratios, timed

from composable_fsdp._core.comm import (
    Collective,
    Communicator,
    ProcessGroupCommunicator,
    Transfer,
    communicator_over,
    find,
)
from composable_fsdp.plugins.gloo.gloo_communicator import GlooCommunicator
from composable_fsdp.plugins.shared_memory.shm_communicator import SharedMemoryCommunicator

KIB = [16, 64, 128, 256, 512, 1024, 2048, 4096, 16384]
TENSORS = 4


class Tensors:
    """Equal tensors of ``kib``, sharded and in full, and messages that contain all of them."""

    def __init__(self, size: int, kib: int) -> None:
        numel = kib * 256
        self.size = size
        self.full = [torch.randn(numel) for _ in range(TENSORS)]
        self.shards = [torch.randn(numel // size) for _ in range(TENSORS)]
        self.sent, self.received = torch.empty(TENSORS * numel // size), torch.empty(size, TENSORS * numel // size)
        self.rows = [full.view(size, -1) for full in self.full]

    def gather(self, communicator: Communicator) -> None:
        """All-gather each tensor separately."""
        communicator.launch(
            Collective.ALL_GATHER, [Transfer(*each) for each in zip(self.full, self.shards, strict=True)]
        ).wait()

    def gather_packed(self, communicator: Communicator) -> None:
        torch.cat(self.shards, out=self.sent)
        communicator.launch(Collective.ALL_GATHER, [Transfer(self.received.view(-1), self.sent)]).wait()
        torch.split_with_sizes_copy(self.received, [shard.numel() for shard in self.shards], dim=1, out=self.rows)

    def reduce(self, communicator: Communicator) -> None:
        """Reduce-scatter each tensor separately."""
        transfers = [Transfer(*each) for each in zip(self.shards, self.full, strict=True)]
        communicator.launch(Collective.REDUCE_SCATTER, transfers).wait()

    def reduce_packed(self, communicator: Communicator) -> None:
        torch._chunk_cat(self.full, 0, self.size, out=self.received)
        communicator.launch(Collective.REDUCE_SCATTER, [Transfer(self.sent, self.received.view(-1))]).wait()


def variants(communicator: GlooCommunicator, shared: Communicator, kib: int) -> dict[str, Callable[[], None]]:
    """Return the methods to send four tensors of ``kib`` in full."""
    tensors, plain = Tensors(communicator.size, kib), ProcessGroupCommunicator(communicator.group, "cpu")

    def reduce_each() -> None:
        communicator.traits.zero_copy_min_bytes = 0  # otherwise it would copy small tensors into one message
        tensors.reduce(communicator)

    ways: dict[str, Callable[[], None]] = {
        "gloo's all-gather": lambda: tensors.gather_packed(plain),
        "all-gather, packed": lambda: tensors.gather_packed(communicator),
        "all-gather, each by itself": lambda: tensors.gather(communicator),
        "gloo's reduce-scatter": lambda: tensors.reduce_packed(plain),
        "reduce-scatter, packed": lambda: tensors.reduce_packed(communicator),
        "reduce-scatter, each by itself": reduce_each,
    }
    if find(shared, SharedMemoryCommunicator) is not None:
        ways["all-gather, shared memory"] = lambda: tensors.gather(shared)
        ways["reduce-scatter, shared memory"] = lambda: tensors.reduce(shared)
    return ways


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=25)
    arguments = options.parse_args()
    dist.init_process_group("gloo")
    communicator, shared = GlooCommunicator(dist.group.WORLD), communicator_over(dist.group.WORLD, "cpu")
    rows: list[dict[str, Any]] = []
    columns: list[str] = []
    for kib in KIB[::3] if arguments.quick else KIB:
        actions = {name: timed(action) for name, action in variants(communicator, shared, kib).items()}
        taken = interleaved(actions, 4 if arguments.quick else arguments.rounds)
        columns = [name for name in actions if not name.startswith("gloo")]
        kinds = {name: f"gloo's {name.partition(',')[0]}" for name in columns}
        rows.append({"KiB": kib} | {name: ratios(taken[name], taken[kinds[name]]) for name in columns})
    if communicator.rank == 0:
        settings = {"ranks": communicator.size, "tensors": TENSORS, "ratios": "to gloo's own"}
        publish("gloo transfers", settings, ["KiB", *columns], rows, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
