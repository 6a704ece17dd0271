"""Load a mixture of experts with ``from_pretrained(distributed_config=...)``: experts have an ``(efsdp, ep)`` mesh.

transformers divides gradients of experts by the number of batches itself, and sums over ``efsdp``.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from models import SEQ, VOCABULARY, tokens
from outcome import STEPS, tell
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=SEQ,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return MixtralForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=2)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks, folder = dist.get_rank(), dist.get_world_size(), Path(os.environ["CLIENT_OUT"]) / "mixtral"
    if rank == 0:
        mixtral().save_pretrained(folder)
    dist.barrier()
    sizes = DistributedConfig(fsdp_size=ranks // options.tp, tp_size=options.tp, ep_size=options.ep)
    model = MixtralForCausalLM.from_pretrained(folder, distributed_config=sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # its steps are as large as gradients
    losses = []
    for step in range(STEPS):
        batch = tokens(step, rank // options.tp)  # the same on the ranks of one tp group
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        batch = tokens(99, 0)
        logits = model(input_ids=batch).logits.double().abs().mean().item()
    tell([model], losses, logits=logits)


if __name__ == "__main__":
    main()
