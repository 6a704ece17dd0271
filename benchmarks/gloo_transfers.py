"""All-gather and reduce-scatter of one tensor over gloo and in shared memory, against gloo's own.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/gloo_transfers.py

Over gloo it goes point to point, or small as it is: where the first begins to win is the threshold of
``composable_fsdp/comm/gloo.py``. Memory is shared where all ranks are on one host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import interleaved, parser, publish, ratios, timed

from composable_fsdp.comm import gloo
from composable_fsdp.comm.agreement import OrderCheck
from composable_fsdp.comm.c10d import ProcessGroupCommunicator
from composable_fsdp.comm.choose import communicator_over
from composable_fsdp.comm.gloo import GlooCommunicator, Line
from composable_fsdp.comm.protocol import Communicator, Transfer
from composable_fsdp.comm.shared.communicator import SharedMemoryCommunicator
from composable_fsdp.layout.reduction import ReduceOp

KIB = [16, 64, 256, 1024, 4096, 16384, 65536]
NEVER = 1 << 62


def variants(communicator: GlooCommunicator, shared: Communicator, kib: int) -> dict[str, Callable[[], None]]:
    """Ways to move a tensor of ``kib`` in full."""
    full, gathered = torch.randn(kib * 256), torch.empty(kib * 256)
    shard, reduced = torch.randn(kib * 256 // communicator.size), torch.empty(kib * 256 // communicator.size)

    def gather_with(communicator: Communicator) -> None:
        communicator.all_gather([Transfer(gathered, shard)]).wait()

    def reduce_with(communicator: Communicator) -> None:
        communicator.reduce_scatter([Transfer(reduced, full)], ReduceOp.SUM).wait()

    def gather(threshold: int) -> None:
        gloo._DIRECT_PART_BYTES = threshold
        gather_with(communicator)

    def reduce(threshold: int) -> None:
        communicator.direct_bytes = threshold
        reduce_with(communicator)

    plain = ProcessGroupCommunicator(communicator.group, "cpu")
    ways = {
        "gloo's all-gather": lambda: gather_with(plain),
        "all-gather, point to point": lambda: gather(0),
        "gloo's reduce-scatter": lambda: reduce_with(plain),
        "reduce-scatter, all-to-all": lambda: reduce(NEVER),
        "reduce-scatter, point to point": lambda: reduce(0),
    }
    if isinstance(shared, SharedMemoryCommunicator):
        ways["all-gather, shared memory"] = lambda: gather_with(shared)
        ways["reduce-scatter, shared memory"] = lambda: reduce_with(shared)
    return ways


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=25)
    arguments = options.parse_args()
    dist.init_process_group("gloo")
    line = Line(dist.group.WORLD, None, OrderCheck.OFF)
    communicator, shared = GlooCommunicator(dist.group.WORLD, line), communicator_over(dist.group.WORLD, "cpu")
    rows: list[dict[str, Any]] = []
    columns: list[str] = []
    for kib in KIB[::3] if arguments.quick else KIB:
        actions = {name: timed(action) for name, action in variants(communicator, shared, kib).items()}
        taken = interleaved(actions, 4 if arguments.quick else arguments.rounds)
        columns = [name for name in actions if not name.startswith("gloo")]
        kinds = {name: f"gloo's {name.partition(',')[0]}" for name in columns}
        rows.append({"KiB": kib} | {name: ratios(taken[name], taken[kinds[name]]) for name in columns})
    if communicator.rank == 0:
        settings = {"ranks": communicator.size, "of": "gloo's own time"}
        publish("gloo transfers", settings, ["KiB", *columns], rows, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
