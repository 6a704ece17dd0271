"""Measures saving and loading of model and AdamW state, against torch's FSDP2 with ``torch.distributed.checkpoint``.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/checkpoint.py

``save`` is the time until all data are on disk, ``stall`` the pause of training for an asynchronous save, and ``load``
the time to load into an existing model and optimizer. Ours computes checksums on saving and compares them on loading,
unless the row says unverified; the other has none. All ranks begin together, and the time is that of the slowest rank.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from libraries import LIBRARIES, shard
from report import interleaved, parser, publish, ratios, spread, timed
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp.checkpoint import load, save

MIB = "4,64,256"
BLOCKS = 8


class Trained:
    """Build a sharded model of ``mib`` MiB of fp32 parameters, after a step of AdamW with state of twice the size."""

    def __init__(self, library: str, mib: int, mesh: DeviceMesh) -> None:
        width = max(16, int((mib * 2**20 / 4 / BLOCKS) ** 0.5))
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(BLOCKS)))
        shard(LIBRARIES[library], self.model, list(self.model), mesh, bf16=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(1, width)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return the state that users of torch's checkpoints save."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def fresh(folder: Path) -> Path:
    """Return the path of a folder that does not exist, so that neither side deletes files."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    return folder


def ours(trained: Trained, folder: Path) -> dict[str, Callable[[], float]]:
    def write() -> float:
        target = fresh(folder / "sync")
        return timed(lambda: save(target, trained.model, trained.optimizer))()

    def stall() -> float:
        target, pending = fresh(folder / "async"), []
        taken = timed(lambda: pending.append(save(target, trained.model, trained.optimizer, asynchronous=True)))()
        pending[0].wait()
        return taken

    def read(verify: bool) -> Callable[[], float]:
        return timed(lambda: load(folder / "sync", trained.model, trained.optimizer, verify=verify))

    return {"save": write, "stall": stall, "load": read(True), "load unverified": read(False)}


def peers(trained: Trained, folder: Path) -> dict[str, Callable[[], float]]:
    def write() -> float:
        target = fresh(folder / "sync")
        return timed(lambda: dcp.save(trained.state(), checkpoint_id=target))()

    def stall() -> float:
        target, pending = fresh(folder / "async"), []
        taken = timed(lambda: pending.append(dcp.async_save(trained.state(), checkpoint_id=target)))()
        pending[0].result()
        return taken

    def read() -> None:
        state = trained.state()
        dcp.load(state, checkpoint_id=folder / "sync")
        set_state_dict(
            trained.model,
            trained.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    return {"save": write, "stall": stall, "load": timed(read)}


def longest(samples: list[float]) -> list[float]:
    """Return the maximum over ranks of each sample."""
    times = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def measure(mib: int, rounds: int, mesh: DeviceMesh, folder: Path) -> list[dict[str, Any]]:
    made = {
        "ours": ours(Trained("ours", mib, mesh), folder / "ours"),
        "fsdp2": peers(Trained("fsdp2", mib, mesh), folder / "fsdp2"),
    }
    variants = {f"{name} {what}": action for name, actions in made.items() for what, action in actions.items()}
    taken = {name: longest(samples) for name, samples in interleaved(variants, rounds, warm_up=1).items()}
    rows = []
    for what in made["ours"]:
        own, other = taken[f"ours {what}"], taken[f"fsdp2 {what.split()[0]}"]
        row = {"MiB": mib, "what": what, "ours/fsdp2": ratios(own, other)}
        rows.append({**row, "ours ms": spread(own), "fsdp2 ms": spread(other)})
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--mib", default=MIB, help="sizes of the parameters")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--folder", type=Path, default=None, help="on the disk to measure; a temporary one otherwise")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks begin with the same values
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    given = [tempfile.mkdtemp(dir=arguments.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(given)
    folder = Path(str(given[0]))
    rows = []
    for mib in [4] if arguments.quick else map(int, arguments.mib.split(",")):
        rows += measure(mib, 3 if arguments.quick else arguments.rounds, mesh, folder)
    if dist.get_rank() == 0:
        columns = ["MiB", "what", "ours ms", "fsdp2 ms", "ours/fsdp2"]
        publish("checkpoints", {"ranks": dist.get_world_size()}, columns, rows, arguments.out)
        shutil.rmtree(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
