"""Trains with AdamW's state in files, and goes on where a killed run has saved.

torchrun --standalone --nproc-per-node 2 examples/offloaded_state.py --out runs/offloaded
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fully_shard, local_optimizer, offload_optimizer
from composable_fsdp.checkpoint import latest, load, save


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--disk", type=Path, help="a folder on a local disk; by default in --out")
    options.add_argument("--steps", type=int, default=20)
    arguments = options.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    fully_shard(model, policy={nn.Sequential})

    optimizer = local_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True))
    offload_optimizer(optimizer, arguments.disk or arguments.out / "state", bucket_bytes=64 << 10)

    first = load(arguments.out, model, optimizer)["step"] if latest(arguments.out) else 0
    for step in range(first, arguments.steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(32, 64, generator=generator)
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 5 == 0:
            save(arguments.out, model, optimizer, {"step": step + 1}, step=step + 1, keep_last=2)
            if dist.get_rank() == 0:
                print(f"step {step + 1} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
