"""Measures time of a training step at each level of the order check: never, for new sequences (the default), always.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/order_check.py

All levels run in turn in the same processes, step by step. Ratios compare adjacent steps, with the step without checks.
In shared memory ranks always compare, in messages that are sent anyway. The levels then differ only in the comparison
of this rank's order with that of its first iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from models import CASES, Case
from report import interleaved, parser, publish, ratios, spread
from step_time import measured, over_ranks
from torch.distributed.device_mesh import DeviceMesh
from trainers import Step, Task

from composable_fsdp import fully_shard
from composable_fsdp._consistency.order_check import OrderCheck
from tests.helpers.counted_collectives import compared

LEVELS = [level.value for level in OrderCheck]
WARM_UP = 3
MEASURES = ("cpu", "wall")


@dataclass(frozen=True)
class Trained:
    """A model with its own process group, because the level applies to all models over one process group."""

    group: dist.ProcessGroup
    step: Step

    def comparisons(self, batch: torch.Tensor) -> int:
        """Count the messages of one more step that only compare."""
        before = compared(self.group)
        self.step(batch)
        return compared(self.group) - before


def trained(case: Case, level: str) -> Trained:
    """Train at the given level of the order check."""
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    model: Any = case.build()
    for block in case.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_order_check(level)
    return Trained(group, Task(case, mesh, bf16=False, optimizer="sgd", local=False).step(model))


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Return a row with the time of each level, its ratio to no checks, and the number of comparisons in a step."""
    batch = case.batch(torch.Generator().manual_seed(dist.get_rank()))
    levels = {level: trained(case, level) for level in LEVELS}
    variants = {level: measured(each.step, batch) for level, each in levels.items()}
    taken = over_ranks(interleaved(variants, rounds, warm_up=WARM_UP))
    row: dict[str, Any] = {}
    for measure in MEASURES:
        off, *checked = (taken[measure][level] for level in LEVELS)
        row[f"off {measure}"] = spread(off)
        row |= {f"{level}/off {measure}": ratios(of, off) for level, of in zip(LEVELS[1:], checked, strict=True)}
    return row | {f"{level} compares": levels[level].comparisons(batch) for level in LEVELS[1:]}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", default="gpt-256,gpt-32,experts", help=f"of {', '.join(CASES)}")
    options.add_argument("--rounds", type=int, default=40)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks begin with the same values
    cases = ["experts"] if arguments.quick else arguments.cases.split(",")
    rounds = 6 if arguments.quick else arguments.rounds
    rows = [{"case": case, **measure(CASES[case], rounds)} for case in cases]
    if dist.get_rank() == 0:
        columns = ["case", "off wall", *(f"{level}/off {measure}" for level in LEVELS[1:] for measure in MEASURES)]
        columns += [f"{level} compares" for level in LEVELS[1:]]
        publish("order check", {"ranks": dist.get_world_size()}, columns, rows, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
