"""Train fully sharded low-rank adapters in fp32 on frozen matrices in bf16 (LoRA: Hu et al. 2021).

    torchrun --standalone --nproc-per-node 2 examples/lora.py --keep-base

The frozen matrices of each block are a separate group. It has no gradients to reduce. With ``--keep-base`` it is
gathered once and kept, so that later steps communicate only adapters. The task has a known solution: the targets are
the outputs of the same base plus matrices of the adapters' rank. Only the adapters are saved. After loading them into a
new base in one process, the outputs must be equal. The exit code is 0 if they are, 1 if not, and 2 if it could not
start.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from text.launch import choose_device, from_rank_0, launch
from text.options import new_parser
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp import fully_shard
from composable_fsdp.trace import Operation, Recorder

BLOCKS, WIDTH = 4, 256


class Adapted(nn.Module):
    """``x + tanh(base(x) + up(down(x)))``, where ``base`` is frozen and ``up`` begins with zeros."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.base(x.bfloat16()) + self.up(self.down(x))
        return x + change.tanh()


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("lora.py", "Train fp32 adapters beside a frozen bf16 base, and save them alone.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=64, help="vectors per rank and step")
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    parser.add_argument("--keep-base", action="store_true", help="gather the frozen matrices once, and keep them")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto is the accelerator, or cpu without one")
    parser.add_argument("--out", type=Path, default=Path("runs/lora/adapters.safetensors"), help="file to write")
    return parser


def make_model(rank: int) -> nn.Sequential:
    """Build the model with the same values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(rank) for _ in range(BLOCKS)))


def make_teacher(rank: int) -> nn.Sequential:
    """Return a model that the adapters can learn: the same base with changed weights."""
    teacher = make_model(rank)
    with torch.no_grad():
        for block in teacher:
            block.up.weight.normal_(std=rank**-0.5)
    return teacher.requires_grad_(False)


def shard(model: nn.Sequential, mesh: DeviceMesh, *, keep_base: bool) -> None:
    """Make two groups per block, one frozen and one trained. Bases that are kept are not gathered again."""
    for block in model:
        base = fully_shard(block.base, mesh=mesh, reshard_after_forward=not keep_base)
        base.set_reshard_after_backward(not keep_base)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(model: nn.Module, teacher: nn.Module, options: argparse.Namespace, device: torch.device) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(dist.get_rank())  # different data on each rank
    for step in range(options.steps):
        x = torch.randn(options.batch, WIDTH, generator=generator).to(device)
        with Recorder() as recorder:
            loss = (model(x) - teacher(x)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == options.steps - 1:
            gathers = sum(event.operation is Operation.UNSHARD for event in recorder)
            say(f"step {step:3}: loss {loss.item():.5f} on rank 0, {gathers} gathers")


def save_adapters(model: nn.Module, path: Path) -> None:
    """Write the full adapters into one file. The base is not gathered."""
    adapters = {name: p.full_tensor().cpu() for name, p in model.named_parameters() if p.requires_grad}

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(adapters, path)

    from_rank_0(write)
    say(f"saved {len(adapters)} adapters to {path}: {path.stat().st_size:,} bytes")


@torch.no_grad()
def check(model: nn.Module, options: argparse.Namespace, device: torch.device) -> bool:
    """Return whether a base in one process with the saved adapters computes the same as ``model``."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    plain = make_model(options.rank)
    unexpected = plain.load_state_dict(load_file(options.out), strict=False).unexpected_keys
    difference = (model(x) - plain.to(device)(x)).abs().max().item()
    say(f"largest difference after loading the adapters into an unsharded base: {difference:.1e}")
    return not unexpected and difference < 1e-5


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def run() -> int:
    options = make_parser().parse_args()
    device = choose_device(options.device)
    model, teacher = make_model(options.rank), make_teacher(options.rank).to(device)
    shard(model, init_device_mesh(device.type, (dist.get_world_size(),)), keep_base=options.keep_base)
    train(model, teacher, options, device)
    save_adapters(model, options.out)
    return 0 if check(model, options, device) else 1


if __name__ == "__main__":
    sys.exit(launch(run, make_parser))
