"""Train with Lightning Fabric's ``ModelParallelStrategy``: from meta, accumulation, clipping, saving."""

import os
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from models import blocks, vectors
from outcome import STEPS, tell
from torch.distributed.fsdp import fully_shard

MICROBATCHES = 2


def parallelize(model, mesh):
    for block in model:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def build(fabric):
    with fabric.init_module(empty_init=True):
        model = blocks()
    model = fabric.setup_module(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.distributed.tensor.distribute_tensor(
                    torch.randn(parameter.shape) / 8, parameter.device_mesh, parameter.placements
                )
            )
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(fabric, model, optimizer, steps):
    losses = []
    for step in steps:
        for microbatch in range(MICROBATCHES):
            x = vectors(MICROBATCHES * step + microbatch, fabric.global_rank)
            with fabric.no_backward_sync(model, enabled=microbatch + 1 < MICROBATCHES):
                loss = (model(x) - x).square().mean()
                fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    folder, half = Path(os.environ["CLIENT_OUT"]) / "fabric", STEPS // 2
    model, optimizer = build(fabric)
    losses = train(fabric, model, optimizer, range(half))
    fabric.save(folder, {"model": model, "optimizer": optimizer})
    losses += train(fabric, model, optimizer, range(half, STEPS))
    again, optimizer = build(fabric)
    fabric.load(folder, {"model": again, "optimizer": optimizer})
    tell([model], losses, resumed=train(fabric, again, optimizer, range(half, STEPS)))


if __name__ == "__main__":
    main()
