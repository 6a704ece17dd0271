"""Context parallelism: each sequence is cut over the ranks of an axis, over which keys and values are gathered.

torchrun --standalone --nproc-per-node 2 examples/context_parallel.py
"""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from composable_fsdp import fully_shard, shutdown

WIDTH, HEADS, TOKENS, BATCH = 32, 4, 16, 2


class Block(nn.Module):
    """Causal attention of the tokens of this rank to those of all ranks of ``mesh``, or to its own without a mesh."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.qkv, self.out, self.mesh = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (part.unflatten(-1, (HEADS, -1)) for part in self.qkv(x).chunk(3, dim=-1))
        begin = 0
        if self.mesh is not None:
            both = torch.stack([keys, values])  # of shape (2, batch, tokens of this rank, heads, width of a head)
            gathered = DTensor.from_local(both, self.mesh, [Shard(2)])
            keys, values = gathered.full_tensor(grad_placements=[Partial()]).unbind()  # their gradients are summed
            begin = self.mesh.get_local_rank() * x.shape[1]
        positions = torch.arange(begin, begin + x.shape[1])
        mask = torch.arange(keys.shape[1])[None] <= positions[:, None]
        queries, keys, values = (each.transpose(1, 2) for each in (queries, keys, values))
        found = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return x + self.out(found.transpose(1, 2).flatten(2))


def build(mesh: DeviceMesh | None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(mesh), Block(mesh))


def main() -> None:
    ranks, cp = int(os.environ["WORLD_SIZE"]), 2
    mesh = init_device_mesh("cpu", (ranks // cp, cp), mesh_dim_names=("dp", "cp"))
    model = build(mesh["cp"])
    shards = mesh["dp", "cp"]._flatten(
        "dp_cp"
    )  # parameters are sharded over all ranks: gradients are the mean over them
    for block in model:
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)
    data = torch.Generator().manual_seed(mesh["dp"].get_local_rank())  # the same on the ranks that share a sequence
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=data)
    part = x.chunk(cp, dim=1)[mesh["cp"].get_local_rank()]
    loss = model(part).square().mean()  # a mean over this rank's tokens, of which all ranks have equally many
    loss.backward()
    plain = build(None)
    batches = [torch.randn(x.shape, generator=torch.Generator().manual_seed(each)) for each in range(ranks // cp)]
    torch.stack([plain(each).square().mean() for each in batches]).mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    difference = max((p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs)
    print(f"rank {mesh.get_rank()} loss {loss.item():.4f}; gradients {difference:.0e} from those of whole sequences")
    shutdown()


if __name__ == "__main__":
    main()
