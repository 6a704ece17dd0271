"""Finds the size from which a separate message for a parameter is faster than packing it with others.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/collectives.py

For each size, eight parameters of that full size are gathered in one message, including the copy out of it, and as
separate messages. The size at which both take equally long is the threshold in
``plugins/shared_memory/shm_communicator.py``, and with ``COMPOSABLE_FSDP_SHARED_MEMORY=0`` the one in
``_core/comm.py``. The same is measured for reduce-scatter, whose single message includes a copy in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import interleaved, parser, publish, ratios, timed

from composable_fsdp._core.comm import Collective, Communicator, Transfer, communicator_over

TENSORS = 8
KINDS = ("all-gather", "reduce-scatter")
KIB = [16, 64, 128, 256, 512, 1024, 2048, 4096, 8192]


def variants(communicator: Communicator, nbytes: int) -> dict[str, Callable[[], None]]:
    """Return both methods to send ``TENSORS`` tensors of ``nbytes``, for both collectives."""
    ranks, shard = communicator.size, nbytes // 4 // communicator.size
    shards = torch.randn(TENSORS, shard)
    full = torch.empty(TENSORS, ranks * shard)
    message = torch.empty(ranks, TENSORS * shard)

    def gather_direct() -> None:
        communicator.launch(Collective.ALL_GATHER, [Transfer(full[i], shards[i]) for i in range(TENSORS)]).wait()

    def gather_packed() -> None:
        communicator.launch(Collective.ALL_GATHER, [Transfer(message.view(-1), shards.view(-1))]).wait()
        for i in range(TENSORS):
            full[i].view(ranks, shard).copy_(message[:, i * shard : (i + 1) * shard])

    def scatter_direct() -> None:
        communicator.launch(Collective.REDUCE_SCATTER, [Transfer(shards[i], full[i]) for i in range(TENSORS)]).wait()

    def scatter_packed() -> None:
        for i in range(TENSORS):
            message[:, i * shard : (i + 1) * shard].copy_(full[i].view(ranks, shard))
        communicator.launch(Collective.REDUCE_SCATTER, [Transfer(shards.view(-1), message.view(-1))]).wait()

    return {
        "all-gather direct": gather_direct,
        "all-gather packed": gather_packed,
        "reduce-scatter direct": scatter_direct,
        "reduce-scatter packed": scatter_packed,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=30)
    arguments = options.parse_args()
    dist.init_process_group("gloo")
    communicator = communicator_over(dist.group.WORLD, "cpu")
    rows = []
    for kib in KIB[::3] if arguments.quick else KIB:
        actions = {name: timed(action) for name, action in variants(communicator, kib * 1024).items()}
        taken = interleaved(actions, 4 if arguments.quick else arguments.rounds)
        row: dict[str, Any] = {"KiB": kib}
        for kind in KINDS:
            row[f"{kind}, direct/packed"] = ratios(taken[f"{kind} direct"], taken[f"{kind} packed"])
        rows.append(row)
    if communicator.rank == 0:
        columns = ["KiB", *(f"{kind}, direct/packed" for kind in KINDS)]
        publish("direct or packed", {"ranks": communicator.size}, columns, rows, arguments.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
