"""Continue from a ``torch.distributed.checkpoint`` after rank 1 was killed and torchrun has restarted the job."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import blocks, vectors
from outcome import STEPS, tell
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

KILLED_IN = 4


def main() -> None:
    dist.init_process_group("gloo")
    rank, attempt, folder = (
        dist.get_rank(),
        int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        Path(os.environ["CLIENT_OUT"]),
    )
    model = blocks()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved, losses = sorted(folder.glob("step-*/.metadata")), []
    if saved:
        parameters, state = get_state_dict(model, optimizer)
        done = int(saved[-1].parent.name.removeprefix("step-"))
        kept = {"model": parameters, "optimizer": state, "losses": torch.zeros(dist.get_world_size(), done)}
        dcp.load(kept, checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
        losses = kept["losses"][rank].tolist()
    for step in range(len(losses), STEPS):
        if attempt == 0 and rank == 1 and step == KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        x = vectors(step, rank)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        gathered = [torch.empty(len(losses)) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.tensor(losses))
        parameters, state = get_state_dict(model, optimizer)
        everything = {"model": parameters, "optimizer": state, "losses": torch.stack(gathered)}
        dcp.save(everything, checkpoint_id=folder / f"step-{len(losses):02}")
    tell([model], losses, attempts=attempt + 1)


if __name__ == "__main__":
    main()
