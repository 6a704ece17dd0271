"""The modules that wrap policies choose, and the errors of ``policy=``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor

from composable_fsdp import CPUOffloadPolicy, OffloadPolicy, describe, fully_shard
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.wrap import by_class, by_size, every_module, transformer_blocks
from tests._internals import Scope, as_wrap_policy, plan_groups, state_of
from tests.helpers.models import Block as TransformerBlock
from tests.helpers.models import Chain, Transformer
from tests.helpers.refusals import assert_refused

pytestmark = [pytest.mark.behaviour("B-01"), pytest.mark.usefixtures("one_rank")]

OPTIONS = {"reshard_after_forward", "mesh", "strategy"}


class Block(nn.Module):
    """Has 40 parameters, 20 in each of two layers."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(experts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Decoder(nn.Module):
    """Has an embedding and a head, each as large as a block, a list of blocks, and its own parameter."""

    def __init__(self, depth: int = 3, experts: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block(experts) for _ in range(depth)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def names(policy: object, model: nn.Module, **ignored: object) -> list[str]:
    """Return the groups of a plan."""
    scope = Scope(model, **ignored)  # type: ignore[arg-type]
    return [group.name for group in plan_groups(as_wrap_policy(policy), scope, OPTIONS)]


BLOCKS = ["blocks.0", "blocks.1", "blocks.2", ""]


@pytest.mark.parametrize(
    "policy",
    [
        {Block},
        [Block],
        Block,
        by_class(Block),
        lambda module, name: isinstance(module, Block),
        lambda module, name: name.startswith("blocks.") and name.count(".") == 1,
        transformer_blocks(),
        ModuleWrapPolicy({Block}),
        CustomPolicy(lambda module: isinstance(module, Block)),
    ],
)
def test_all_spellings_of_every_block_choose_the_blocks_and_the_model(policy: object) -> None:
    assert names(policy, Decoder()) == BLOCKS


def test_by_size_counts_parameters_outside_of_chosen_submodules() -> None:
    assert names(by_size(40), Decoder()) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head", ""]


def test_by_size_prefers_the_innermost_module_that_is_large_enough() -> None:
    assert names(by_size(20), Decoder(1)) == ["embedding", "blocks.0.first", "blocks.0.second", "head", ""]
    assert names(by_size(1000), Decoder(1)) == [""]


def test_every_module_is_one_that_has_parameters_of_its_own() -> None:
    assert names(every_module(), Decoder(1)) == ["embedding", "blocks.0.first", "blocks.0.second", "norm", "head", ""]


def test_containers_without_forward_and_modules_without_parameters_are_never_chosen() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.ReLU(), nn.Linear(2, 2))
    assert names(lambda module, name: True, model) == ["0.0", "2", ""]


def test_modules_whose_parameters_are_read_by_their_parent_are_never_chosen() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=4)
    assert names(every_module(), layer) == ["self_attn", "linear1", "linear2", "norm1", "norm2", ""]
    assert "self_attn.out_proj" not in names(by_class(nn.Linear), layer)


def test_shared_modules_are_chosen_once_and_before_all_that_contain_them() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Sequential(shared)), "b": shared, "c": nn.Sequential(shared)})
    root = nn.Sequential(model, nn.Linear(2, 2))
    assert names(by_class(nn.Linear, nn.Sequential), root) == ["0.a.0.0", "0.a.0", "0.a", "0.c", "1", ""]


def test_a_module_used_in_several_groups_becomes_its_own_group() -> None:
    shared = Block()
    first, second = nn.Sequential(nn.Sequential(shared), shared), nn.Sequential(nn.Linear(2, 2), shared)
    model = nn.ModuleList([first, second, nn.Linear(2, 2)])
    root = nn.Sequential(model)
    assert names(among("0.0", "0.1"), root) == ["0.0.0.0", "0.0", "0.1", ""]
    assert names(among("0.0"), root) == ["0.0.0.0", "0.0", ""]
    assert names(among("0.0.0.0.first", "0.1"), root) == ["0.0.0.0.first", "0.0.0.0", "0.1", ""]


@pytest.mark.behaviour("A-11")
def test_policies_skip_ignored_modules_and_parameters() -> None:
    model = Decoder()
    ignored = {id(m) for m in model.blocks[1].modules()}
    assert names({Block}, model, ignored_modules=ignored) == ["blocks.0", "blocks.2", ""]
    assert names({Block}, model, ignored_parameters={id(p) for p in model.blocks[0].parameters()}) == BLOCKS[1:]


def test_stacks_of_several_classes_are_found_and_blocks_are_not_searched() -> None:
    model = nn.ModuleDict({"encoder": Decoder(2), "decoder": nn.Sequential(*[Block(4) for _ in range(2)])})
    root = nn.Sequential(model)
    expected = ["0.encoder.blocks.0", "0.encoder.blocks.1", "0.decoder.0", "0.decoder.1", ""]
    assert names(transformer_blocks(), root) == expected


def test_stages_that_differ_in_width_are_opened() -> None:
    def stage(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 2 * width), *[nn.Linear(2 * width, 2 * width) for _ in range(2)])

    class Stage(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = stage(width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    model = nn.Sequential(Stage(2), Stage(4))
    assert names(transformer_blocks(), model) == [f"{i}.layers.{j}" for i in range(2) for j in range(3)] + [""]


def test_a_block_that_differs_goes_with_the_others_and_a_shared_block_counts_as_repeated() -> None:
    model = Decoder()
    model.blocks[0] = Block(experts=2)
    assert names(transformer_blocks(), model) == BLOCKS
    model.blocks[0] = nn.TransformerEncoderLayer(4, 1, dim_feedforward=4)
    assert names(transformer_blocks(), model) == BLOCKS
    assert names(transformer_blocks(), nn.Sequential(nn.Linear(4, 4), *model.blocks)) == ["2", "3", ""]
    block = Block()
    assert names(transformer_blocks(), nn.Sequential(nn.ModuleList([block, block]), block)) == ["0.0", ""]


def test_the_error_for_a_model_without_blocks_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError) as caught:
        names(transformer_blocks(), Decoder(1))
    assert str(caught.value) == (
        "transformer_blocks() found no repeated blocks in Decoder: no ModuleList, ModuleDict or Sequential in it has "
        "two modules of one class and of like shapes. "
        "Name their class: policy={BlockClass}; or use by_size(min_parameters)."
    )


def test_overrides_apply_to_their_groups_including_the_model() -> None:
    model = Decoder(2)

    def choose(module: nn.Module, name: str) -> bool | dict[str, object]:
        if name == "":
            return {"reshard_after_forward": False}
        return {"reshard_after_forward": 2} if name == "blocks.1" else isinstance(module, Block)

    groups = plan_groups(as_wrap_policy(choose), Scope(model), OPTIONS)
    assert [(g.name, g.overrides) for g in groups] == [
        ("blocks.0", {}),
        ("blocks.1", {"reshard_after_forward": 2}),
        ("", {"reshard_after_forward": False}),
    ]
    (first, *_) = plan_groups(by_class(Block, strategy="NO_SHARD"), Scope(model), OPTIONS)
    assert first.overrides == {"strategy": "NO_SHARD"}
    custom = CustomPolicy(lambda m: {"sharding_strategy": "x"} if isinstance(m, Block) else {})
    assert [g.overrides for g in plan_groups(as_wrap_policy(custom), Scope(model), OPTIONS)] == [
        {"strategy": "x"},
        {"strategy": "x"},
        {},
    ]


def among(*chosen: str) -> Any:
    return lambda _, name: name in chosen


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (3, "policy must be module classes, a function of a module and its name, or one of composable_fsdp.wrap"),
        (set(), "no module of this Decoder that can be a group is a class, since none is named. Those that can are of"),
        ({int}, "no module of this Decoder that can be a group is a int. Those that can are of Block, Dec"),
        (
            size_based_auto_wrap_policy,
            r"does not take size_based_auto_wrap_policy of FSDP1\. Pass module classes",
        ),
        (partial(lambda_auto_wrap_policy, lambda_fn=bool), r"does not take lambda_auto_wrap_policy of FSDP1"),
        (transformer_blocks, r"transformer_blocks at .* does not take: .*Call a function that makes a policy, such as"),
        (lambda module, recurse, nonwrapped_numel: True, r"missing.*'nonwrapped_numel'\. .* pass wrap\.by_size\(min_"),
        ({"Block"}, r"a policy of classes takes classes of modules, not \['Block'\]\."),
        ({nn.Conv2d}, "no module of this Decoder that can be a group is a Conv2d. Those that can are of Block, Dec"),
        (lambda m, n: None, r"the policy returned None for 'embedding' \(Embedding\); it must return a bool, or"),
        (
            by_class(Block, mp="x", policy=1),
            "the policy gave 'blocks.0' 'mp', 'policy', which a group cannot have of its own. It may have mesh, resh",
        ),
    ],
)
def test_invalid_policies_are_refused(policy: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        names(policy, Decoder())


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


@pytest.mark.behaviour("D-02")
@pytest.mark.parametrize("where", ["model", "group with another", "group with it", "ignored"])
def test_names_of_offloaded_parameters_are_checked_before_anything_is_sharded(where: str) -> None:
    model = Chain(depth=3)
    layers, offload = model.layers, CPUOffloadPolicy(pin_memory=False)
    own: Any = {"group with another": OffloadPolicy(), "group with it": {"layers.1.bias": offload}}.get(where)
    options: dict[str, Any] = {"ignored_params": {layers[1].bias}} if where == "ignored" else {}
    if where != "group with it":
        options["offload_policy"] = {"layers.1.bias" if where != "model" else "layers.1.bia": offload}

    def choose(module: nn.Module, name: str) -> Any:
        return {"offload_policy": own} if own is not None and name == "layers.1" else isinstance(module, nn.Linear)

    assert_refused(ConfigurationError, r"^offload_policy has \['layers.1.bia", model, policy=choose, **options)


@pytest.mark.behaviour("D-02")
def test_a_tied_parameter_is_offloaded_by_any_of_its_names() -> None:
    for name in ("layers.0.weight", "layers.1.weight"):
        model = Chain(depth=2)
        model.layers[1].weight = model.layers[0].weight
        offload = {name: CPUOffloadPolicy(pin_memory=False)}
        fully_shard(model, policy={nn.Linear}, offload_policy=offload)
        (parameter,) = (p for p in state_of(model.layers[0]).group.parameters if p.name == "weight")
        assert isinstance(parameter.offload, CPUOffloadPolicy)


@pytest.mark.behaviour("A-08")
def test_sharded_modules_keep_their_settings() -> None:
    model = Transformer(tied=False)
    fully_shard(model.layers[0], reshard_after_forward=False)
    fully_shard(model, policy={TransformerBlock, nn.Linear})
    kinds = {group.names[0]: group.after_forward for group in describe(model).groups}
    assert kinds["layers.0"] == "keep"
    assert "layers.0.qkv" not in kinds
    assert {"layers.1", "layers.1.qkv", "head"} <= kinds.keys()
    with pytest.raises(ConfigurationError, match="fully_shard has been applied to this Transformer already"):
        fully_shard(model, policy={TransformerBlock})


@pytest.mark.behaviour("B-02")
def test_a_groups_own_strategy_or_resharding_overrides_that_of_the_call() -> None:
    def choose(module: nn.Module, name: str) -> bool | dict[str, object]:
        if name == "layers.0":
            return {"reshard_after_forward": False}
        return {"strategy": "SHARD_GRAD_OP"} if name == "layers.1" else isinstance(module, nn.Linear)

    for options in ({"strategy": "FULL_SHARD"}, {"reshard_after_forward": True}):
        model = fully_shard(Chain(depth=3), policy=choose, **options)
        assert [group.after_forward for group in describe(model).groups[1:]] == ["keep", "keep", "free"]


@pytest.mark.behaviour("A-10")
def test_groups_list_the_owners_of_shared_parameters() -> None:
    owner = fully_shard(nn.Linear(8, 8))
    model = Chain(depth=2)
    owned = nn.Linear(8, 8)
    model.layers[1].weight = owned.weight
    fully_shard(owned)
    fully_shard(model, policy={nn.Linear}, shared_from=[owner, owned])
    owner_states = [state_of(layer).owner_states for layer in model.layers]
    assert owner_states == [(), (state_of(owned),)]


@pytest.mark.behaviour("A-14")
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
