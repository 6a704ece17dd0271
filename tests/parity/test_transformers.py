"""Loads, trains and saves a pretrained model of the unmodified transformers library."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import composable_fsdp as ours
from composable_fsdp.checkpoint import load_safetensors, save_safetensors
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import assert_exact

pytestmark = [
    pytest.mark.behaviour("F-11"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: make install"),
]

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
STEPS = 3


def llama(*, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=43,
        hidden_size=24,
        intermediate_size=35,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype)


def tokens_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(43, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(model: Any) -> Any:
    for layer in model.model.layers:
        ours.fully_shard(layer)
    return ours.fully_shard(model)


def from_meta(path: Path, *, tied: bool, convert_dtype: bool) -> Any:
    """Load a sharded Llama from ``path`` without allocating more memory than for its shards."""
    with torch.device("meta"):
        model = llama(tied=tied)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its buffers are not in checkpoints
    ours.to_empty(sharded(model), device="cpu")
    assert load_safetensors(model, path, convert_dtype=convert_dtype) == ([], [])
    return model


def train(model: nn.Module, ranks: range) -> list[float]:
    """Train and return losses. Gradients are averaged over ``ranks``. A sharded model also averages itself."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for step in range(STEPS):
        for rank in ranks:
            tokens = tokens_of(step, rank)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / len(ranks)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def load_train_and_save(folder: Path, *, tied: bool, half: bool) -> None:
    from transformers import LlamaForCausalLM

    rank, ranks, before, after = dist.get_rank(), dist.get_world_size(), folder / "before", folder / "after"
    if rank == 0:
        llama(tied=tied, dtype=torch.bfloat16 if half else torch.float32).save_pretrained(before, max_shard_size=9000)
        assert len(list(before.glob("*.safetensors"))) > 1
    dist.barrier()
    model = from_meta(before, tied=tied, convert_dtype=half)
    reference = LlamaForCausalLM.from_pretrained(before, dtype=torch.float32)
    assert_same(model, reference)
    losses = train(model, range(rank, rank + 1))
    assert_close(losses, train(reference, range(ranks))[rank::ranks])

    if rank == 0:
        model.config.save_pretrained(after)
    save_safetensors(model, after, max_file_bytes=8000)
    assert len(list(after.glob("*.safetensors"))) > 1
    trained = LlamaForCausalLM.from_pretrained(after)
    again = from_meta(after, tied=tied, convert_dtype=False)
    for found in (trained, again):
        assert_same(model, found)
        assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    first = llama(tied=tied).state_dict()
    assert not any(torch.equal(value, first[name]) for name, value in trained.state_dict().items())


def assert_same(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = full_state(model), full_state(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert_exact(theirs[name], value, name)


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}


@on_ranks(2, environment=OFFLINE, timeout=120)
def test_a_llama_goes_from_save_pretrained_through_training_to_from_pretrained(tmp_path: Path) -> None:
    load_train_and_save(tmp_path / "plain", tied=False, half=False)
    load_train_and_save(tmp_path / "tied", tied=True, half=True)
