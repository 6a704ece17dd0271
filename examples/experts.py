"""A mixture of experts on the two meshes of transformers: dense layers on (fsdp, tp), experts on (efsdp, ep).

torchrun --standalone --nproc-per-node 4 examples/experts.py --tp 2 --ep 2
torchrun --standalone --nproc-per-node 2 examples/experts.py --ep 2 --resume --steps 12    # on other meshes
"""

import argparse
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable_fsdp import ShardPlacementResult, clip_grad_norm_, fully_shard, shutdown, stream_full_params
from composable_fsdp.checkpoint import load, save

WIDTH, HIDDEN, EXPERTS, TOP, BATCHES, TOKENS = 16, 24, 8, 2, 4, 32


class Meshes(NamedTuple):
    """All ranks in two views. ``fsdp`` and ``efsdp`` shard weights at rest, ``tp`` and ``ep`` also in forward."""

    fsdp: DeviceMesh
    tp: DeviceMesh
    efsdp: DeviceMesh
    ep: DeviceMesh


def make_meshes(ranks: int, tp: int, ep: int) -> Meshes:
    dense = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("fsdp", "tp"))
    experts = init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("efsdp", "ep"))
    return Meshes(dense["fsdp"], dense["tp"], experts["efsdp"], experts["ep"])


class Experts(nn.Module):
    """Each row goes through two layers of the expert ``expert[row]``, of those that this rank holds in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        ups, downs = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        out = torch.zeros_like(rows)
        for number, (up, down) in enumerate(zip(ups, downs, strict=True)):
            mine = (expert == number).nonzero().squeeze(1)
            out = out.index_add(0, mine, (rows[mine] @ up).relu() @ down)
        return out


class Mixture(nn.Module):
    """Sends each token to its ``TOP`` best experts, and sums their outputs by weight."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.meshes: Meshes | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOP)  # both of shape (tokens, TOP)
        if self.meshes is None:
            found = self.experts(x.repeat_interleave(TOP, 0), chosen.flatten())
            return (found.unflatten(0, chosen.shape) * weights[..., None]).sum(1)
        # Ranks of one tp group have the same tokens: each sends its part of them, so that no expert gets a token twice.
        tp = self.meshes.tp
        x, weights, chosen = (
            DTensor.from_local(each, tp, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
            for each in (x, weights, chosen)
        )
        out = (self.exchanged(x, chosen) * weights[..., None]).sum(1)
        return DTensor.from_local(out, tp, [Shard(0)]).full_tensor()

    def exchanged(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the experts, of shape (tokens, TOP, WIDTH): two all-to-alls over ``ep``."""
        ep = self.meshes.ep
        group = ep.get_group()
        order = chosen.flatten().argsort(stable=True)  # pairs of token and slot by expert, so by the rank that holds it
        sent = chosen.flatten().bincount(minlength=EXPERTS).view(ep.size(), -1)  # tokens by rank and its expert
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        to, of = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = all_to_all_single_autograd(x[order // TOP], of, to, group)
        expert = torch.arange(sent.shape[1]).repeat(ep.size()).repeat_interleave(received.flatten())
        found = all_to_all_single_autograd(self.experts(rows, expert), to, of, group)
        return found[order.argsort()].unflatten(0, chosen.shape)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.mixture = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), Mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(x).relu())
        return x + self.mixture(x)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))


def shard(model: nn.Sequential, meshes: Meshes) -> nn.Sequential:
    """Parallelize dense layers over ``tp`` and experts over ``ep``, then shard each over the rest of its mesh."""
    # An expert gets the tokens of all batches: the sum over ``efsdp`` is divided by their number, not by that of efsdp.
    apart = ShardPlacementResult(Shard(1), meshes.efsdp, divide=meshes.fsdp.size())
    for block in model[:-1]:
        parallelize_module(block, meshes.tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        block.mixture.meshes, experts = meshes, block.mixture.experts
        for name, p in list(experts.named_parameters()):
            experts.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), meshes.ep, [Shard(0)])))
        own = set(experts.parameters())
        fully_shard(block, mesh=meshes.fsdp, shard_placement_fn=lambda p, own=own: apart if p in own else None)
    return fully_shard(model, mesh=meshes.fsdp)


def batch(step: int, number: int) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(BATCHES * step + number))


def mean_loss(model: nn.Module, step: int, numbers: range) -> torch.Tensor:
    x = torch.cat([batch(step, number) for number in numbers])
    return nn.functional.mse_loss(model(x), x.cumsum(1) / 4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, numbers: range) -> float:
    for step in steps:
        loss = mean_loss(model, step, numbers)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)  # over parameters of both meshes
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)  # its steps are as large as gradients


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each dense layer, and a batch")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", default="runs/experts", help="the folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    options = parser.parse_args()
    meshes = make_meshes(int(os.environ["WORLD_SIZE"]), options.tp, options.ep)
    model = shard(build(), meshes)
    optimizer = make_optimizer(model)
    begin = load(options.out, model, optimizer)["step"] if options.resume else 0
    each = BATCHES // meshes.fsdp.size()  # batches of this rank
    first = meshes.fsdp.get_local_rank() * each
    loss = train(model, optimizer, range(begin, options.steps), range(first, first + each))
    save(options.out, model, optimizer, {"step": options.steps})

    plain = build()
    train(plain, make_optimizer(plain), range(options.steps), range(BATCHES))
    full = {name: value.clone() for bucket in stream_full_params(model) for name, value in bucket.items()}
    difference = max((full[name] - p).abs().max().item() for name, p in plain.named_parameters())
    print(
        f"rank {dist.get_rank()} steps {begin + 1} to {options.steps}, loss {loss:.4f}; "
        f"parameters {difference:.0e} from those of one process"
    )
    shutdown()


if __name__ == "__main__":
    main()
