"""Train with torch's pipelining: 2 stages, 2 data-parallel ranks, four microbatches."""

import argparse

import torch
import torch.distributed as dist
from models import blocks, vectors
from outcome import STEPS, tell
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

MICROBATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--interleaved", action="store_true", help="two stages per rank")
    per_rank = 2 if parser.parse_args().interleaved else 1
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model, pp, replica = blocks(depth=8), mesh["pp"], mesh["dp"].get_local_rank()
    count = 2 * per_rank
    size = len(model) // count
    stages, parts = [], []
    for index in range(pp.get_local_rank(), count, 2):
        part = nn.Sequential(*model[index * size : (index + 1) * size])
        for block in part:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        parts.append(fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False))
        stages.append(PipelineStage(part, index, count, torch.device("cpu"), group=pp.get_group()))
    if per_rank == 1:
        schedule = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    else:
        schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
    losses = []
    for step in range(STEPS):
        x, of_step = vectors(step, replica), []
        schedule.step(*([x] if pp.get_local_rank() == 0 else []), target=x, losses=of_step)
        losses += [loss.item() for loss in of_step]
        optimizer.step()
        optimizer.zero_grad()
    sums = [p.full_tensor().double().sum().item() for part in parts for p in part.parameters()]
    tell(parts, losses, sums=sums)


if __name__ == "__main__":
    main()
