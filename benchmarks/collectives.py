"""From which size on does a parameter travel faster by itself than packed with others?

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/collectives.py

For each size, eight parameters of that full size are gathered once packed, with the copy out that packing
costs, and once direct. The crossing is what ``comm/shared/communicator.py`` has as its threshold, and with
``COMPOSABLE_FSDP_SHARED_MEMORY=0`` what ``comm/c10d.py`` has. The same for reduce-scatter, whose packed form costs a
copy in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from report import interleaved, show, spread, store

from composable_fsdp.comm.choose import communicator_over
from composable_fsdp.comm.protocol import Communicator, Transfer
from composable_fsdp.layout.reduction import ReduceOp

TENSORS = 8
KIB = [16, 64, 128, 256, 512, 1024, 2048, 4096, 8192]


def variants(communicator: Communicator, nbytes: int) -> dict[str, Callable[[], None]]:
    """Both ways to move ``TENSORS`` tensors of ``nbytes``, in both directions."""
    ranks, shard = communicator.size, nbytes // 4 // communicator.size
    shards = torch.randn(TENSORS, shard)
    full = torch.empty(TENSORS, ranks * shard)
    message = torch.empty(ranks, TENSORS * shard)

    def gather_direct() -> None:
        communicator.all_gather([Transfer(full[i], shards[i]) for i in range(TENSORS)]).wait()

    def gather_packed() -> None:
        communicator.all_gather([Transfer(message.view(-1), shards.view(-1))]).wait()
        for i in range(TENSORS):
            full[i].view(ranks, shard).copy_(message[:, i * shard : (i + 1) * shard])

    def scatter_direct() -> None:
        communicator.reduce_scatter([Transfer(shards[i], full[i]) for i in range(TENSORS)], ReduceOp.SUM).wait()

    def scatter_packed() -> None:
        for i in range(TENSORS):
            message[:, i * shard : (i + 1) * shard].copy_(full[i].view(ranks, shard))
        communicator.reduce_scatter([Transfer(shards.view(-1), message.view(-1))], ReduceOp.SUM).wait()

    return {
        "all-gather direct": gather_direct,
        "all-gather packed": gather_packed,
        "reduce-scatter direct": scatter_direct,
        "reduce-scatter packed": scatter_packed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    communicator = communicator_over(dist.group.WORLD, "cpu")
    rows = []
    for kib in KIB:
        taken = interleaved(variants(communicator, kib * 1024), arguments.rounds)
        row: dict[str, object] = {"ranks": communicator.size, "kib": kib}
        for kind in ("all-gather", "reduce-scatter"):
            pairs = zip(taken[f"{kind} direct"], taken[f"{kind} packed"], strict=True)
            row[kind] = spread([direct / packed for direct, packed in pairs])
        rows.append(row)
        if communicator.rank == 0:
            print(
                f"{kib:6d} KiB  direct/packed: " + "  ".join(f"{k} {show(row[k])}" for k in row if "-" in k), flush=True
            )
    if communicator.rank == 0:
        store("collectives", " ".join(sys.argv), rows, arguments.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
