"""A profile of two steps by torch's profiler, and on a GPU a snapshot of its memory.

torchrun --standalone --nproc-per-node 2 examples/profiled.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from composable_fsdp import fully_shard, shutdown

OUT = Path("runs/profile")


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, batch_first=True) for _ in range(4)))
    model = fully_shard(model, policy={nn.TransformerEncoderLayer})
    optimizer = torch.optim.AdamW(model.parameters())
    rank, device = dist.get_rank(), next(model.parameters()).device
    OUT.mkdir(parents=True, exist_ok=True)
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, schedule=schedule(wait=1, warmup=1, active=2)) as profiler:
        for _ in range(4):
            model(torch.randn(8, 16, 64, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(OUT / f"rank-{rank}.json"))  # for https://ui.perfetto.dev
    if device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(OUT / f"memory-{rank}.pickle"))  # for https://pytorch.org/memory_viz
    if rank == 0:
        for event in sorted(profiler.key_averages(), key=lambda event: -event.cpu_time_total):
            if event.key.startswith("FSDP::all_gather ") or event.key.startswith("FSDP::reduce_scatter "):
                print(f"{event.key:40} {event.count:3} times, {event.cpu_time_total / event.count:8.0f} us each")
    shutdown()


if __name__ == "__main__":
    main()
