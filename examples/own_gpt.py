"""Train a small GPT on the sources of Python's standard library, from start to end, in one file.

    torchrun --standalone --nproc-per-node 2 examples/own_gpt.py --steps 60
    torchrun --standalone --nproc-per-node 2 examples/own_gpt.py --steps 90   # continues after step 60

It shards by a policy, accumulates gradients, clips, evaluates, generates, saves, and continues from the newest
checkpoint, on any number of ranks. The page "Train a GPT from start to end" explains it part by part.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional

from composable_fsdp import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, initialize, no_sync, shutdown
from composable_fsdp.checkpoint import latest, load, save
from composable_fsdp.diagnostics import Meter
from composable_fsdp.wrap import by_class

SEQUENCE, BATCH, MICROBATCHES = 64, 4, 2


# [model]
class Block(nn.Module):
    """One transformer layer: causal attention, then a feed-forward part."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-3, -2).flatten(-2))
        return x + self.feed(self.feed_norm(x))


class GPT(nn.Module):
    """A byte-level GPT."""

    def __init__(self, dim: int = 64, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, dim)
        self.places = nn.Embedding(SEQUENCE, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places(torch.arange(tokens.shape[-1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


# [data]
def read_text() -> Tensor:
    """Return some sources of the standard library as bytes."""
    sources = sorted(Path(os.__file__).parent.glob("[a-d]*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()


def batch_of(text: Tensor, key: int) -> Tensor:
    """Draw a batch. It depends on ``key`` alone, so that a run that continues sees the batches that it would have."""
    starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH,), generator=torch.Generator().manual_seed(key))
    return torch.stack([text[start : start + SEQUENCE + 1] for start in starts.tolist()])


# [evaluate]
@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, device: str, batches: int = 4) -> float:
    """Return the mean loss over all ranks. Every rank runs as many batches, since every forward gathers parameters."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model.eval()
    losses = [loss_of(model, batch_of(text, -1 - rank - ranks * index).to(device)) for index in range(batches)]
    model.train()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / ranks


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, length: int, device: str) -> bytes:
    """Continue ``prompt``. Every rank makes the same bytes, as all have the same prompt and parameters."""
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(length):
        following = model(tokens[:, -SEQUENCE:])[:, -1].argmax(dim=-1, keepdim=True)
        tokens = torch.cat([tokens, following], dim=1)
    return bytes(tokens[0].tolist())


# [main]
@record  # torchrun then prints the traceback of the rank that failed first
def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("runs/own_gpt"))
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--save-every", type=int, default=20)
    arguments = options.parse_args()

    # [shard]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):  # no memory for the full model, on any rank
        model = GPT()
    fully_shard(
        model, policy=by_class(Block), mesh=mesh, mp_policy=bf16 if device == "cuda" else MixedPrecisionPolicy()
    )
    initialize(model, seed=0)  # the values of the unsharded model with this seed
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    # [resume]
    begin = 0
    if latest(arguments.out):
        extra = load(arguments.out, model, optimizer, fallback=True)
        schedule.load_state_dict(extra["schedule"])
        begin = extra["step"]

    # [train]
    text, rank, ranks = read_text(), dist.get_rank(), dist.get_world_size()

    meter = Meter(model, tokens=ranks * MICROBATCHES * BATCH * SEQUENCE, every=10)
    meter.start(begin)
    for step in range(begin + 1, arguments.steps + 1):
        keys = [(step * MICROBATCHES + index) * ranks + rank for index in range(MICROBATCHES)]
        batches = [batch_of(text, key).to(device) for key in keys]
        with no_sync(model, sharded=True):
            for batch in batches[:-1]:
                (loss_of(model, batch) / MICROBATCHES).backward()
        loss = loss_of(model, batches[-1])
        (loss / MICROBATCHES).backward()  # outside of no_sync: sets the sum as gradients
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        reading = meter(step, loss=loss)
        if reading and rank == 0:
            print(f"training {step}/{arguments.steps}  {reading}")
        if step % arguments.save_every == 0 or step == arguments.steps:
            with meter.paused():
                extra = {"step": step, "schedule": schedule.state_dict()}
                save(arguments.out, model, optimizer, extra, keep_last=2)

    # [end]
    loss_now, sample = evaluate(model, text, device), generate(model, b"def ", 40, device)
    if rank == 0:
        print(f"steps {begin + 1} to {arguments.steps}; evaluation: {loss_now:.3f} nats per byte")
        print(f"generated: {sample.decode(errors='replace')!r}")
    shutdown()  # waits for all ranks, and raises within seconds if one cannot come


if __name__ == "__main__":
    main()
