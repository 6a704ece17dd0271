"""Train a small sharded model with regular checkpoints, and resume from the newest one: the program of every launcher.

    torchrun --standalone --nproc-per-node 2 examples/launch/train.py --out runs/launch

``torchrun.sh``, ``slurm.sbatch``, ``slurm_srun.sh``, ``kubernetes.yaml`` and ``ray_train.py`` beside this file start it
on several hosts. The folder ``--out`` must be on storage that all hosts share. ``--fail-at`` shows what a launcher does
when a rank raises. The last line has the loss after the last step, which is the same with and without failures.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

from composable_fsdp import checkpoint, fully_shard, shutdown

LAYERS, WIDTH, BATCH = 4, 64, 16


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small sharded model, with checkpoints.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, shared by all hosts")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--save-every", type=int, default=5, help="steps from checkpoint to checkpoint")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="time to add to each step")
    parser.add_argument("--fail-at", type=int, default=0, help="step in which a rank raises, in a run from the start")
    parser.add_argument("--fail-rank", type=int, default=1, help="the rank that raises")
    return parser.parse_args(arguments)


class Training:
    """A sharded model, its optimizer, and the number of finished steps."""

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.device = accelerator or torch.device("cpu")
        if accelerator is not None:
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        torch.manual_seed(0)  # so that all ranks build the same values
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def resume(self, folder: Path) -> None:
        """Load the newest intact checkpoint in ``folder``, if there is one."""
        if checkpoint.latest(folder) is not None:
            self.load(folder)

    def load(self, path: Path) -> None:
        """Load the checkpoint ``path``, or the newest intact one in the folder ``path``."""
        self.step = checkpoint.load(path, self.model, self.optimizer, fallback=True)["step"]

    def save(self, folder: Path) -> Path:
        return Path(checkpoint.save(folder, self.model, self.optimizer, {"step": self.step}, keep_last=2))

    def advance(self) -> float:
        """Train one step on data that depend on the step and the rank only. Returns the mean loss over ranks."""
        random = torch.Generator().manual_seed(self.step * dist.get_world_size() + dist.get_rank())
        inputs = torch.randn(BATCH, WIDTH, generator=random).to(self.device)
        loss: Tensor = (self.model(inputs) - inputs.roll(1, dims=1)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()


@record  # writes the exception of a rank where torchrun finds it, so that it reports the rank that raised first
def main() -> None:
    options = parse_arguments()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # An accelerator needs both backends, because checkpoints communicate from the CPU.
    backend = accelerator and dist.get_default_backend_for_device(accelerator)
    dist.init_process_group(f"cpu:gloo,{accelerator}:{backend}" if accelerator else "gloo")
    rank, training = dist.get_rank(), Training()
    training.resume(options.out)
    start, loss = training.step, float("nan")
    if rank == 0:
        print(f"{dist.get_world_size()} ranks begin after step {start}", flush=True)
    while training.step < options.steps:
        if not start and training.step == options.fail_at > 0 and rank == options.fail_rank:
            raise ValueError(f"--fail-at {options.fail_at} asked rank {rank} to raise")
        loss = training.advance()
        time.sleep(options.step_seconds)
        if training.step % options.save_every == 0 or training.step == options.steps:
            training.save(options.out)
    if rank == 0:
        print(f"done: {training.step} steps, loss {loss!r}", flush=True)
    shutdown()


if __name__ == "__main__":
    main()
