"""A rank with a fault, for the section ``faults`` of ``gpu_report.py``, which starts it by torchrun.

    torchrun --standalone --nproc-per-node 2 benchmarks/gpu_fault.py cuda raises FOLDER

The last rank has the fault in its third step. It writes the time of it to ``FOLDER``, and each other rank the time and
the text of its error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from tests.gpu.sharing import mesh_on
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.training import play_task

__all__ = ["FAULTS", "LAST"]

LAST = "last"
"""The name of the file of the last rank."""
SECONDS = 20.0
"""The timeout of the process group, after which NCCL ends the process on its own."""


def raise_error(device: str) -> None:
    raise ArithmeticError("a planted error")


def be_killed(device: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def never_come(device: str) -> None:
    time.sleep(SECONDS + 20)


def have_no_memory(device: str) -> None:
    torch.empty(1 << 46, device=device)


FAULTS: dict[str, Callable[[str], None]] = {
    "raises": raise_error,
    "is killed": be_killed,
    "does not come": never_come,
    "has no memory": have_no_memory,
}


def main() -> None:
    device, name, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    task = TASKS["tied"]
    model = shard_layers(
        task.build(),
        fully_shard,
        mesh=mesh_on(device, timeout=timedelta(seconds=SECONDS)),
        mp_policy=MixedPrecisionPolicy(torch.bfloat16),
    )
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for number in range(2):
        play_task("tied")(model, number, dist.get_rank())
    torch.get_device_module(device).synchronize()
    if is_last:
        Path(folder, f"{LAST}.json").write_text(json.dumps({"time": time.time()}))
        FAULTS[name](device)
    try:
        play_task("tied")(model, 2, dist.get_rank())
        torch.get_device_module(device).synchronize()
    except Exception as error:
        found = {"time": time.time(), "text": f"{type(error).__name__}: {error}"}
        Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
        raise


if __name__ == "__main__":
    main()
