"""The models that benchmarks train. The description of each names the part of a library that it loads most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["CASES", "LARGE_BLOCKS", "SMALL_BLOCKS", "Case", "Decoder", "FusedBlock", "Llama"]


class Block(nn.Module):
    """A transformer block of 12 parameters."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A GPT of about 26 million parameters."""

    def __init__(self, vocabulary: int = 8192, dim: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, 8) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Chain(nn.Module):
    """Residual modules in sequence."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Experts(nn.Module):
    """97 small linear layers with 194 parameters in one group, all of them used."""

    def __init__(self, dim: int, experts: int = 97) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(len(self.experts))
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


class FusedBlock(nn.Module):
    """A Llama block with few, large parameters: fused projections, without attention, which has no parameters."""

    def __init__(self, dim: int, hidden: int, kv: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, dim + 2 * kv, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.qkv(self.norm(x))[..., : x.shape[-1]])
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class LlamaBlock(nn.Module):
    """The 9 parameters of a Llama block."""

    def __init__(self, dim: int, hidden: int, kv: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = nn.Linear(dim, kv, bias=False), nn.Linear(dim, kv, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)


class Llama(nn.Module):
    """The parameters of Llama 3, 9 per block and 3 more. The model is never run."""

    def __init__(self, vocabulary: int, dim: int, hidden: int, kv: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, hidden, kv) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)


class DecoderBlock(LlamaBlock):
    """A block of ``heads`` heads of a Llama, which runs. Rotary embeddings, which have no parameters, are left out."""

    def __init__(self, dim: int, hidden: int, kv: int, heads: int) -> None:
        super().__init__(dim, hidden, kv)
        self.head_dim = dim // heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (each(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """The parameters of Llama 3, in a model that runs and returns its loss."""

    def __init__(self, vocabulary: int, dim: int, hidden: int, kv: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(DecoderBlock(dim, hidden, kv, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    @staticmethod
    def llama_70b() -> Decoder:
        """Return the shape of Llama 3 70B."""
        return Decoder(128256, 8192, 28672, 1024, 64, 80)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Case:
    """A model with its input. ``blocks`` are the modules that are sharded before the model."""

    what: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], torch.Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]] = lambda model: list(model.blocks)


def _tokens(batch: int, length: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randint(0, 8192, (batch, length), generator=generator)


def _features(rows: int, dim: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randn(rows, dim, generator=generator)


CASES = {
    "gpt-256": Case("GPT of 26 M parameters, 256 tokens per step", Gpt, _tokens(2, 128)),
    "gpt-32": Case("the same, 32 tokens: bound by communication", Gpt, _tokens(1, 32)),
    "tiny-200": Case(
        "200 modules of 4,160 parameters", lambda: Chain([nn.Linear(64, 64) for _ in range(200)]), _features(8, 64)
    ),
    "experts": Case("4 groups of 194 parameters", lambda: Chain([Experts(64) for _ in range(4)]), _features(97, 64)),
    "embedding": Case(
        "one embedding of 33 M parameters in its group",
        lambda: Gpt(vocabulary=65536, layers=1),
        _tokens(1, 32),
        lambda model: [model.embedding, *model.blocks],
    ),
}

LARGE_BLOCKS = Case(
    "8 Llama blocks of 218 M parameters, 8192 tokens per step",
    lambda: Chain([FusedBlock(4096, 14336, 1024) for _ in range(8)]),
    _features(8192, 4096),
)

SMALL_BLOCKS = Case(
    "8 blocks of dim 256, 6.3 M parameters: most dims are shorter than thousands of ranks are many",
    lambda: Chain([Block(256, 8) for _ in range(8)]),
    lambda generator: torch.randn(2, 16, 256, generator=generator),
)
