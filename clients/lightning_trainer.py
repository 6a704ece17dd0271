"""Train with Lightning's ``Trainer`` and ``ModelParallelStrategy``. ``configure_model`` shards the model."""

import os

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from models import blocks, vectors
from outcome import STEPS, tell
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = blocks()
        self.losses = []

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.model:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch, index):
        loss = (self.model(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    data = [row for step in range(2 * STEPS) for rank in range(2) for row in vectors(step, rank, batch=8)]
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=STEPS,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.environ["CLIENT_OUT"],
    )
    module = Module()
    trainer.fit(module, DataLoader(data, batch_size=8))
    tell([module], module.losses)


if __name__ == "__main__":
    main()
