"""Check torch's profiler for labels with the names of groups, which tools read."""

import re

import torch
import torch.distributed as dist
from models import blocks, vectors
from outcome import STEPS, tell
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile


def main() -> None:
    dist.init_process_group("gloo")
    model = blocks()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for step in range(STEPS):
            x = vectors(step, dist.get_rank())
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    labels = {event.key for event in profiled.key_averages() if event.key.startswith("FSDP::")}
    groups = sorted({found[1] for label in labels if (found := re.fullmatch(r"FSDP::\w+ \((\d+)\)", label))})
    tell([model], losses, shown={"FSDP labels": len(labels)}, named=groups)


if __name__ == "__main__":
    main()
