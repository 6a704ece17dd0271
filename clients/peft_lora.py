"""Train LoRA adapters of peft on a Llama, added before sharding or, as an option, after it."""

import argparse

import torch
import torch.distributed as dist
from models import llama, tokens
from outcome import STEPS, tell
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch.distributed.fsdp import fully_shard

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)


def shard(model, layers):
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--after", action="store_true", help="add adapters to a model that is sharded already")
    after = parser.parse_args().after
    dist.init_process_group("gloo")
    rank, base = dist.get_rank(), llama()
    if after:
        shard(base, base.model.layers)
    torch.manual_seed(1)
    model = get_peft_model(base, LORA)
    if not after:
        shard(model, base.model.layers)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        batch = tokens(step, rank)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    shapes = {name: list(value.shape) for name, value in get_peft_model_state_dict(model).items()}
    tell([model], losses, adapters=shapes)


if __name__ == "__main__":
    main()
