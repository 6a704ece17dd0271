"""Pipeline parallelism: two stages, each sharded over the ranks that hold it.

torchrun --standalone --nproc-per-node 2 examples/pipeline.py    # 4: two data-parallel ranks for each stage
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from composable_fsdp import fully_shard, shutdown

STAGES, MICROBATCHES, WIDTH = 2, 4, 32


def main() -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (STAGES, ranks // STAGES), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    part = nn.Sequential(*blocks[2 * stage : 2 * stage + 2])  # the blocks of this rank's stage
    for block in part:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)  # gathered once for all microbatches
    fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    pipeline = PipelineStage(part, stage, STAGES, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(pipeline, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    data = torch.Generator().manual_seed(mesh["dp"].get_local_rank())  # the same on all stages
    x = torch.randn(16, WIDTH, generator=data)
    for step in range(20):
        losses: list[torch.Tensor] = []
        schedule.step(*([x] if stage == 0 else []), target=0.5 * x, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses and step % 5 == 4:  # on the last stage
            print(f"rank {dist.get_rank()} step {step} loss {torch.stack(losses).mean().item():.4f}")
    shutdown()


if __name__ == "__main__":
    main()
