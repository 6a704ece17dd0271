"""Measures the CPU time of each part of a step, which limits what a faster library could gain.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/step_parts.py --cases gpt-32,tiny-200

A clock of the thread that runs the step wraps the methods that one part of the library calls in another. Time is
counted for the innermost part. The time of other threads, such as gloo's, is a separate part. The clock itself takes
about a microsecond for each call, so the sum is more than a step without it. FSDP2 with its defaults, and the same
model without communication, run in turn with it without a clock. ``model and optimizer`` relative to FSDP2's step is
the ratio ``ours/fsdp2`` of a library that takes no time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from models import CASES
from report import interleaved, parser, publish, ratios, spread
from step_time import WARM_UP
from torch.distributed.device_mesh import init_device_mesh
from trainers import FSDP2, OPTIMIZERS, OURS, TRAINERS, Task

from composable_fsdp._core.backward import GroupReduction
from composable_fsdp._core.gather import AllGather
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.root import Root
from composable_fsdp.plugins.gloo.gloo_communicator import GlooCommunicator, GlooWork
from composable_fsdp.plugins.shared_memory.shm_communicator import SharedMemoryCommunicator, ShmWork

MODEL, OTHERS = "model and optimizer", "other threads"
PARTS: Mapping[str, Sequence[tuple[type, Sequence[str]]]] = {
    "hooks": [
        (Root, ("pre_forward", "post_forward", "pre_backward", "gradient_ready", "post_backward", "end_backward")),
        (ParamGroup, ("arrive",)),
    ],
    "gathers": [(AllGather, ("launch", "finish"))],
    "reductions": [(GroupReduction, ("run", "complete"))],
    "communicator": [
        (SharedMemoryCommunicator, ("launch",)),
        (GlooCommunicator, ("launch",)),
        (ShmWork, ("wait",)),
        (GlooWork, ("wait",)),
    ],
}


class Clock:
    """The CPU seconds of this thread by part. ``running`` has the current part last, after the parts around it."""

    def __init__(self) -> None:
        self.taken = dict.fromkeys((MODEL, *PARTS), 0.0)
        self._running = [MODEL]
        self._since = time.thread_time()

    def wrap(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``method`` with its time counted for ``part``."""

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._count()
            self._running.append(part)
            try:
                return method(*args, **kwargs)
            finally:
                self._count()
                self._running.pop()

        return run

    def _count(self) -> None:
        now = time.thread_time()
        self.taken[self._running[-1]] += now - self._since
        self._since = now

    def measure(self, step: Callable[[torch.Tensor], object], batch: torch.Tensor) -> dict[str, float]:
        """Return the CPU milliseconds by part of one step."""
        self._count()
        before, process, thread = dict(self.taken), time.process_time(), time.thread_time()
        step(batch)
        self._count()
        others = time.process_time() - process - (time.thread_time() - thread)
        return {part: (self.taken[part] - before[part]) * 1e3 for part in before} | {OTHERS: max(0.0, others) * 1e3}


def install(clock: Clock) -> None:
    """Wrap the methods of ``PARTS``. Must be called once, before anything is sharded."""
    for part, classes in PARTS.items():
        for owner, names in classes:
            for name in names:
                setattr(owner, name, clock.wrap(part, getattr(owner, name)))


def measure(task: Task, clock: Clock, rounds: int) -> dict[str, Any]:
    batch = task.case.batch(torch.Generator().manual_seed(dist.get_rank()))
    steps = {}
    for name in (OURS, FSDP2, "none"):
        torch.manual_seed(0)
        steps[name] = TRAINERS[name](task)

    def whole(name: str) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            dist.barrier()
            begin = time.process_time()
            parts = clock.measure(steps[name], batch)
            return parts | {"step": (time.process_time() - begin) * 1e3}

        return run

    samples = interleaved({name: whole(name) for name in steps}, rounds, warm_up=WARM_UP)
    totals = {name: [sample["step"] for sample in taken] for name, taken in samples.items()}
    row: dict[str, Any] = {part: spread([sample[part] for sample in samples[OURS]]) for part in (*clock.taken, OTHERS)}
    row |= {f"{name} step": spread(taken) for name, taken in totals.items()}
    row["model and optimizer/fsdp2"] = ratios([sample[MODEL] for sample in samples[OURS]], totals[FSDP2])
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", default="gpt-32,tiny-200", help=f"of {', '.join(CASES)}")
    options.add_argument("--bf16", action="store_true", help="bf16 parameters, fp32 reduction")
    options.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    options.add_argument("--local-optimizer", action="store_true", help="ours steps through local_optimizer")
    options.add_argument("--rounds", type=int, default=30)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    clock = Clock()
    install(clock)
    rows = []
    for case in ["tiny-200"] if arguments.quick else arguments.cases.split(","):
        task = Task(CASES[case], mesh, arguments.bf16, arguments.optimizer, arguments.local_optimizer)
        rows.append({"case": case, **measure(task, clock, 3 if arguments.quick else arguments.rounds)})
    if dist.get_rank() == 0:
        settings = {
            "ranks": dist.get_world_size(),
            "dtype": "bf16" if arguments.bf16 else "fp32",
            "optimizer": arguments.optimizer + ", ours through local_optimizer" * arguments.local_optimizer,
        }
        columns = ["case", *clock.taken, OTHERS, "ours step", "fsdp2 step", "none step", "model and optimizer/fsdp2"]
        publish("parts of a step, CPU ms", settings, columns, rows, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
