"""``policy=`` and ``tie_groups`` on one rank: what is refused, and that nothing has changed then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import ConfigurationError, FSDPModule, describe, fully_shard, tie_groups
from composable_fsdp.wrap import by_class, every_module
from tests._internals import state_of
from tests.helpers.models import Block, Chain, Transformer
from tests.helpers.sharding import single_rank


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with single_rank():
        yield


@pytest.mark.behaviour("B-01")
@pytest.mark.parametrize(
    ("model", "policy", "message"),
    [
        ([Chain(), Chain()], {nn.Linear}, r"policy= says which modules in a model are groups: pass that model, and no"),
        (3, {nn.Linear}, r"fully_shard takes an nn.Module or a list of them, not int\."),
        (nn.ModuleList([Chain()]), {nn.Linear}, r"ModuleList has no forward, so there is no call before which"),
        (Chain(), by_class(nn.Linear, sync_module_states=True), r"gave 'layers.0' 'sync_module_states', which a group"),
        (Chain(), by_class(nn.Linear, strategy="FULL"), r"strategy must be one of FULL_SHARD, .*, not 'FULL'\."),
    ],
)
def test_mistakes_are_found_before_anything_is_sharded(model: Any, policy: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fully_shard(model, policy=policy)
    for each in model if isinstance(model, list) else [model]:
        assert not isinstance(each, nn.Module) or not any(isinstance(p, DTensor) for p in each.parameters())


@pytest.mark.behaviour("B-01", "A-08")
def test_what_is_sharded_already_is_left_as_it_is() -> None:
    model = Transformer(tied=False)
    fully_shard(model.layers[0], reshard_after_forward=False)
    fully_shard(model, policy={Block, nn.Linear})
    kinds = {group.names[0]: group.after_forward for group in describe(model).groups}
    assert kinds["layers.0"] == "keep"
    assert "layers.0.qkv" not in kinds
    assert {"layers.1", "layers.1.qkv", "head"} <= kinds.keys()
    with pytest.raises(ConfigurationError, match="fully_shard has been applied to this Transformer already"):
        fully_shard(model, policy={Block})


@pytest.mark.behaviour("B-01", "B-02")
def test_a_groups_own_strategy_or_resharding_counts_instead_of_the_calls() -> None:
    def choose(module: nn.Module, name: str) -> bool | dict[str, object]:
        if name == "layers.0":
            return {"reshard_after_forward": False}
        return {"strategy": "SHARD_GRAD_OP"} if name == "layers.1" else isinstance(module, nn.Linear)

    for options in ({"strategy": "FULL_SHARD"}, {"reshard_after_forward": True}):
        model = fully_shard(Chain(depth=3), policy=choose, **options)
        assert [group.after_forward for group in describe(model).groups[1:]] == ["keep", "keep", "free"]


@pytest.mark.behaviour("A-10")
def test_groups_borrow_from_elsewhere_what_they_use() -> None:
    owner = fully_shard(nn.Linear(8, 8))
    model = Chain(depth=2)
    owned = nn.Linear(8, 8)
    model.layers[1].weight = owned.weight
    fully_shard(owned)
    fully_shard(model, policy={nn.Linear}, shared_from=[owner, owned])
    lenders = [state_of(layer).lenders for layer in model.layers]
    assert lenders == [(), (state_of(owned),)]


@pytest.mark.behaviour("B-01", "A-14")
@pytest.mark.parametrize(
    "model",
    [
        nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, dropout=0.0, batch_first=True),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(3), nn.Bilinear(8, 8, 4))[:2],
    ],
)
def test_every_module_of_torchs_own_layers_computes_as_before(model: nn.Module) -> None:
    x = torch.randn(2, 3, 8)
    expected = model(x)
    fully_shard(model, policy=every_module())
    output = model(x)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.behaviour("A-10")
def test_tie_groups_says_what_it_cannot_tie() -> None:
    tied, untied = Transformer(tied=True), Transformer(tied=False)
    with pytest.raises(ConfigurationError, match="takes a list of two or more modules that share parameters"):
        tie_groups([tied.head])
    with pytest.raises(ConfigurationError, match="this Embedding shares no parameter with the others"):
        tie_groups([untied.embedding, untied.head])
    with pytest.raises(ConfigurationError, match=r"this LayerNorm shares no parameter .*head\.weight = emb"):
        tie_groups([tied.embedding, tied.head, tied.norm])
    fully_shard(tied.embedding)
    with pytest.raises(ConfigurationError, match=r"this Embedding has been sharded already\. Call it bef"):
        tie_groups([tied.embedding, tied.head])
    assert not isinstance(tied.head, FSDPModule)
