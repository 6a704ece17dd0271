"""Data by data-parallel rank, and a start that goes on in the middle of an epoch, on any number of ranks.

torchrun --standalone --nproc-per-node 2 examples/resume_data.py --out runs/data --stop 5
torchrun --standalone --nproc-per-node 2 examples/resume_data.py --out runs/data
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composable_fsdp import fully_shard, shutdown
from composable_fsdp.checkpoint import latest, load, save

SAMPLES, BATCH, EPOCHS = 128, 8, 2  # BATCH is that of all data-parallel ranks together


def rest_of_epoch(epoch: int, seen: int, rank: int, ranks: int) -> list[int]:
    """Return this rank's samples of ``epoch`` after the first ``seen`` ones of all ranks, equally many on each rank."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()  # the same on all ranks
    return order[seen : SAMPLES - SAMPLES % BATCH][rank::ranks]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=Path("runs/data"))
    options.add_argument("--stop", type=int, default=10**9, help="the step after which to end, as if interrupted")
    arguments = options.parse_args()
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, ranks = dist.get_rank(), dist.get_world_size()  # with other parallelism: mesh["dp"].get_local_rank(), .size()
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)), torch.arange(SAMPLES))
    position = {"step": 0, "epoch": 0, "seen": 0}
    if latest(arguments.out):
        position = load(arguments.out, model, optimizer)
    while position["epoch"] < EPOCHS and position["step"] < arguments.stop:
        samples = rest_of_epoch(position["epoch"], position["seen"], rank, ranks)
        for x, number in DataLoader(data, batch_size=BATCH // ranks, sampler=samples):
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            position["step"] += 1
            position["seen"] += BATCH
            print(f"rank {rank} step {position['step']} loss {loss.item():.4f} samples {number.tolist()}")
            if position["step"] == arguments.stop:
                break
        else:
            position |= {"epoch": position["epoch"] + 1, "seen": 0}
        save(arguments.out, model, optimizer, position)
    shutdown()


if __name__ == "__main__":
    main()
