"""LoRA adapters of peft on a sharded model are saved, loaded and merged as those of an unsharded one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composable_fsdp import fully_shard, unsharded_params
from tests.helpers.run_ranks import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("transformers")
pytest.importorskip("peft")  # `make clients` installs it

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(base(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))


def base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES))


def shard(model: Any) -> Any:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def batch(rank: int) -> torch.Tensor:
    return torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(rank))


def train(model: Any, batches: list[torch.Tensor]) -> Any:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        for tokens in batches:
            (model(input_ids=tokens, labels=tokens, use_cache=False).loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(input_ids=batch(9), use_cache=False).logits
    return out


def adapters_as_saved(folder: str) -> None:
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

    reference = train(adapted(), [batch(0), batch(1)])
    model = train(shard(adapted()), [batch(dist.get_rank())])

    # adapters only: each rank gathers each of them
    full = {name: value.full_tensor() for name, value in get_peft_model_state_dict(model).items()}
    torch.testing.assert_close(full, get_peft_model_state_dict(reference))

    # files of peft, and peft's own loader in front of an unsharded base
    with unsharded_params(model, writeback=False):
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
    dist.barrier()
    loaded = PeftModel.from_pretrained(base(), folder)
    torch.testing.assert_close(get_peft_model_state_dict(loaded), full, rtol=0, atol=0)
    torch.testing.assert_close(logits(loaded), logits(reference))

    # into a sharded model: from files before it is sharded, from full values after
    before = shard(PeftModel.from_pretrained(base(), folder, is_trainable=True))
    after, inside = shard(adapted()), shard(adapted())
    set_peft_model_state_dict(after, full)
    with unsharded_params(inside):
        set_peft_model_state_dict(inside, full)
    for model in (before, after, inside):
        torch.testing.assert_close(logits(model), logits(reference))
        train(model, [batch(dist.get_rank())])
    for model in (after, inside):
        torch.testing.assert_close(logits(before), logits(model))


def merged_as_unsharded(_: str) -> None:
    reference = train(adapted(), [batch(0), batch(1)])
    model = train(shard(adapted()), [batch(dist.get_rank())])
    unmerged = {name: p.full_tensor() for name, p in model.named_parameters()}
    reference.merge_adapter()

    # a copy of the merged weights: the model stays as it was
    with unsharded_params(model, writeback=False):
        model.merge_adapter()
        merged = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.unmerge_adapter()
    torch.testing.assert_close(merged, {name: p.detach() for name, p in reference.named_parameters()})
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), unmerged[name]), name

    # the sharded model itself, for evaluation
    with unsharded_params(model):
        model.merge_adapter()
    torch.testing.assert_close({n: p.full_tensor() for n, p in model.named_parameters()}, merged, rtol=0, atol=0)
    torch.testing.assert_close(logits(model), logits(reference))
    with unsharded_params(model):
        model.unmerge_adapter()
    train(model, [batch(dist.get_rank())])


@pytest.mark.parametrize("check", [adapters_as_saved, merged_as_unsharded])
def test_adapters_of_a_sharded_model_are_saved_loaded_and_merged(check: Any, tmp_path: Path) -> None:
    run_ranks(check, 2, str(tmp_path), timeout=150)
