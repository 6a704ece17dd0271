"""Run torch's ``FSDPMemTracker`` around the first step. Later steps run without it."""

import torch
import torch.distributed as dist
from models import blocks, vectors
from outcome import STEPS, tell
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import fully_shard


def train(model, optimizer, step):
    x = vectors(step, dist.get_rank())
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    model = blocks()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((vectors(0, dist.get_rank()),))
    with tracker:
        losses = [train(model, optimizer, 0)]
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    sizes = {getattr(kind, "value", kind): size for kind, size in peak.items()}
    losses += [train(model, optimizer, step) for step in range(1, STEPS)]
    tell(
        [model],
        losses,
        shown={"bytes at the peak": sizes["Total"]},
        sharded_parameters=sizes["Sharded Param"],
        modules=sorted(stats.mod_fqn for stats in tracker.memory_tracking.values()),
    )


if __name__ == "__main__":
    main()
