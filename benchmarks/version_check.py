"""Measures a training step without the version check, and with it (the default).

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/version_check.py

The settings run in turn in the same processes, step by step. Ratios compare adjacent steps, with the step without the
check. ``set_in_place_check`` describes the settings.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models import CASES, Case
from report import interleaved, parser, publish, ratios, spread
from step_time import measured, over_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from trainers import Step, Task

from composable_fsdp import fully_shard

CHECKS = {"off": "off", "default": "counted"}
WARM_UP = 3
MEASURES = ("cpu", "wall")


def trained(case: Case, mesh: DeviceMesh, level: str) -> Step:
    """Train a model with this level of the check."""
    model: Any = case.build()
    for block in case.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_in_place_check(level)
    return Task(case, mesh, bf16=False, optimizer="sgd", local=False).step(model)


def measure(case: Case, mesh: DeviceMesh, rounds: int) -> dict[str, Any]:
    """Return a row with the time without the check and the ratios of the default."""
    batch = case.batch(torch.Generator().manual_seed(dist.get_rank()))
    variants = {name: measured(trained(case, mesh, level), batch) for name, level in CHECKS.items()}
    taken = over_ranks(interleaved(variants, rounds, warm_up=WARM_UP))
    row: dict[str, Any] = {}
    for measure in MEASURES:
        off, *checked = (taken[measure][name] for name in CHECKS)
        row[f"off {measure}"] = spread(off)
        row |= {f"{name}/off {measure}": ratios(of, off) for name, of in zip(list(CHECKS)[1:], checked, strict=True)}
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", default="gpt-256,gpt-32,tiny-200", help=f"of {', '.join(CASES)}")
    options.add_argument("--rounds", type=int, default=40)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks begin with the same values
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cases = ["experts"] if arguments.quick else arguments.cases.split(",")
    rounds = 6 if arguments.quick else arguments.rounds
    rows = []
    for case in cases:
        torch.manual_seed(0)
        rows.append({"case": case, **measure(CASES[case], mesh, rounds)})
    if dist.get_rank() == 0:
        columns = ["case", "off wall", *(f"{name}/off {measure}" for name in list(CHECKS)[1:] for measure in MEASURES)]
        publish("version check", {"ranks": dist.get_world_size()}, columns, rows, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
