"""Checkpoints of tensor subclasses load exactly, on any mesh or without process groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import (
    Full,
    load,
    load_state_dict,
    optimizer_state_dict,
    save,
    save_safetensors,
    state_dict,
)
from composable_fsdp.errors import CheckpointError
from tests._internals import convert
from tests.helpers.checkpoint_worlds import all_ranks_raise
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.tensor_classes import CLASSES, Closed, Coded, inner_of, model_of

PORTABLE = ["tagged", "pair", "coded"]


def sharded(kinds: list[str], seed: int, dim: int = 0, **options: Any) -> nn.Module:
    model = model_of(kinds, seed, **options)
    for module in model.children():
        fully_shard(module, shard_placement_fn=lambda p: Shard(dim if p.ndim > 1 else 0))
    return model


def expected_shard(full: torch.Tensor, dim: int, name: str, outer: torch.Size) -> torch.Tensor:
    """Return this rank's part of an inner tensor if the tensor of shape ``outer`` is sharded along ``dim``."""
    follows = {"rows": (0, None), "columns": (None, 0)}.get(name, (0, 1))[dim]
    if not dist.is_initialized() or follows is None:
        return full
    step = -(-outer[dim] // dist.get_world_size())
    start = min(dist.get_rank() * step, outer[dim])
    return full.narrow(follows, start, min(step, outer[dim] - start))


def assert_same(model: nn.Module, expected: nn.Module, dim: int = 0) -> None:
    for (name, found), full in zip(model.named_parameters(), expected.parameters(), strict=True):
        local = found._local_tensor if isinstance(found, DTensor) else found
        assert type(local).__name__ in (type(full).__name__, "Tensor", "Parameter"), name
        full_inner = inner_of(full)
        assert inner_of(found).keys() == full_inner.keys()
        for inner, value in inner_of(found).items():
            wanted = expected_shard(full_inner[inner], dim if full.ndim > 1 else 0, inner, full.shape)
            assert torch.equal(value, wanted), (name, inner)


def pair_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(wanted, lr=0.1, momentum=0.9)
    for parameter in wanted:
        optimizer.state[parameter]["momentum_buffer"] = parameter.detach().clone()
    return optimizer


def saves(folder: Path) -> None:
    model = sharded(PORTABLE, 1)
    assert_same(model, model_of(PORTABLE, 1))
    save(folder / "rows", model, pair_optimizer(model))
    save(folder / "later", model, asynchronous=True).wait()
    save(folder / "columns", sharded(["coded"], 1, dim=1))
    save(folder / "one row", sharded(["pair"], 1, shape=(1, 3)))


def loads(folder: Path, dim: int) -> None:
    model = sharded(PORTABLE, 2, dim)
    fresh = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    load(folder / "rows", model, fresh)
    expected = model_of(PORTABLE, 1)
    assert_same(model, expected, dim)
    for name, parameter in model.named_parameters():
        if parameter in fresh.state:
            momentum = inner_of(fresh.state[parameter]["momentum_buffer"])
            assert all(torch.equal(value, momentum[inner]) for inner, value in inner_of(parameter).items()), name
    again = sharded(PORTABLE, 2, dim)
    load(folder / "later", again)
    assert_same(again, expected, dim)
    one_row = sharded(["pair"], 2, shape=(1, 3))
    load(folder / "one row", one_row)
    assert_same(one_row, model_of(["pair"], 1, (1, 3)))
    columns = sharded(["coded"], 2, dim)
    load(folder / "columns", columns)
    assert_same(columns, model_of(["coded"], 1), dim)


@pytest.mark.behaviour("F-07", "F-09", "F-12")
def test_inner_tensors_are_loaded_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Shards of two ranks are square, so that shapes do not distinguish scales of rows from scales of columns."""
    run_ranks(saves, 2, tmp_path)
    run_ranks(loads, 2, tmp_path, 0)
    run_ranks(loads, 3, tmp_path, 1)
    full = model_of(PORTABLE, 2)
    load(tmp_path / "rows", full, pair_optimizer(full))
    assert_same(full, model_of(PORTABLE, 1))


def saves_blocks(folder: Path) -> None:
    model, fresh = sharded(["in blocks"], 1), sharded(["in blocks"], 2)
    save(folder, model)
    load(folder, fresh)
    for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert all(torch.equal(value, inner_of(theirs)[name]) for name, value in inner_of(mine).items())


@pytest.mark.behaviour("F-07")
def test_a_class_that_cannot_be_cut_is_loaded_on_the_mesh_of_the_save_only(tmp_path: Path) -> None:
    """Of other shards, its cuts would have other blocks than were saved, silently."""
    run_ranks(saves_blocks, 2, tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.in blocks\.weight cannot be cut.*Load it on the mesh"):
        load(tmp_path, model_of(["in blocks"], 2))
    with pytest.raises(CheckpointError, match=r"model\.in blocks\.weight is a tensor of a class .* save_safetensors"):
        convert(tmp_path, tmp_path / "target")


@pytest.mark.behaviour("F-02", "F-12")
@on_ranks(2)
def test_unsupported_operations_of_a_class_name_the_parameter(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(Closed(model.weight.detach()))
    with all_ranks_raise() as raised:
        save(tmp_path, model)
    assert str(raised.value) == (
        f"saving to {tmp_path}: model.weight cannot be saved: the class tests.helpers.tensor_classes.Closed has "
        "__torch_dispatch__ and no __tensor_flatten__. Give it that and __tensor_unflatten__, or leave the tensor out "
        "of the state dict."
    )
    assert not list(tmp_path.glob("step-*"))
    coded = sharded(["coded"], 1)
    with all_ranks_raise(r"save_safetensors: coded\.weight: a Coded cannot be copied to a plain tensor \(Attrib"):
        save_safetensors(coded, tmp_path / "tensors")
    with all_ranks_raise(r"^coded\.weight cannot be gathered by its class Coded \(NotImplemented"):
        state_dict(coded, Full())
    pair = sharded(["pair"], 1)
    full = state_dict(pair, Full())
    assert type(full["pair.weight"]).__name__ == "Pair"
    assert torch.equal(full["pair.weight"].left, model_of(["pair"], 1)["pair"].weight.left)  # type: ignore[index]
    rank0 = state_dict(pair, Full(rank0_only=True))
    assert list(rank0) == ([] if dist.get_rank() else ["pair.weight", "pair.bias"])
    with all_ranks_raise(r"^rank 0: a Pair of shape \(6, 3\) cannot be sent"):
        load_state_dict(pair, rank0, broadcast_from_rank0=True)
    momenta = optimizer_state_dict(pair, pair_optimizer(pair), Full())["state"]["pair.weight"]["momentum_buffer"]
    assert torch.equal(momenta.right, full["pair.weight"].right)


def mismatch(folder: Path, model: nn.Module, expected: Sequence[str]) -> None:
    with pytest.raises(CheckpointError) as raised:
        load(folder, model)
    text = str(raised.value)
    assert "Nothing was loaded.\n" in text
    assert [line.strip() for line in text.splitlines()[1:]] == list(expected)


TITLE = "of another tensor class, or with shards that cannot be resharded (1):"
CODED, PAIR = "tests.helpers.tensor_classes.Coded", "tests.helpers.extension_tensors.Pair"


@pytest.mark.behaviour("F-12")
def test_another_class_is_refused(tmp_path: Path) -> None:
    save(tmp_path, model_of(["coded"], 1))
    plain = nn.ModuleDict({"coded": nn.Linear(3, 6)})
    mismatch(tmp_path, plain, [TITLE, f"coded.weight: a {CODED}, expected a torch.Tensor"])
    for change in ({"kind": "unsigned"}, {"note": torch.ones(2)}):  # their values are not those of the saved tensors
        other: Any = model_of(["coded"], 2)
        vars(other["coded"].weight).update(change)
        with pytest.raises(CheckpointError, match=r"model\.coded\.weight cannot be cut"):
            load(tmp_path, other)
    coded: Any = model_of(["coded"], 2)["coded"]  # type: ignore[index]
    wide = nn.ModuleDict({"coded": nn.Linear(3, 8)})
    wide["coded"].weight = nn.Parameter(Coded.made(torch.zeros(8, 3), has_blocks=False), requires_grad=False)
    wide["coded"].bias = coded.bias
    mismatch(tmp_path, wide, ["of another shape (1):", "coded.weight: (6, 3), expected (8, 3)"])


def test_a_class_that_another_tool_pickled_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    """``torch.distributed.checkpoint`` pickles such tensors, as ``save`` once did too."""
    saved, model = model_of(["pair"], 1), model_of(["pair"], 2)
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    before = {name: value.clone() for name, value in inner_of(model["pair"].weight).items()}  # type: ignore[index]
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path, model)
    assert str(raised.value) == (
        f"loading {tmp_path}: {tmp_path} could not be loaded: CheckpointError: the tensors in {tmp_path} "
        f"cannot be read: UnpicklingError: it has an object of the class {PAIR}, "
        "which torch.load(weights_only=True) does not admit. If you trust whoever wrote it, call "
        f"torch.serialization.add_safe_globals([{PAIR}]) first. The model may be loaded in part."
    )
    assert all(torch.equal(v, before[n]) for n, v in inner_of(model["pair"].weight).items())  # type: ignore[index]


def test_plain_values_are_loaded_into_a_class_that_copies_them(tmp_path: Path) -> None:
    linear = nn.Linear(3, 6)
    save(tmp_path, nn.ModuleDict({"tagged": linear}))
    model = model_of(["tagged"], 2)
    load(tmp_path, model)
    assert torch.equal(inner_of(model["tagged"].weight)["values"], linear.weight)  # type: ignore[index]
    assert list(CLASSES) == [*PORTABLE, "in blocks"]
