"""Train a fully sharded Llama of transformers, and load the result with transformers.

    torchrun --standalone --nproc-per-node 2 examples/hf_llama.py --out runs/hf-llama

The model is small and has random values, so nothing is downloaded. It learns the bytes of this file. Then it is written
as safetensors, transformers loads it without this library, and the logits of both models are compared. The exit code is
0 if they agree, 1 if they do not, and 2 if it could not start.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from text.launch import choose_device, from_rank_0, launch
from text.options import new_parser
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from composable_fsdp import clip_grad_norm_, fully_shard
from composable_fsdp.checkpoint import Full, state_dict
from composable_fsdp.wrap import transformer_blocks

SEQ = 64
CORPUS = Path(__file__).read_bytes()


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("hf_llama.py", "Train a Llama of transformers and save it for transformers.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto is the accelerator, or cpu without one")
    parser.add_argument("--out", type=Path, default=Path("runs/hf-llama"), help="folder to save to")
    return parser


def make_model(layers: int) -> LlamaForCausalLM:
    """Build the model with the same values on every rank. The vocabulary is bytes; embedding and head are tied."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def draw(batch: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw windows of the corpus: ``(batch, SEQ)``, int64."""
    starts = torch.randint(len(CORPUS) - SEQ, (batch,), generator=generator).tolist()
    return torch.tensor([list(CORPUS[start : start + SEQ]) for start in starts], device=device)


def train(model: LlamaForCausalLM, options: argparse.Namespace, device: torch.device) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())  # different data on each rank
    for step in range(options.steps):
        tokens = draw(options.batch, generator, device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == options.steps - 1:
            say(f"step {step:3}: loss {loss.item():.3f} on rank 0")


@torch.no_grad()
def check(model: LlamaForCausalLM, out: Path, device: torch.device) -> bool:
    """Return whether the model saved in ``out`` computes the same as ``model``."""
    tokens = draw(2, torch.Generator().manual_seed(0), device)
    logits = model(input_ids=tokens).logits
    plain = from_rank_0(lambda: LlamaForCausalLM.from_pretrained(out).to(device)(input_ids=tokens).logits)
    difference = (logits - plain.to(device)).abs().max().item()
    say(f"largest difference of logits after loading into transformers: {difference:.1e}")
    return difference < 1e-5


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def run() -> int:
    options = make_parser().parse_args()
    device = choose_device(options.device)
    disable_progress_bar()
    model = make_model(options.layers)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, policy=transformer_blocks())  # one group per decoder layer, one for the rest
    train(model, options, device)
    whole = state_dict(model, Full(rank0_only=True, offload_to_cpu=True))
    from_rank_0(lambda: model.save_pretrained(options.out, state_dict=whole))
    say(f"saved to {options.out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}")
    return 0 if check(model, options.out, device) else 1


if __name__ == "__main__":
    sys.exit(launch(run, make_parser))
