"""Load with ``from_pretrained(distributed_config=...)``. Transformers shards the model during loading."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from models import llama, tokens
from outcome import STEPS, tell
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tied", action="store_true", help="head and embedding are one parameter")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(os.environ["CLIENT_OUT"]) / "llama"
    if rank == 0:
        llama(tied=options.tied).save_pretrained(folder)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(fsdp_size=dist.get_world_size())
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        batch = tokens(step, rank)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    generated = model.generate(tokens(0, 0)[:1, :4], max_new_tokens=6, do_sample=False)
    model.save_pretrained(folder.with_name("trained"))
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(folder.with_name("trained")).eval()
    with torch.no_grad():
        batch = tokens(99, 0)
        difference = (model(batch).logits - again(batch).logits).abs().max().item()
    tell([model], losses, generated=generated.tolist(), difference_after_saving=difference)


if __name__ == "__main__":
    main()
