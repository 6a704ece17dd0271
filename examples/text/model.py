"""A decoder-only transformer over bytes: RMSNorm, rotary embeddings, SwiGLU. It does not depend on sharding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256  # one token per byte
INITIAL_STD = 0.02
NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model. ``dim`` is a multiple of ``2 * heads``, since rotary embeddings rotate pairs."""

    layers: int = 6
    dim: int = 384
    heads: int = 6
    hidden: int = 1024
    tied: bool = True


class Rotary(nn.Module):
    """Rotates pairs of features by an angle that grows with the position (Su et al. 2021, RoFormer, section 3.2)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, seq: int, base: float = 10_000.0) -> None:
        super().__init__()
        frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(seq, dtype=torch.float32), frequency)
        # Buffers stay in float32 under mixed precision: positions far apart would coincide in bfloat16.
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate ``x``: (batch, heads, seq, head_dim), any float dtype, which the result has too."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention over (batch, seq, dim)."""

    def __init__(self, shape: ModelShape, seq: int) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.rotary = Rotary(shape.dim // shape.heads, seq)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        query, key, value = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.rotary(query), self.rotary(key), value, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return projected


class SwiGLU(nn.Module):
    """Gated feed-forward part (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, shape: ModelShape, seq: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=NORM_EPSILON)
        self.attention = Attention(shape, seq)
        self.feed_forward_norm = nn.RMSNorm(shape.dim, eps=NORM_EPSILON)
        self.feed_forward = SwiGLU(shape)

    def forward(self, x: Tensor) -> Tensor:
        after_attention: Tensor = x + self.attention(self.attention_norm(x))
        after_feed_forward: Tensor = after_attention + self.feed_forward(self.feed_forward_norm(after_attention))
        return after_feed_forward


class Transformer(nn.Module):
    """Maps bytes (batch, seq), int64, to logits (batch, seq, 256).

    Args:
        shape: the sizes.
        seq: the longest sequence.
        activation_checkpointing: keep only each block's input for backward, and run the block again there.
    """

    def __init__(self, shape: ModelShape, seq: int, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(VOCABULARY, shape.dim)
        self.blocks = nn.ModuleList(Block(shape, seq) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=NORM_EPSILON)
        self.head = nn.Linear(shape.dim, VOCABULARY, bias=False)
        self._initialize(shape)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def _initialize(self, shape: ModelShape) -> None:
        """Draw normal weights. The scale of projections into the residual stream shrinks with depth (GPT-2, 2.3)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                writes = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
                nn.init.normal_(parameter, std=INITIAL_STD * ((2 * shape.layers) ** -0.5 if writes else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats per byte, computed in float32 for any precision of ``logits``."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
