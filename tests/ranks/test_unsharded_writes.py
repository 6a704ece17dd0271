"""Writes to parameters between passes while they are unsharded: kept in the shards, or refused by name."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from composable_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from composable_fsdp.codecs import CommunicationPolicy, Int8
from composable_fsdp.errors import LifecycleError, ParameterError
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import sharded as sharded_module
from tests.helpers.sharding import values_of
from tests.helpers.transports import IN_COMMON, SOCKETS, TRANSPORTS, Environment


def sharded(mesh: DeviceMesh | None = None, **settings: Any) -> tuple[Any, nn.Sequential]:
    """Return a model of two groups, of uneven rows, and the same unsharded. A dim "tensor" of ``mesh`` splits it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    reference = copy.deepcopy(model)
    if mesh is not None and "tensor" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = mesh["data"]
    fully_shard(model[0], mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings), reference


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def check(model: nn.Module, reference: nn.Module, case: str = "") -> None:
    expected = {name: p.detach() for name, p in reference.named_parameters(remove_duplicate=False)}
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, expected[name], msg=f"{name}: {case}")
    torch.testing.assert_close(model(batch()), reference(batch()))


def average(model: nn.Module) -> None:
    for k, parameter in enumerate(model.parameters()):
        parameter.lerp_(torch.ones_like(parameter), 0.1 * (k + 1))


def clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.05, 0.1)


def one_row(model: Any) -> None:
    weight = model[0].weight  # a row of rank 0, on whose shard alone the change is seen
    row = torch.arange(len(weight)).eq(0).float().outer(torch.ones(5))
    is_split = isinstance(weight, DTensor)
    weight.sub_(distribute_tensor(row, weight.device_mesh, weight.placements) if is_split else row)


def swap(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(torch.full_like(parameter, 0.25))


def by_local_tensor(model: nn.Module) -> None:
    for parameter in model.parameters():
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).mul_(0.5)


def decay(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)  # torch does not count it


WRITES: dict[str, Callable[[Any], None]] = {
    "average": average,
    "clip": clip,
    "one row": one_row,
    "swap": swap,
    "local": by_local_tensor,
}


def evaluate(model: Any, reference: nn.Module) -> None:
    torch.testing.assert_close(model(batch(1)), reference(batch(1)))


@torch.enable_grad()
def train(model: Any, reference: nn.Module) -> None:
    for each in (model, reference):
        each(batch(2)).square().sum().backward()
    model.zero_grad()


def set_hook(model: Any, reference: nn.Module) -> None:
    for module in (model, model[0]):
        module.set_reduce_scatter_unused_params(False)


def reset(model: Any, reference: nn.Module) -> None:
    model.reset_iter_state()


NEXT_USES = [None, evaluate, train, set_hook, reset]
KEPT = ["forward", "unshard", "unshard the inner one first", "backward"]
SETTINGS: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "plain": ((2,), ("data",), {}),
    "hybrid": ((2, 2), ("replicas", "data"), {}),
    "tensor parallel": ((2, 2), ("data", "tensor"), {}),
    "offload": ((2,), ("data",), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "one rank": ((1,), ("data",), {}),
}


def keep_unsharded(model: Any, way: str) -> None:
    if way.startswith("unshard"):
        for module in (model, model[0])[:: -1 if "first" in way else 1]:
            module.unshard()
    elif way == "forward":
        model(batch())
    else:
        model.set_reshard_after_backward(False)
        with torch.enable_grad():
            model(batch()).sum().backward()
        model.zero_grad()


@torch.no_grad()
def write(setting: str) -> None:
    shape, names, settings = SETTINGS[setting]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    ways = itertools.cycle(KEPT)
    for (name, change), next_use in itertools.product(WRITES.items(), NEXT_USES):
        way = next(ways)  # five of each of the others, so that all pairs come
        model, reference = sharded(mesh, reshard_after_forward=False, **settings)
        keep_unsharded(model, way)
        for each in (model, reference):
            change(each)
        if next_use is not None:
            next_use(model, reference)
        model.reshard()
        model[0].reshard()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        check(model, reference, f"{name}, {way}, {next_use}")


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize("environment", [IN_COMMON, SOCKETS], ids=["in common", "sockets"])
def test_writes_between_passes_are_kept(environment: Environment) -> None:
    run_ranks(write, 2, "plain", environment=environment)


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "plain"])
def test_writes_between_passes_are_kept_on_other_meshes_and_offloaded(setting: str) -> None:
    run_ranks(write, prod(SETTINGS[setting][0]), setting)


@pytest.mark.behaviour("C-08")
@on_ranks(2)
@torch.no_grad()
def test_writes_before_a_module_gets_another_root_are_kept() -> None:
    """The root of a module that ran by itself is given up when its parent runs, which also finds tied weights."""
    for ties in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        reference = copy.deepcopy(model)
        for module in model:
            fully_shard(module, reshard_after_forward=False)
        fully_shard(model)
        for module in model:
            module(batch())  # with a root of its own
        for each in (model, reference):
            average(each)
        if ties:
            sharded_module(model[0]).reshard()
            for each in (model, reference):
                each[1].weight = each[0].weight
        check(model, reference, f"ties: {ties}")
        sharded_module(model).reshard()
        check(model, reference, f"ties: {ties}")


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize("environment", [IN_COMMON, SOCKETS])
@on_ranks(4, environment="environment")
def test_writes_after_a_forward_that_keeps_slices_are_kept() -> None:
    """A forward that leads to a backward leaves slices of parameters, and shows the sharded ones."""
    for next_use, counts in itertools.product((evaluate, train, reset), (True, False)):
        model, reference = sharded(init_device_mesh("cpu", (4,)), reshard_after_forward=2)
        model(batch()).sum().item()
        assert all(isinstance(parameter, DTensor) for parameter in model[0].parameters())
        with torch.no_grad():
            for each in (model, reference):
                average(each) if counts else decay(each)
            next_use(model, reference)
            check(model, reference)


@pytest.mark.behaviour("C-08", "H-02")
@on_ranks(2, transports=TRANSPORTS)
def test_writes_through_data_change_no_other_rank_and_are_named() -> None:
    """Neither torch nor an optimizer hook sees the write. The forward has gradients, and no backward."""
    model, _ = sharded()
    before = values_of(model)
    model(batch()).sum().item()
    for parameter in (model[2].weight, model[2].bias):
        assert not isinstance(parameter, DTensor)
        parameter.data.add_(0.5)
    dist.barrier()
    with pytest.raises(
        ParameterError, match=r"\['2.weight', '2.bias'\] of 'root' were changed.*\.data.*after module.resh"
    ):
        model.reshard()
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    model(batch()).sum().backward()


def assign(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter * 0.5


def set_storage(model: Any) -> None:
    model[0].bias.set_(torch.zeros_like(model[0].bias))


def from_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())


def swap_objects(model: Any) -> None:
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(model[0].weight * 0.5))


REPLACEMENTS: list[Callable[[Any], None]] = [assign, set_storage, from_vector, swap_objects]


@torch.no_grad()
def replace_tensors(setting: str, replacements: list[Callable[[Any], None]]) -> None:
    """Give unsharded parameters other tensors. After the error they have their values, and get gradients, as before."""
    shape, names, settings = SETTINGS[setting]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for replace, use, way in itertools.product(replacements, (None, evaluate, reset), ("unshard", "forward")):
        model, reference = sharded(mesh, reshard_after_forward=False, **settings)
        keep_unsharded(model, way)
        replace(model)
        with pytest.raises(ParameterError, match=r"'weight|bias' was given another tensor, as p\.data = "):
            (model[0].reshard if use is None else functools.partial(use, model, reference))()
        with suppress(ParameterError):  # of the other group
            model.reset_iter_state()
        check(model, reference, f"{replace.__name__}, {use}, {way}")
        with torch.enable_grad():
            for each in (model, reference):
                each(batch(3)).square().sum().backward()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.behaviour("H-02")
def test_replaced_tensors_of_unsharded_parameters_are_refused() -> None:
    run_ranks(replace_tensors, 2, "plain", REPLACEMENTS)


@pytest.mark.behaviour("H-02")
def test_replaced_tensors_are_refused_with_tensor_parallelism() -> None:
    run_ranks(replace_tensors, 4, "tensor parallel", [assign, swap_objects])


@pytest.mark.behaviour("H-02")
@on_ranks(2, transports=TRANSPORTS)
def test_writes_that_cannot_be_kept_are_refused() -> None:
    model, _ = sharded(reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with torch.no_grad():
        model(batch())
        model[0].weight.mul_(0.5)
        with pytest.raises(
            ParameterError, match=r"\['weight'\] of '0'.*unsharded in torch.bfloat16, and its shard is in"
        ):
            model[0].reshard()
        model[2].bias.add_(1)
        with pytest.raises(ParameterError, match=r"\['2.bias'\] of 'root'.*It was dropped. Change the sharded"):
            model(batch())

    for use in ("forward", "unshard"):
        model, _ = sharded(reshard_after_forward=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch()).sum().backward()
        with torch.no_grad():
            model[0].unshard()
            model[0].weight.mul_(0.5)
        optimizer.step()
        with pytest.raises(ParameterError, match=r"'weight' has a shard that has changed since"):
            model(batch()) if use == "forward" else model[0].unshard()

    model, _ = sharded(reshard_after_forward=False)
    before = values_of(model)
    with torch.no_grad():
        model(batch())
        if dist.get_rank() == 0:
            model[0].weight.data[0] += 1
    with pytest.raises(ParameterError, match=r"'weight'.*such as \.data") if dist.get_rank() == 0 else nullcontext():
        model.reset_iter_state()  # the others reset too, and none waits
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    model(batch()).sum().backward()

    model, _ = sharded()
    loss = model(batch()).sum()
    with torch.no_grad():
        model[2].bias.mul_(3)
    with pytest.raises(LifecycleError, match=r"changed in place between forward and backward: \['2.bias'\]"):
        loss.backward()
    model.reset_iter_state()

    model, _ = sharded(reshard_after_forward=False, comm_policy=CommunicationPolicy(all_gather=Int8(), min_numel=1))
    with torch.no_grad():
        model(batch())
        model(batch())
        model[0].weight.mul_(0.5)
        with pytest.raises(ParameterError, match=r"'weight' is gathered in another form"):
            model[0].reshard()


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, max_norm=0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(ids)
        return out.square().sum()


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize("transport", ["copies", "sockets"])
@on_ranks(2, environment="transport")
def test_writes_of_modules_in_their_forward_are_no_error_without_shared_shards() -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(Renormed())
    before = values_of(model)
    for _ in range(2):
        model(torch.tensor([0, 5])).backward()
        model(torch.tensor([1, 5])).item()
        model.reshard()
        with torch.no_grad():
            model(torch.tensor([2]))
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.behaviour("C-08")
@on_ranks(2, transports=TRANSPORTS)
def test_changed_shards_are_not_overwritten_by_kept_parameters() -> None:
    """What an optimizer or a hand-written step does to the shards counts, though full parameters are kept."""
    for by_hand in (False, True):
        model, reference = sharded()
        listed = list(model.parameters())
        for m in (model, reference):
            m(batch()).square().sum().backward()
        model(batch()).sum().item()  # keeps the group of the root
        for parameters in (listed, list(reference.parameters())):
            if by_hand:
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
            else:
                torch.optim.SGD(parameters, lr=0.1, foreach=True).step()
        model.reshard()
        check(model, reference)
