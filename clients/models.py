"""Small models with random values, the same on every rank, and data for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, SEQ = 64, 16


def blocks(width: int = 64, depth: int = 3) -> nn.Sequential:
    """Blocks of two matrices without residual connections."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth))
    )


def vectors(step: int, rank: int, batch: int = 32, width: int = 64) -> Tensor:
    """Return ``(batch, width)`` inputs, different in every step and on every rank."""
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(100 * step + rank))


def llama(*, tied: bool = False) -> Any:
    """A Llama of transformers with two layers and four heads of 16. Keys and values are shared by two heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ,
        tie_word_embeddings=tied,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def tokens(step: int, rank: int, batch: int = 4) -> Tensor:
    """Return ``(batch, SEQ)`` int64 tokens that count up from different numbers in every step and on every rank."""
    starts = torch.randint(VOCABULARY, (batch, 1), generator=torch.Generator().manual_seed(100 * step + rank))
    return 3 + (starts + torch.arange(SEQ)) % (VOCABULARY - 3)
