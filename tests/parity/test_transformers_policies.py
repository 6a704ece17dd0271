"""Wrap policies for models of transformers, with and without tied weights."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import describe, fully_shard
from composable_fsdp.wrap import PolicyLike, every_module, transformer_blocks
from tests._internals import Scope
from tests.helpers.run_ranks import on_ranks
from tests.helpers.training import check_parity

pytestmark = [
    pytest.mark.behaviour("B-01"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: make install"),
]

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
SMALL = {
    "vocab_size": 43,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}

# Each row has a class, a configuration, and the prefix of the names of blocks.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "decoder": ("LlamaForCausalLM", "LlamaConfig", SMALL, [f"model.layers.{i}" for i in range(3)]),
    "experts": ("MixtralForCausalLM", "MixtralConfig", SMALL, [f"model.layers.{i}" for i in range(3)]),
    "two kinds of layers": (
        "JambaForCausalLM",
        "JambaConfig",
        {**SMALL, "attn_layer_offset": 1, "attn_layer_period": 3, "num_experts": 2},
        [f"model.layers.{i}" for i in range(3)],
    ),
    "encoder and decoder": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 43, "d_model": 24, "d_kv": 6, "d_ff": 36, "num_layers": 2, "num_heads": 4},
        [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)],
    ),
    "stages": (
        "SwinForImageClassification",
        "SwinConfig",
        {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "image_size": 32, "window_size": 4},
        [f"swin.encoder.layers.{i}.blocks.{j}" for i in range(2) for j in range(2)],
    ),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_are_found(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    transformers = pytest.importorskip("transformers")
    model_class, config_class, settings, expected = ARCHITECTURES[architecture]
    config = getattr(transformers, config_class)(**settings)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    scope = Scope(model)
    assert [name for module, name in scope.modules.items() if module in transformer_blocks().choose(scope)] == expected


def tied_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))


def play(model: Any, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(43, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank))
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def shard_by_hand(model: Any) -> nn.Module:
    head = model.get_output_embeddings()
    for module in (*model.model.layers, head):
        fully_shard(module)
    return fully_shard(model, shared_from=[head])


@pytest.mark.behaviour("A-10")
@on_ranks(2, environment=OFFLINE)
def test_a_tied_llama_trains_by_every_policy() -> None:
    policies: dict[str, PolicyLike] = {"blocks": transformer_blocks(), "every module": every_module()}
    for what, policy in policies.items():
        model = check_parity(tied_llama, play, shard=partial(fully_shard, policy=policy), what=what)
        tied = {names for group in describe(model).groups for names in group.tied}
        assert tied == {("model.embed_tokens.weight", "lm_head.weight")}, what
    check_parity(tied_llama, play, shard=shard_by_hand, what="by hand")
