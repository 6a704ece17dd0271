"""Measures a training step against torch's FSDP2, FSDP1, DDP and no communication, step by step in turn.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/step_time.py --cases gpt-256,gpt-32

All variants run in turn in the same processes, so that other load of the machine affects all of them. CPU time and
minor page faults are those of all threads of a rank, as mean over ranks; wall time is that of the slowest rank. Ratios
compare adjacent steps. FSDP2 runs with its defaults and with explicit prefetch; the one with the better median is used.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import CASES
from report import interleaved, parser, publish, ratios, spread
from torch.distributed.device_mesh import init_device_mesh
from trainers import FSDP2, FSDP2_PREFETCH, OPTIMIZERS, OURS, TRAINERS, Task, absent

WARM_UP = 3
MEASURES = ("cpu", "wall", "faults")


def used() -> torch.Tensor:
    """Return the CPU milliseconds of all threads so far, the wall clock in milliseconds, and minor page faults."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = usage.ru_utime + usage.ru_stime
    return torch.tensor([cpu * 1e3, time.perf_counter() * 1e3, usage.ru_minflt], dtype=torch.float64)


def measured(step: Callable[[torch.Tensor], object], batch: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return one step as a variant that returns its usage. All ranks begin it together."""

    def run() -> torch.Tensor:
        dist.barrier()
        before = used()
        step(batch)
        return used() - before

    return run


def over_ranks(samples: dict[str, list[torch.Tensor]]) -> dict[str, dict[str, list[float]]]:
    """Return the mean over ranks by measure and variant, and for wall time the maximum."""
    mean = torch.stack([torch.stack(steps) for steps in samples.values()])
    longest = mean.clone()
    dist.all_reduce(mean)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    mean /= dist.get_world_size()
    chosen = {"cpu": mean[..., 0], "wall": longest[..., 1], "faults": mean[..., 2]}
    return {measure: dict(zip(samples, values.tolist(), strict=True)) for measure, values in chosen.items()}


def compare(taken: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Return a row: each measure of each variant, and the ratios of CPU and wall time of ours to the others."""
    row: dict[str, Any] = {}
    for measure, of in taken.items():
        row |= {f"{name} {measure}": spread(samples) for name, samples in of.items()}
        if measure == "faults" or OURS not in of:  # variants without any faults would be divisors of zero
            continue
        row |= {f"ours/{name} {measure}": ratios(of[OURS], of[name]) for name in of if name != OURS}
        peers = [name for name in (FSDP2, FSDP2_PREFETCH) if name in of]
        if peers:
            best = min(peers, key=lambda name: row[f"{name} {measure}"]["median"])
            row[f"ours/best fsdp2 {measure}"] = row[f"ours/{best} {measure}"]
    return row


def measure(task: Task, names: list[str], rounds: int) -> dict[str, Any]:
    batch = task.case.batch(torch.Generator().manual_seed(dist.get_rank()))
    if task.bf16 and batch.is_floating_point():
        batch = batch.bfloat16()
    variants = {}
    for name in names:
        torch.manual_seed(0)
        variants[name] = measured(TRAINERS[name](task), batch)
    return compare(over_ranks(interleaved(variants, rounds, warm_up=WARM_UP)))


def columns(names: list[str]) -> list[str]:
    """The columns of the table. The JSON has all values."""
    best = ["best fsdp2"] if {FSDP2, FSDP2_PREFETCH} & set(names) else []
    others = [*best, *(name for name in names if name not in (OURS, FSDP2, FSDP2_PREFETCH))]
    shown = [f"ours/{name} {measure}" for name in others for measure in ("cpu", "wall")]
    return ["case", *shown, *(f"{name} faults" for name in names if name in (OURS, FSDP2))]


def chosen(arguments: Any) -> list[str]:
    """Return the requested variants that are installed, and print the missing ones."""
    names = [name for name in arguments.variants.split(",") if name != FSDP2_PREFETCH or arguments.peer_prefetch]
    missing = {name: reason for name in names if (reason := absent(name))}
    if dist.get_rank() == 0:
        for name, reason in missing.items():
            print(f"{name} is left out: {reason}")
    return [name for name in names if name not in missing]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    options.add_argument("--variants", default=",".join(TRAINERS), help=f"of {', '.join(TRAINERS)}")
    options.add_argument("--bf16", action="store_true", help="bf16 parameters, fp32 reduction")
    options.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    options.add_argument("--local-optimizer", action="store_true", help="ours steps through local_optimizer")
    options.add_argument(
        "--no-peer-prefetch", dest="peer_prefetch", action="store_false", help="FSDP2 as it comes only"
    )
    options.add_argument("--rounds", type=int, default=12)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = chosen(arguments)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = []
    for case in ["experts"] if arguments.quick else arguments.cases.split(","):
        task = Task(CASES[case], mesh, arguments.bf16, arguments.optimizer, arguments.local_optimizer)
        rows.append({"case": case, **measure(task, names, 3 if arguments.quick else arguments.rounds)})
    if dist.get_rank() == 0:
        settings = {
            "ranks": dist.get_world_size(),
            "dtype": "bf16" if arguments.bf16 else "fp32",
            "optimizer": arguments.optimizer + ", ours through local_optimizer" * arguments.local_optimizer,
        }
        publish("step time", settings, columns(names), rows, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
