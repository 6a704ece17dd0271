"""Small models, their batches and their losses. Importable by worker processes, so everything is at module level. A
:class:`Task` contains all that a training run needs. Batches depend only on step and rank, so any process can make the
batches of all ranks and run the unsharded reference on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, ...]


class UnevenMLP(nn.Module):
    """Three layers with sizes that are not divisible by 2 or 4. The last one has fewer than 4 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 9), nn.Linear(9, 3)])
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


class Chain(nn.Module):
    """A chain of equal linear layers. The root's own group is empty."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Routed(nn.Module):
    """Runs its layers in the order of ``route``, then ``side`` on the inputs, which need no gradient."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.side = nn.Linear(width, width)
        self.route = list(range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for index in self.route:
            out = torch.tanh(self.layers[index](out))
        return out + torch.tanh(self.side(x))


class Wide(nn.Module):
    """Has zero-copy weights of more than 3 MiB, one even and one uneven, and small packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 768), nn.Linear(768, 1027)])
        self.head = nn.Linear(1027, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Block(nn.Module):
    """A pre-norm transformer block. Keys have no bias: its true gradient is zero, and Adam would amplify rounding."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width + 1), nn.GELU(), nn.Linear(2 * width + 1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(-4, -2).unbind(-3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A decoder with ``depth`` blocks. The head may share the embedding's weight."""

    def __init__(self, *, tied: bool, vocabulary: int = 23, width: int = 12, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width, 3) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Adapters(nn.Module):
    """Has frozen bf16 base weights and fp32 adapters, so that one group has two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([AdaptedLinear(9, 9) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class AdaptedLinear(nn.Module):
    """Adds a trainable fp32 product of two low-rank matrices to a bf16 linear layer."""

    def __init__(self, inputs: int, outputs: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, dtype=torch.bfloat16)
        self.base.requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).to(x.dtype) + self.up(self.down(x))


@dataclass(frozen=True)
class Task:
    """A model with its data and loss. ``build``: a function that makes the model, with the same values in every call on
    every rank. ``batch``: a function from a seeded generator to the inputs and the target. ``criterion``: a function
    from output and target to the loss. ``eps``: AdamW's ``eps``. AdamW amplifies the rounding of gradients near zero by
    up to ``lr / eps``. With some 100,000 gradients, a smaller ``eps`` exceeds the tolerance of parameters on some
    processors."""

    build: Callable[[], Any]
    batch: Callable[[torch.Generator], Batch]
    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    eps: float = 1e-5

    def batch_of(self, step: int, rank: int) -> Batch:
        """Return the batch of ``rank`` at ``step``. Every rank and step has a different batch."""
        return self.batch(torch.Generator().manual_seed(1000 * step + rank + 1))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        output = model(*batch[:-1])
        return self.criterion(output, batch[-1].to(output.device))


def seeded(make: Callable[..., nn.Module], **arguments: Any) -> Callable[[], Any]:
    """Return a function that calls ``make(**arguments)`` with a fixed seed."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return make(**arguments)

    return build


def vectors(inputs: int, outputs: int, batch_size: int = 4) -> Callable[[torch.Generator], Batch]:
    return lambda generator: (
        torch.randn(batch_size, inputs, generator=generator),
        torch.randn(batch_size, outputs, generator=generator),
    )


def sequences(vocabulary: int, length: int = 6) -> Callable[[torch.Generator], Batch]:
    """Return batches of random tokens, with the next tokens as targets."""

    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(vocabulary, (2, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), target)


TASKS = {
    "mlp": Task(seeded(UnevenMLP), vectors(5, 3), squared_error),
    "chain": Task(seeded(Chain), vectors(8, 8), squared_error),
    "routed": Task(seeded(Routed), vectors(8, 8), squared_error),
    "wide": Task(seeded(Wide), vectors(1024, 6), squared_error, eps=1e-4),
    "transformer": Task(seeded(Transformer, tied=False), sequences(23), cross_entropy),
    "tied": Task(seeded(Transformer, tied=True), sequences(23), cross_entropy),
    "adapters": Task(seeded(Adapters), vectors(9, 9), squared_error),
}


def shard_layers(model: nn.Module, fully_shard: Callable[..., Any], *, fuses: object = True, **options: Any) -> Any:
    """Apply ``fully_shard`` to every module in ``model.layers``, then to the model. The groups are small enough to be
    fused. Fusing is disabled unless ``fuses`` is true."""
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if not fuses:
        model.set_schedule(max_fused_bytes=0)  # type: ignore[operator]
    return model
