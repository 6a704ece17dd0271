"""LoRA adapters of peft on a Llama, whose frozen matrices are in 4 bits with --nf4 (QLoRA).

torchrun --standalone --nproc-per-node 2 examples/qlora.py [--nf4]
"""

import argparse

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch import nn
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
from transformers import LlamaConfig, LlamaForCausalLM

from composable_fsdp import fully_shard, shutdown

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--nf4", action="store_true")
    quantize = options.parse_args().nf4
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)), LORA)
    layers = model.base_model.model.model.layers
    if quantize:  # after the adapters were added, before the model is sharded
        for module in layers.modules():
            if isinstance(module, nn.Linear) and not module.weight.requires_grad:
                module.weight = nn.Parameter(to_nf4(module.weight.detach()), requires_grad=False)
    for layer in layers:
        fully_shard(layer)  # adapters in fp32 beside a frozen base: one group
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(10):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            print(f"rank {dist.get_rank()} step {step} loss {loss.item():.4f}")
    adapters = {name: value.full_tensor() for name, value in get_peft_model_state_dict(model).items()}  # on all ranks
    if dist.get_rank() == 0:
        print(f"{len(adapters)} adapters, {sum(value.numel() for value in adapters.values()):,} values")
    shutdown()


if __name__ == "__main__":
    main()
