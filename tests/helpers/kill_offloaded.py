"""Kills runs with optimizer state in files in the middle of a step, repeatedly, and resumes each from its checkpoint.

    python -m tests.helpers.kill_offloaded FOLDER KILLS SEED

A run saves a checkpoint after each step, until the alarm of its timer kills it in a step. It is forked from this
process, which has imported everything. Each run must resume with the bits of a run that was never killed, and no file
may be left in the folder of the state.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import fully_shard, offload_optimizer
from composable_fsdp.checkpoint import load, save
from tests.helpers.sharding import full_value

STEPS_AHEAD = 2
"""The most steps that a run finishes before it may be killed. It finishes one at least."""


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


def resumed(folder: Path, finished: int, expected: Sequence[torch.Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Resume from the checkpoint after ``finished`` steps, if there are any, and check the ``expected`` values."""
    model, optimizer = build()
    offload_optimizer(optimizer, folder / "state", bucket_bytes=1 << 16)
    if finished:
        step = load(folder / "run", model, optimizer)["step"]
        assert step == finished, f"resumed after step {step}, not {finished}"
        for found, value in zip(values(model, optimizer), expected, strict=True):
            assert torch.equal(found, value), f"other bits after step {step}"
    return model, optimizer


def run(folder: Path, step: int, expected: Sequence[torch.Tensor], chance: random.Random) -> None:
    """Resume after ``step`` steps, then step and save until killed in a step.

    The alarm kills the process as ``SIGKILL`` does: no code of the process runs any more. It comes at a random moment
    within the time that the step before took. If the step was faster, the next one has an alarm too.
    """
    model, optimizer = resumed(folder, step, expected)
    unharmed, seconds = step + chance.randint(1, STEPS_AHEAD), 0.0
    with (folder / "steps").open("a", buffering=1) as steps:
        while True:
            steps.write("begin\n")
            begin = time.monotonic()
            if step >= unharmed:
                signal.setitimer(signal.ITIMER_REAL, max(chance.uniform(0, seconds), 1e-6))
            step_once(model, optimizer, step)
            steps.write("end\n")
            signal.setitimer(signal.ITIMER_REAL, 0)
            seconds = time.monotonic() - begin
            step += 1
            save(folder / "run", model, optimizer, {"step": step}, step=step, keep_last=2)
            steps.write("saved\n")


def run_until_killed(folder: Path, step: int, expected: Sequence[torch.Tensor], seed: float) -> tuple[int, bool]:
    """Run in a forked process. Return the number of steps with a checkpoint, and whether the alarm came in a step."""
    child = os.fork()
    if not child:
        try:
            run(folder, step, expected, random.Random(seed))
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == -signal.SIGALRM, f"a run that resumed after step {step} ended with exit code {code}"
    lines = (folder / "steps").read_text().split()
    return lines.count("saved"), lines[-1] == "begin"


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    warm, optimizer = build()
    step_once(warm, offload_optimizer(optimizer, folder / "warm"), 0)
    save(folder / "warm-run", warm, optimizer)
    load(folder / "warm-run", warm, optimizer)
    reference, plain = build()
    gc.collect()
    gc.freeze()  # a collection in a run would copy the pages of this process
    done, in_steps, tries, chance = 0, 0, 0, random.Random(seed)
    expected: list[torch.Tensor] = []
    while in_steps < kills:
        assert tries < 10 * kills, f"only {in_steps} of {tries} kills were in a step"
        saved, was_in_step = run_until_killed(folder, done, expected, chance.random())
        in_steps += was_in_step
        tries += 1
        assert os.listdir(folder / "state") == [], "files are left"
        assert saved > done, "the run has saved nothing"
        for step in range(done, saved):
            step_once(reference, plain, step)
        done, expected = saved, values(reference, plain)
    resumed(folder, done, expected)
    print(f"{kills} kills wanted, {in_steps} in a step")  # noqa: T201


if __name__ == "__main__":
    main()
