"""Train with accelerate and ``fsdp_version=2``: accumulation, clipping, mixed precision, or loading from rank 0."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from models import llama, tokens
from outcome import STEPS, tell

from composable_fsdp.interop import allow_fsdp_on_cpu

MICROBATCHES = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ram-efficient", action="store_true", help="values on rank 0 only")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--tied", action="store_true")
    options = parser.parse_args()
    allow_fsdp_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=options.ram_efficient,
        activation_checkpointing=options.bf16,
    )
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        mixed_precision="bf16" if options.bf16 else "no",
        gradient_accumulation_steps=MICROBATCHES,
    )
    model = llama(tied=options.tied)
    if options.ram_efficient and accelerator.process_index:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses, norms = [], []
    for step in range(STEPS * MICROBATCHES):
        batch = tokens(step, accelerator.process_index)
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    whole = accelerator.get_state_dict(model)
    tell(
        [model],
        losses,
        norms=norms,
        saved=sorted(whole)[:3] if whole else None,
        plugin=os.environ.get("ACCELERATE_USE_FSDP"),
    )


if __name__ == "__main__":
    main()
