"""Kills saving processes at random moments, repeatedly in the same folder, and checks the remaining files.

    python -m tests.helpers.kill_saver FOLDER KILLS SEED

Two ranks save repeatedly, and save each step twice, until one or both are killed. They are forked from this process,
which has imported everything and has no process group, so that one kill takes less than a second. After every kill, the
newest checkpoint must load, must have a version that was saved, and must not be older than the last checkpoint that a
rank knew to be complete. The next saving processes continue from it.

Finally, two ranks begin an asynchronous save and exit. The exit must finish the save.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import latest, load, save

RANKS = 2


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 301), nn.Linear(301, 5))


@torch.no_grad()
def set_to(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.fill_(value)


def save_forever(rank: int, folder: Path, round_: int, begun: int) -> None:
    """Save in an endless loop, and append every finished save to a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / f"store-{round_}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=20))
    model = build()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    version = (latest_version(folder) or 0) + 1 if begun else 1
    with (folder / f"done-{rank}").open("a", buffering=1) as done:
        while True:
            set_to(model, version)
            step = version // 2  # every step is saved twice
            again = version % 3 == 0
            extra = {"version": version}
            save(folder / "run", model, optimizer, extra, step=step, keep_last=3, asynchronous=again).wait()
            done.write(f"{version}\n")
            version += 1


def latest_version(folder: Path) -> int | None:
    """Return the version of the newest checkpoint, which must be complete."""
    if latest(folder / "run") is None:
        return None
    model = build()
    version: int = load(folder / "run", model)["version"]
    for parameter in model.parameters():
        assert parameter.eq(version).all(), f"version {version} mixes values of several saves: {parameter.unique()}"
    return version


def last_complete_version(folder: Path) -> int:
    files = folder.glob("done-*")
    return max((int(line) for file in files for line in file.read_text().split("\n")[:-1]), default=0)


def fork(rank: int, folder: Path, round_: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        save_forever(rank, folder, round_, round_)
    except BaseException:
        traceback.print_exc(file=(folder / f"error-{round_}-{rank}").open("w"))
    os._exit(1)


def kill_once(folder: Path, round_: int, chance: random.Random) -> None:
    before = last_complete_version(folder)
    children = [fork(rank, folder, round_) for rank in range(RANKS)]
    begin = time.monotonic()
    while last_complete_version(folder) == before:  # the kill must happen during a save, not during startup
        assert time.monotonic() < begin + 60, "no save finished within a minute"
        time.sleep(0.005)
    time.sleep(chance.uniform(0, 0.15))
    for child in children if chance.random() < 0.6 else chance.sample(children, 1):
        os.kill(child, chance.choice([signal.SIGKILL, signal.SIGTERM]))
    time.sleep(0.02)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def warm_up(folder: Path) -> None:
    """Import all modules that saving needs before the first fork. The process group starts no threads."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    model = build()
    fully_shard(model)
    save(folder / "warm", model, torch.optim.SGD(model.parameters()))
    dist.destroy_process_group()


def begin_save_and_exit(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store-last"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = build()
    fully_shard(model)
    set_to(model, -1)
    save(folder / "run", model, extra={"version": -1}, asynchronous=True)
    dist.destroy_process_group()


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    (folder / "run").mkdir(parents=True)
    warm_up(folder)
    chance, unfinished = random.Random(seed), 0
    for round_ in range(kills):
        kill_once(folder, round_, chance)
        known, found = last_complete_version(folder), latest_version(folder)
        assert found is not None
        assert found in (known, known + 1), f"after kill {round_}: {found}, though {known} was complete"
        unfinished += any(name.endswith((".partial", ".old", ".deleted")) for name in os.listdir(folder / "run"))
    print(f"{kills} kills, {last_complete_version(folder)} saves, {unfinished} interrupted by a kill")  # noqa: T201
    sys.stdout.flush()
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            begin_save_and_exit(rank, folder)
            return
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * RANKS
    assert latest_version(folder) == -1


if __name__ == "__main__":
    main()
