"""Record a short training run and draw ``docs/timeline.png``.

    python benchmarks/timeline_picture.py

It trains four transformer layers on two gloo ranks for 8 steps, after which ``composable-fsdp timeline`` draws the
one of median time. Two idle cores take half a minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import fully_shard, shutdown

STEPS, WIDTH, LAYERS = 8, 256, 4
PICTURE = Path(__file__).parents[1] / "docs" / "timeline.png"


def train() -> None:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(STEPS):
        model(torch.randn(8, 64, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shutdown()


def main() -> None:
    if "RANK" in os.environ:
        train()
        return
    with tempfile.TemporaryDirectory() as folder:
        variables = {"COMPOSABLE_FSDP_TIMELINE": folder, "COMPOSABLE_FSDP_SHARED_MEMORY": "0", "OMP_NUM_THREADS": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        subprocess.run(torchrun, check=True, env={**os.environ, **variables})
        subprocess.run([sys.executable, "-m", "composable_fsdp", "timeline", folder], check=True)
        shutil.copy(Path(folder, "timeline.png"), PICTURE)


if __name__ == "__main__":
    main()
