"""Kills runs with optimizer state in files in the middle of a step, repeatedly, and resumes each from its checkpoint.

    python -m tests.helpers.kill_offloaded FOLDER KILLS SEED

A run saves a checkpoint after each step. It is forked from this process, which has imported everything. Each run must
resume with the bits of a run that was never killed, and no file may be left in the folder of the state.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import fully_shard, offload_optimizer
from composable_fsdp.checkpoint import load, save
from tests.helpers.sharding import full_value

STEPS_AHEAD = 2
"""The steps that a run finishes before it may be killed."""


def build() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        entry = optimizer.state[parameter]
        found += [full_value(each).clone() for each in (parameter, entry["exp_avg"], entry["exp_avg_sq"])]
    return found


def resumed(folder: Path) -> tuple[nn.Module, torch.optim.AdamW, int]:
    model, optimizer = build()
    offload_optimizer(optimizer, folder / "state", bucket_bytes=1 << 16)
    step = load(folder / "run", model, optimizer)["step"] if (folder / "run").exists() else 0
    return model, optimizer, step


def run(folder: Path, round_: int) -> None:
    """Step and save until killed. Write down when a step begins and when it ends."""
    model, optimizer, step = resumed(folder)
    with (folder / f"steps-{round_}").open("a", buffering=1) as steps:
        while True:
            steps.write("begin\n")
            step_once(model, optimizer, step)
            step += 1
            steps.write("end\n")
            save(folder / "run", model, optimizer, {"step": step}, step=step, keep_last=2)
            steps.write("saved\n")


def kill_in_a_step(folder: Path, round_: int, chance: random.Random) -> bool:
    """Kill a run at a random moment, after some steps. Return whether it was in a step."""
    child = os.fork()
    if not child:
        try:
            run(folder, round_)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    file, begin = folder / f"steps-{round_}", time.monotonic()
    wanted = chance.randint(STEPS_AHEAD, 2 * STEPS_AHEAD)
    delay = chance.uniform(0, 0.01)
    while True:
        lines = file.read_text().split() if file.exists() else []
        if lines.count("saved") >= wanted and lines[-1] == "begin":
            break
        assert time.monotonic() < begin + 60, "no step within a minute"
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return file.read_text().split()[-1] == "begin"


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    warm, optimizer = build()
    step_once(warm, offload_optimizer(optimizer, folder / "warm"), 0)
    save(folder / "warm-run", warm, optimizer)
    reference, plain = build()
    done, in_steps, tries, chance = 0, 0, 0, random.Random(seed)
    while in_steps < kills:
        assert tries < 10 * kills, f"only {in_steps} of {tries} kills were in a step"
        in_steps += kill_in_a_step(folder, tries, chance)
        tries += 1
        assert os.listdir(folder / "state") == [], "files are left"
        model, optimizer, step = resumed(folder)
        while done < step:
            step_once(reference, plain, done)
            done += 1
        for found, expected in zip(values(model, optimizer), values(reference, plain), strict=True):
            assert torch.equal(found, expected), f"after kill {tries}, step {step}"
        del model, optimizer
    print(f"{kills} kills wanted, {in_steps} in a step")  # noqa: T201


if __name__ == "__main__":
    main()
