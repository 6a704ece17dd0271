"""Train with Lightning Fabric, whose strategy shards the model with this library's ``fully_shard``.

    torchrun --standalone --nproc-per-node 2 examples/lightning_fabric.py --out runs/fabric

Fabric makes the process group and the mesh, and passes both to ``parallelize``. Its ``no_backward_sync`` accumulates
gradients without communication, and it saves and loads the distributed checkpoint. The exit code is 0 if training
continues equally from the loaded checkpoint, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import ModelParallelStrategy
from text.model import ModelShape, Transformer, mean_loss
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp import fully_shard

SEQ = 64
CORPUS = Path(__file__).read_bytes()
SHAPE = ModelShape(layers=2, dim=128, heads=4, hidden=256)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train with Lightning Fabric on this library's fully_shard.",
        epilog="start it with: torchrun --standalone --nproc-per-node 2 examples/lightning_fabric.py",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="as many as torchrun starts")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--microbatches", type=int, default=2, help="backwards per optimizer step")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and microbatch")
    parser.add_argument("--accelerator", default="auto", help="of Fabric: cpu, cuda, ...")
    parser.add_argument("--out", type=Path, default=Path("runs/fabric"), help="folder for the checkpoint")
    return parser.parse_args()


def parallelize(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Make one group per block and one for the rest. Fabric calls this function."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def build(fabric: Fabric) -> tuple[Any, Any]:
    """Build model and optimizer. The model is on meta until Fabric allocates the shards of each rank."""
    seed_everything(0, verbose=False)
    model = fabric.setup_module(Transformer(SHAPE, SEQ))
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))


def train(fabric: Fabric, model: Any, optimizer: Any, options: argparse.Namespace, steps: range) -> list[float]:
    """Train, and return the loss of each step on this rank, as mean of its microbatches."""
    losses = []
    for step in steps:
        total = 0.0
        for microbatch in range(options.microbatches):
            seed = (step * options.microbatches + microbatch) * fabric.world_size + fabric.global_rank
            tokens = draw(options.batch, seed).to(fabric.device)
            with fabric.no_backward_sync(model, enabled=microbatch < options.microbatches - 1):
                loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:]) / options.microbatches
                fabric.backward(loss)
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if step % 20 == 0 or step == steps[-1]:
            fabric.print(f"step {step:3}: loss {total:.3f} on rank 0")
    return losses


def draw(batch: int, seed: int) -> torch.Tensor:
    """Draw windows of the corpus: ``(batch, SEQ + 1)``, int64."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(CORPUS) - SEQ, (batch,), generator=generator).tolist()
    return torch.tensor([list(CORPUS[start : start + SEQ + 1]) for start in starts])


def main() -> int:
    options = parse_options()
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=options.ranks, tensor_parallel_size=1)
    fabric = Fabric(accelerator=options.accelerator, devices=options.ranks, strategy=strategy)
    fabric.launch()

    model, optimizer = build(fabric)
    half = options.steps // 2
    train(fabric, model, optimizer, options, range(half))
    fabric.save(options.out, {"model": model, "optimizer": optimizer})
    fabric.print(f"saved to {options.out}")
    expected = train(fabric, model, optimizer, options, range(half, options.steps))

    model, optimizer = build(fabric)
    fabric.load(options.out, {"model": model, "optimizer": optimizer})
    again = train(fabric, model, optimizer, options, range(half, options.steps))
    same = fabric.strategy.reduce_boolean_decision(again == expected, all=True)
    again_text = "the same" if same else "NOT THE SAME"
    fabric.print(f"steps {half} to {options.steps - 1} again, from the checkpoint: losses are {again_text}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
