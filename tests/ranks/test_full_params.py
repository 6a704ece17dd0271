"""Test ``unsharded_params``: full parameters inside the context, and the changes that are kept."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from composable_fsdp import MixedPrecisionPolicy, fully_shard, stream_full_params, unsharded_params
from composable_fsdp.errors import ConfigurationError, LifecycleError, ParameterError
from tests._internals import extent_of, gather
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import assert_exact, full_value, sharded, train_and_compare, values_of

MESHES = [("mlp", (2,)), ("mlp", (4,)), ("mlp", (2, 2)), ("tied", (2,)), ("mlp", (4, 1)), ("mlp", (1,))]


def built(task: str, shape: tuple[int, ...], **options: object) -> nn.Module:
    return shard_layers(TASKS[task].build(), fully_shard, mesh=init_device_mesh("cpu", shape), **options)


def backward(model: nn.Module, task: str, step: int = 0) -> None:
    TASKS[task].loss(model, TASKS[task].batch_of(step, dist.get_rank())).backward()


def assert_unsharded(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    found = dict(model.named_parameters(remove_duplicate=False))
    assert list(found) == list(values)
    for name, parameter in found.items():
        assert isinstance(parameter, nn.Parameter), name
        assert not isinstance(parameter, DTensor), name
        assert parameter.is_leaf, name
        assert_exact(parameter.detach(), values[name], name)


@pytest.mark.behaviour("C-14")
@pytest.mark.parametrize(("task", "shape"), MESHES, ids=str)
@on_ranks("shape")
def test_unsharded_params_shows_full_parameters_and_keeps_writes_on_request(task: str, shape: tuple[int, ...]) -> None:
    for options in ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}):
        model, reference = built(task, shape, **options), TASKS[task].build()
        backward(model, task)
        before = list(model.named_parameters(remove_duplicate=False))
        values = values_of(reference)
        with unsharded_params(model):
            assert_unsharded(model, values)
            assert len(list(model.parameters())) == len(list(reference.parameters())), "shared parameters stay shared"
            assert all(not isinstance(v, DTensor) for v in model.state_dict().values())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2).add_(1)
        after = list(model.named_parameters(remove_duplicate=False))
        assert [(n, id(p)) for n, p in after] == [(n, id(p)) for n, p in before]
        for name, value in values_of(model).items():
            assert_exact(value, values[name] * 2 + 1, name)
        with unsharded_params(model, writeback=False), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        for name, value in values_of(model).items():
            assert_exact(value, values[name] * 2 + 1, name)


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_state_dicts_are_loaded_into_full_parameters() -> None:
    """Full values, from every rank or the first one, into all modules, one of them, or the group of the root alone."""
    for task, shape in (("mlp", (2, 1)), ("tied", (2,))):
        for assign, rank0_only, recurse in product((False, True), repeat=3):
            model, reference = built(task, shape), TASKS[task].build()
            old, shards = values_of(reference), dict(model.named_parameters())
            new = {name: value + 1 for name, value in old.items()}
            with unsharded_params(model, rank0_only=rank0_only, recurse=recurse):
                if dist.get_rank() == 0 or not (rank0_only and recurse):
                    model.load_state_dict(new, assign=assign and recurse)
                for name, parameter in model.named_parameters():
                    if not isinstance(parameter, DTensor):
                        assert_exact(parameter.detach(), new[name], name)
            assert all(p is shards[name] for name, p in model.named_parameters())
            for name, value in values_of(model).items():
                assert_exact(value, new[name], name)
            reference.load_state_dict(new)
            batch = TASKS[task].batch_of(0, 0)
            torch.testing.assert_close(TASKS[task].loss(model, batch), TASKS[task].loss(reference, batch))
            with unsharded_params(model, writeback=False):
                model.load_state_dict(old)
                model.get_submodule("layers.0").load_state_dict(model.get_submodule("layers.0").state_dict())
            for name, value in values_of(model).items():
                assert_exact(value, new[name], name)
            backward(model, task)


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_written_values_replace_parameters_kept_unsharded() -> None:
    task = TASKS["mlp"]
    model, reference = built("mlp", (2,), reshard_after_forward=False), task.build()
    with torch.no_grad():
        task.loss(model, task.batch_of(0, 0))  # leaves the groups unsharded
    for module in (model, reference):
        with unsharded_params(module), torch.no_grad():
            module.get_parameter("layers.0.weight").fill_(0.25)
    train_and_compare(model, reference, task)


@pytest.mark.behaviour("C-14")
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@on_ranks("shape")
def test_with_grads_shows_full_gradients_and_writes_them_back(shape: tuple[int, ...]) -> None:
    model: Any = built("mlp", shape)
    backward(model, "mlp")
    rank = dist.get_rank()
    frozen = model.get_parameter("layers.1.bias")
    frozen.grad = None
    lone = model.get_parameter("scale")
    if rank != 0:
        lone.grad.to_local().zero_()
    expected = {n: None if p.grad is None else full_value(p.grad) for n, p in model.named_parameters()}
    if rank != 0:
        lone.grad = None  # as if only the first rank had a gradient
    objects = {n: p.grad for n, p in model.named_parameters()}
    with unsharded_params(model):
        assert all(p.grad is None for p in model.parameters())
    with unsharded_params(model, with_grads=True, writeback=False):
        for name, parameter in model.named_parameters():
            value = expected[name]
            assert (parameter.grad is None) == (value is None), name
            if parameter.grad is not None and value is not None:
                assert_exact(parameter.grad, value, name)
                parameter.grad.zero_()
    assert all(p.grad is objects[n] for n, p in model.named_parameters())
    with unsharded_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(3)
            if name == "layers.1.bias":
                parameter.grad = torch.ones_like(parameter)
            if name == "layers.0.bias":
                parameter.grad = None
    for name, parameter in model.named_parameters():
        if name == "layers.0.bias":
            assert parameter.grad is None
            continue
        assert parameter.grad.placements == parameter.placements
        value = expected[name]
        assert_exact(full_value(parameter.grad), torch.ones(9) if value is None else value * 3, name)


@pytest.mark.behaviour("C-14")
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
@on_ranks("shape")
def test_rank_0_only_shows_and_writes_full_parameters(shape: tuple[int, ...]) -> None:
    model, rank = built("mlp", shape), dist.get_rank()
    values = values_of(model)
    backward(model, "mlp")
    objects = dict(model.named_parameters())
    with unsharded_params(model, rank0_only=True, writeback=False):
        if rank == 0:
            assert_unsharded(model, values)
        else:
            assert all(p is objects[n] for n, p in model.named_parameters())
    for name, value in values_of(model).items():
        assert_exact(value, values[name], name)
    with unsharded_params(model, rank0_only=True, with_grads=True, offload_to_cpu=True):
        if rank == 0:
            for name, parameter in model.named_parameters():
                parameter.data.add_(5)
                parameter.grad = None if name == "scale" else torch.ones_like(parameter)
            model.get_parameter("scale").requires_grad_(False)
    for name, parameter in model.named_parameters():
        assert parameter is objects[name]
        assert_exact(full_value(parameter), values[name] + 5, name)
        assert parameter.requires_grad == (name != "scale")
        if parameter.grad is None:
            assert name == "scale"
        else:
            assert_exact(full_value(parameter.grad), torch.ones_like(values[name]), name)


class Stop(Exception):
    pass


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_raising_inside_restores_the_sharded_state_and_no_rank_hangs() -> None:
    model = built("mlp", (2,))
    objects, values = dict(model.named_parameters()), values_of(model)
    for raising in ([0, 1], [0], [1]):
        for rank0_only in (True, False):
            if not rank0_only and len(raising) == 1:
                continue
            try:
                with unsharded_params(model, rank0_only=rank0_only), torch.no_grad():
                    if not rank0_only or dist.get_rank() == 0:
                        model.get_parameter("scale").add_(1)
                    if dist.get_rank() in raising:
                        raise Stop
                assert dist.get_rank() not in raising
            except Stop:
                assert dist.get_rank() in raising
            assert all(p is objects[n] for n, p in model.named_parameters())
            if raising == [1]:
                values["scale"] += 1  # the writes of the first rank are kept
            assert_exact(full_value(objects["scale"]), values["scale"], "scale")
    backward(model, "mlp")


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_without_recurse_only_one_group_is_unsharded() -> None:
    model = built("mlp", (2,))
    with unsharded_params(model, recurse=False):
        shown = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    assert shown == {"scale"}
    with unsharded_params(model.get_submodule("layers.1")):
        shown = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    assert shown == {"layers.1.weight", "layers.1.bias"}


@pytest.mark.behaviour("C-14")
@on_ranks(4)
def test_other_dims_attributes_and_replaced_parameters() -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.LSTM(5, 3)
    vars(model.weight_ih_l0)["tag"] = "kept"
    model.bias_hh_l0.requires_grad_(False)
    values = values_of(model)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with unsharded_params(model):
        assert_unsharded(model, values)
        assert vars(model.weight_ih_l0)["tag"] == "kept"
        assert not model.bias_hh_l0.requires_grad
        assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))
        with torch.no_grad():
            model.get_parameter("weight_ih_l0").add_(1)
        model.bias_ih_l0 = nn.Parameter(torch.full((12,), 7.0), requires_grad=False)
        del model.bias_hh_l0
        model.bias_hh_l0 = nn.Parameter(torch.ones(12))
    names = list(dict(model.named_parameters()))
    assert sorted(names) == sorted(values)
    for name, value in values_of(model).items():
        expected = {
            "weight_ih_l0": values[name] + 1,
            "bias_ih_l0": torch.full((12,), 7.0),
            "bias_hh_l0": torch.ones(12),
        }
        assert_exact(value, expected.get(name, values[name]), name)
    assert not model.bias_ih_l0.requires_grad
    assert model.bias_hh_l0.requires_grad
    model(torch.randn(2, 1, 5))[0].sum().backward()


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_invalid_uses_of_unsharded_params_are_errors() -> None:
    model, messages = built("mlp", (2,)), []
    batch = TASKS["mlp"].batch_of(0, dist.get_rank())

    def enter(*_: object) -> None:
        with pytest.raises(LifecycleError) as error, unsharded_params(model.get_submodule("layers.2")):
            pass
        messages.append(str(error.value))

    handle = model.get_submodule("layers.0").register_forward_hook(enter)
    output = model(*batch[:-1])
    handle.remove()
    output.register_hook(enter)
    output.sum().backward()
    with unsharded_params(model.get_submodule("layers.2")):
        enter()
        with pytest.raises(
            LifecycleError, match=r"^stream_full_params was called for .* inside unsharded_params or init"
        ):
            stream_full_params(model)
        for call in (lambda: model(*batch[:-1]), sharded(model.get_submodule("layers.2")).unshard):
            with pytest.raises(LifecycleError, match="inside unsharded_params"):
                call()
    with unsharded_params(model, rank0_only=True, writeback=False):
        if dist.get_rank() == 0:  # raised before any collective
            with pytest.raises(LifecycleError, match="inside unsharded_params"):
                model(*batch[:-1])
    backward(model, "mlp")
    with pytest.raises(ParameterError) as error, unsharded_params(model):
        model.get_submodule("layers.1").weight = nn.Parameter(torch.ones(2, 2))
    messages.append(str(error.value))
    with pytest.raises(ParameterError), unsharded_params(model, rank0_only=True):
        vars(model.get_submodule("layers.1"))["_parameters"].pop("weight") if dist.get_rank() == 0 else None
    backward(model, "mlp")
    with torch.device("meta"):
        abstract = TASKS["mlp"].build()
    with pytest.raises(ParameterError) as error, unsharded_params(shard_layers(abstract, fully_shard)):
        pass
    messages.append(str(error.value))
    forward, backward_, nested, shape, meta = messages
    assert forward.startswith("unsharded_params was called during a forward that 'layers.2' is part of")
    assert backward_.startswith("unsharded_params was called during a backward")
    assert "Call it before the forward or after backward() has returned." in forward
    assert nested.startswith(
        "unsharded_params was called for 'layers.2' inside unsharded_params or initialize for modules of the same root."
    )
    assert "{'layers.1.weight': (2, 2)}" in shape
    assert "'layers.0.weight', 'layers.0.bias'" in meta


@pytest.mark.behaviour("C-14")
@on_ranks(4)
def test_modules_on_different_meshes() -> None:
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = model
    fully_shard(first, mesh=rows["a"])
    fully_shard(second, mesh=rows["b"])
    values = values_of(model)
    with pytest.raises(ConfigurationError) as error, unsharded_params(model, rank0_only=True):
        pass
    with unsharded_params(model):
        assert_unsharded(model, values)
        model.get_parameter("0.weight").data.add_(1)
    assert_exact(full_value(model.get_parameter("0.weight")), values["0.weight"] + 1, "0.weight")
    assert "no mesh has all ranks that hold parameters" in str(error.value)


@pytest.mark.behaviour("C-14")
@on_ranks(4)
def test_local_shards_equal_those_of_torch_for_every_placement() -> None:
    grid, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    cube = init_device_mesh("cpu", (1, 2, 2))
    strided = _StridedShard(0, split_factor=2)
    cases: list[tuple[object, tuple[Placement, ...]]] = [
        (line, (Shard(0),)),
        (line, (Shard(1),)),
        (line, (_StridedShard(0, split_factor=3),)),
        (grid, (strided, Shard(0))),
        (grid, (Shard(1), Shard(0))),
        (grid, (Shard(0), Shard(0))),
        (grid, (Replicate(), Shard(0))),
        (grid, (_StridedShard(1, split_factor=2), Shard(1))),
        (cube, (Replicate(), strided, Shard(0))),
    ]
    for mesh, places in cases:
        for shape in ((8, 4), (9, 7), (3, 5), (1, 1), (0, 2)):
            value = torch.arange(prod(shape)).reshape(shape).float()
            placed = distribute_tensor(value, mesh, places, src_data_rank=None)  # type: ignore[arg-type]
            assert_exact(extent_of(placed).take(value), placed.to_local(), f"{shape} as {places}")
            assert_exact(gather(placed), value, f"{shape} from {places}")


@pytest.mark.behaviour("C-14")
@on_ranks(4)
def test_uneven_shards_of_tensor_parallel_parameters_are_unsharded_and_written_back() -> None:
    """Check sizes that no placement describes: tensor parallelism splits 7 rows into 4 and 3, each for two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Linear(5, 7)
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    with unsharded_params(model), torch.no_grad():
        for name, value in model.named_parameters():
            assert_exact(value, expected[name], name)
            value.add_(1)
    with unsharded_params(model, writeback=False):
        for name, value in model.named_parameters():
            assert_exact(value.detach(), expected[name] + 1, name)
