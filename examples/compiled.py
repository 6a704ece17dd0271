"""torch.compile of each block, or of the whole model, with the losses of the eager model.

torchrun --standalone --nproc-per-node 2 examples/compiled.py [--whole] [--backend aot_eager]
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fully_shard, shutdown


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(3)))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(5):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--whole", action="store_true")
    options.add_argument("--backend", default="inductor")
    arguments = options.parse_args()
    eager, model = train(build()), build()
    if arguments.whole:
        compiled = torch.compile(model, backend=arguments.backend)  # hooks of the blocks are graph breaks
    else:
        compiled = model
        for block in model:
            block.compile(fullgraph=True, backend=arguments.backend)  # after fully_shard or before
    losses = train(compiled)
    difference = max(abs(a - b) for a, b in zip(eager, losses, strict=True))
    print(f"rank {dist.get_rank()}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {difference:.0e} from the eager model")
    shutdown()


if __name__ == "__main__":
    main()
