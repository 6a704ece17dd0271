"""Checkpoints of optimizer state whose tensor class cannot be cut like its parameter: torchao's, and one of our own.

On the mesh of the save, the inner tensors come back bit for bit, so training goes on as if it had never stopped. On
another one, values are quantized again where blocks do not fit.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import (
    Full,
    Local,
    Sharded,
    load,
    load_optimizer_state_dict,
    load_state_dict,
    optimizer_state_dict,
    save,
    save_safetensors,
    state_dict,
)
from composable_fsdp.errors import CheckpointError, UnsavableStateWarning
from composable_fsdp.optim import local_optimizer, offload_optimizer
from tests._internals import local_part
from tests.helpers.checkpoint_worlds import all_ranks_raise
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.tensor_classes import Blocked, BlockedAdam, inner_of

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: make install")

ROUNDING = {"AdamW8bit": 0.01, "AdamW4bit": 0.15, "AdamWFp8": 0.04, "BlockedAdam": 0.02}
"""The most by which quantizing again may change a value, of the largest value of the tensor."""

WAYS: dict[str, Any] = {
    "plain": lambda optimizer: optimizer,
    "local": lambda optimizer: local_optimizer(optimizer, elementwise=True),
    "offloaded": offload_optimizer,
}


def optimizer_of(kind: str, model: nn.Module, way: str = "plain") -> torch.optim.Optimizer:
    if kind == "BlockedAdam":
        return cast(torch.optim.Optimizer, WAYS[way](BlockedAdam(model.parameters(), lr=1e-2)))
    import torchao.optim

    return cast(torch.optim.Optimizer, WAYS[way](getattr(torchao.optim, kind)(model.parameters(), lr=1e-2)))


def built(kind: str, world: str, seed: int, way: str = "plain", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a model and its optimizer. On two ranks, the last weight is quantized on rank 0 and plain on rank 1."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 100), nn.Linear(100, 256))
    model.append(nn.Linear(256, 31))
    model.to(dtype)
    mesh = None
    if world == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if world == "tensor-parallel":
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        parallelize_module(model, both["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = both["data"]
    if world != "unsharded":
        for layer in (*(each for each in model if isinstance(each, nn.Linear)), model):
            fully_shard(layer, mesh=mesh)
    return model, optimizer_of(kind, model, way)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(8, 256, dtype=next(model.parameters()).dtype)
        with torch.compiler.set_stance("force_eager"):  # torchao compiles for a minute
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()


def state_of(optimizer: Any) -> list[tuple[Any, ...]]:
    """Return key, class and inner tensors of the state, as copies."""
    found = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        for key, value in optimizer.state[parameter].items():
            inner = {name: each.clone() for name, each in inner_of(value).items()}
            found.append((key, type(local_part(value)).__name__, inner))
    return found


def assert_same_state(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> None:
    assert [entry[:2] for entry in one] == [entry[:2] for entry in other]
    for (key, _, mine), (_, _, theirs) in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items()), key


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(local_part(mine), local_part(theirs)), name


@contextmanager
def logged() -> Iterator[list[str]]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("composable_fsdp").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("composable_fsdp").removeHandler(handler)


def goes_on(folder: Path, kind: str, world: str, way: str, dtype: torch.dtype) -> set[str]:
    """Save, go on, load into a fresh optimizer, and go on the same way. Return the classes of the state."""
    model, optimizer = built(kind, world, 0, way, dtype)
    train(model, optimizer, range(3))
    saved = state_of(optimizer)
    save(folder / "at once", model, optimizer)
    later = save(folder / "later", model, optimizer, asynchronous=True)
    train(model, optimizer, range(3, 5))
    later.wait()
    for name in ("at once", "later"):
        fresh, its = built(kind, world, 1, way, dtype)
        with logged() as texts:
            load(folder / name, fresh, its)
        assert not texts, texts
        assert_same_state(state_of(its), saved)
        train(fresh, its, range(3, 5))
        assert_same_weights(fresh, model)
        load(folder / name, fresh, its)  # over the state of a later step
        assert_same_state(state_of(its), saved)
    return {entry[1] for entry in saved}


CASES = [
    ("AdamW8bit", "sharded", 2, "offloaded", torch.float32),
    ("AdamW8bit", "sharded", 2, "local", torch.bfloat16),
    ("AdamW8bit", "tensor-parallel", 4, "plain", torch.float32),
    ("AdamW4bit", "sharded", 2, "plain", torch.float32),
    ("AdamWFp8", "sharded", 2, "local", torch.float32),
]


@needs_torchao
@pytest.mark.behaviour("F-09", "E-11")
@pytest.mark.parametrize(("kind", "world", "ranks", "way", "dtype"), CASES, ids=lambda value: str(value))
def test_training_with_8_bit_state_goes_on_as_if_it_had_not_stopped(
    kind: str, world: str, ranks: int, way: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    classes = run_ranks(goes_on, ranks, tmp_path, kind, world, way, dtype)
    assert {"AdamW8bit": "OptimState8bit", "AdamW4bit": "OptimState4bit", "AdamWFp8": "OptimStateFp8"}[kind] in classes[
        0
    ]


@pytest.mark.behaviour("F-09")
@pytest.mark.parametrize("way", ["plain", "local"])
def test_training_with_a_class_of_blocks_goes_on_as_if_it_had_not_stopped(way: str, tmp_path: Path) -> None:
    """The class is registered nowhere: that of the optimizer at hand is admitted."""
    assert all(
        "Blocked" in each for each in run_ranks(goes_on, 2, tmp_path, "BlockedAdam", "sharded", way, torch.float32)
    )
    assert "Blocked" in goes_on(tmp_path / "alone", "BlockedAdam", "unsharded", way, torch.float32)


def full_values(model: Any, optimizer: Any) -> dict[str, Any]:
    return cast(dict[str, Any], optimizer_state_dict(model, optimizer, Full())["state"])


def assert_close_state(found: dict[str, Any], expected: dict[str, Any], rounding: float) -> None:
    assert found.keys() == expected.keys()
    for name, entry in expected.items():
        for key, value in entry.items():
            assert type(value) is torch.Tensor
            assert found[name][key].dtype == value.dtype
            difference = (found[name][key] - value).abs().max()
            assert difference <= rounding * value.abs().max(), (name, key, difference, value.abs().max())


def saves(folder: Path, kind: str, world: str) -> dict[str, Any]:
    model, optimizer = built(kind, world, 0)
    train(model, optimizer, range(3))
    save(folder, model, optimizer)
    return full_values(model, optimizer)


def loads(folder: Path, kind: str, world: str, expected: dict[str, Any]) -> tuple[list[str], set[str]]:
    model, optimizer = built(kind, world, 1)
    with logged() as texts:
        load(folder, model, optimizer)
    assert_close_state(full_values(model, optimizer), expected, ROUNDING[kind])
    classes = {entry[1] for entry in state_of(optimizer)}
    train(model, optimizer, range(3, 4))
    assert {entry[1] for entry in state_of(optimizer)} == classes
    return texts, classes


MESHES = [
    ("AdamW8bit", "sharded", 2, [("sharded", 4), ("hybrid", 4), ("tensor-parallel", 4)]),
    ("AdamW8bit", "tensor-parallel", 4, [("sharded", 2)]),
    ("AdamW4bit", "sharded", 2, [("sharded", 1)]),
    ("AdamWFp8", "sharded", 4, [("sharded", 1)]),
    ("BlockedAdam", "sharded", 2, [("sharded", 3)]),
]


@pytest.mark.behaviour("F-07", "F-09", "E-11")
@pytest.mark.parametrize(("kind", "world", "ranks", "others"), MESHES, ids=lambda value: str(value))
def test_8_bit_state_is_quantized_again_on_other_meshes(
    kind: str, world: str, ranks: int, others: list[tuple[str, int]], tmp_path: Path
) -> None:
    if kind != "BlockedAdam":
        pytest.importorskip("torchao")
    expected = run_ranks(saves, ranks, tmp_path, kind, world)[0]
    for other, count in others:
        for rank, (texts, classes) in enumerate(run_ranks(loads, count, tmp_path, kind, other, expected)):
            assert classes > {"Tensor"}, (other, rank)
            assert all("were dequantized and quantized again, which rounds their values" in text for text in texts)
            assert not rank or not texts
            assert rank or texts or kind not in ("AdamW4bit", "BlockedAdam"), other
    texts, classes = loads(tmp_path, kind, "unsharded", expected)
    assert classes > {"Tensor"}


def both_ways(folder: Path, kind: str) -> None:
    """Check that torch's functions load what ours save, and ours what theirs save, exactly."""
    model, optimizer = built(kind, "sharded", 0)
    train(model, optimizer, range(3))
    saved = state_of(optimizer)
    save(folder / "ours", model, optimizer, step=3)
    dcp.save(torch_state(model, optimizer), checkpoint_id=folder / "torch")

    fresh, its = built(kind, "sharded", 1)
    train(fresh, its, range(1))  # torch's functions would step by themselves, with compilation
    wanted = torch_state(fresh, its)
    dcp.load(wanted, checkpoint_id=folder / "ours" / "step-00000003")
    set_state_dict(fresh, its, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])
    assert_same_state(state_of(its), saved)
    assert_same_weights(fresh, model)

    fresh, its = built(kind, "sharded", 1)
    load(folder / "torch", fresh, its)
    assert_same_state(state_of(its), saved)
    assert_same_weights(fresh, model)
    assert_close_state(full_values(fresh, its), full_values(model, optimizer), 0)


def torch_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


@needs_torchao
@pytest.mark.behaviour("F-09", "E-11")
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit"])
def test_torch_loads_8_bit_state_from_here_and_the_other_way_round(kind: str, tmp_path: Path) -> None:
    run_ranks(both_ways, 2, tmp_path, kind)
    model, optimizer = built(kind, "unsharded", 1)
    load(tmp_path / "torch", model, optimizer)
    expected = built(kind, "unsharded", 1)
    load(tmp_path / "ours", *expected)
    assert_close_state(full_values(model, optimizer), full_values(*expected), 0)


def through_state_dicts(kind: str) -> dict[str, Any]:
    model, optimizer = built(kind, "sharded", 0)
    train(model, optimizer, range(3))
    saved, full = state_of(optimizer), optimizer_state_dict(model, optimizer, Full())
    for form in (Sharded(), Local()):
        for steps in (0, 1):
            fresh, its = built(kind, "sharded", 1)
            train(fresh, its, range(steps))
            load_state_dict(fresh, state_dict(model, form), form)
            load_optimizer_state_dict(fresh, its, optimizer_state_dict(model, optimizer, form), form)
            assert_same_state(state_of(its), saved)
            train(fresh, its, range(4, 5))
    fresh, its = built(kind, "sharded", 1)
    load_optimizer_state_dict(fresh, its, full)
    assert [entry[:2] for entry in state_of(its)] == [entry[:2] for entry in saved]
    assert_close_state(full_values(fresh, its), full["state"], ROUNDING[kind])
    rank0 = optimizer_state_dict(model, optimizer, Full(rank0_only=True))
    fresh, its = built(kind, "sharded", 1)
    load_optimizer_state_dict(fresh, its, rank0, broadcast_from_rank0=True)
    assert_close_state(full_values(fresh, its), full["state"], ROUNDING[kind])
    return full


@pytest.mark.behaviour("F-04", "F-05", "F-09")
@pytest.mark.parametrize("kind", ["BlockedAdam", pytest.param("AdamW8bit", marks=needs_torchao)])
def test_state_dicts_have_8_bit_state_as_it_is_or_in_full_dequantized(kind: str) -> None:
    full = run_ranks(through_state_dicts, 2, kind)[0]
    model, optimizer = built(kind, "unsharded", 1)
    with logged() as texts:
        load_optimizer_state_dict(model, optimizer, full)
    assert all("were dequantized and quantized again" in text for text in texts)
    assert {entry[1] for entry in state_of(optimizer)} > {"Tensor"}
    assert_close_state(full_values(model, optimizer), full["state"], ROUNDING[kind])


class Unpicklable:
    """What the attribute of a tensor may be: ``torch.load`` admits no class of this module."""


@pytest.mark.behaviour("F-12")
@on_ranks(2)
def test_a_class_that_cannot_be_pickled_is_named_at_the_first_step_and_by_save(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    fully_shard(model)
    optimizer = BlockedAdam(model.parameters(), lr=1e-2, note=Unpicklable())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
    texts = [str(each.message) for each in caught if each.category is UnsavableStateWarning]
    assert len(texts) == 1
    reason = (
        "it cannot be pickled and loaded again (WeightsUnpickler error: "
        "Unsupported global: GLOBAL tests.ranks.test_checkpoint_opaque_state.Unpicklable was not an allowed global"
    )
    assert texts[0].startswith(
        "BlockedAdam keeps 'moment' of parameter '0.weight' as a tests.helpers.tensor_classes.Blocked, so no "
        f"checkpoint can be saved: {reason}"
    ), texts
    assert "Keep only tensors, numbers and strings in the attributes of its class, or admit their classes" in texts[0]
    with all_ranks_raise() as raised:
        save(tmp_path, model, optimizer)
    assert f"saving to {tmp_path}: optimizer.state.0.weight.moment cannot be saved: {reason}" in str(raised.value)
    assert not list(tmp_path.glob("step-*"))
    with torch.serialization.safe_globals([Unpicklable]):
        save(tmp_path, model, optimizer)
        load(tmp_path, model, optimizer)


@pytest.mark.behaviour("F-12")
def test_8_bit_state_is_refused_by_optimizers_that_make_none(tmp_path: Path) -> None:
    model, optimizer = built("BlockedAdam", "unsharded", 0)
    train(model, optimizer, range(1))
    path = save(tmp_path, model, optimizer).path
    save_safetensors(model, tmp_path / "tensors")  # has the parameters only
    with pytest.raises(CheckpointError) as raised:
        load(path, model, torch.optim.AdamW(model.parameters()))
    text = "moment of 0.weight: saved as a tensor of a class of its optimizer, but this optimizer makes no such state"
    assert text in str(raised.value)


class NeedsClosure(BlockedAdam):
    """A step that cannot be called without a closure, as that of LBFGS."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        super().step()


@pytest.mark.behaviour("F-12")
def test_an_optimizer_whose_copy_cannot_step_loads_8_bit_state_once_it_has_stepped(tmp_path: Path) -> None:
    model, _ = built("BlockedAdam", "unsharded", 0)
    optimizer, fresh = (NeedsClosure(model.parameters(), lr=1e-2) for _ in range(2))
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step(lambda: None)
    path = save(tmp_path, model, optimizer).path
    with pytest.raises(CheckpointError, match=r"this optimizer cannot step \(TypeError: .*\)\. Step it once first"):
        load(path, model, fresh)
    fresh.step(lambda: None)
    load(path, model, fresh)
    assert_same_state(state_of(fresh), state_of(optimizer))


class Renamed(Blocked):
    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], note: Any, *_: object) -> Any:
        return Renamed(inner["codes"], inner["scales"], note)


@pytest.mark.behaviour("F-12")
def test_a_file_cannot_choose_the_class_of_8_bit_state(tmp_path: Path) -> None:
    model, optimizer = built("BlockedAdam", "unsharded", 0)
    train(model, optimizer, range(1))
    codes, weight = torch.ones(128, 256, dtype=torch.int8), model[0].weight
    given = {
        "it has objects of other classes": Renamed(codes, torch.ones(4096)),
        "it is a Renamed": Renamed(codes, torch.ones(4096)),
        "must match": Blocked(codes, torch.ones(3)),
    }
    for name, value in given.items():
        optimizer.state[weight]["moment"] = value
        path = save(tmp_path / name, model, optimizer).path
        fresh, its = built("BlockedAdam", "unsharded", 1)
        admitted: list[Any] = [Renamed] if name == "it is a Renamed" else []
        with torch.serialization.safe_globals(admitted), pytest.raises(CheckpointError, match=name) as raised:
            load(path, fresh, its)
        if name != "must match":
            where = "optimizer.state.0.weight.moment cannot be read as a Blocked: "
            assert where in str(raised.value)
        assert Renamed not in torch.serialization.get_safe_globals()


@needs_torchao
def test_classes_that_were_admitted_stay_admitted(tmp_path: Path) -> None:
    """torch's ``safe_globals`` would take torchao's registrations away."""
    model, optimizer = built("AdamW8bit", "unsharded", 0)
    train(model, optimizer, range(1))
    load(save(tmp_path, model, optimizer).path, model, optimizer)
    kind = next(type(value) for value in optimizer.state[model[0].weight].values() if type(value) is not torch.Tensor)
    assert kind in torch.serialization.get_safe_globals()
