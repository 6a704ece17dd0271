"""What each tensor of an optimizer's state is comes back, sharded, replicated or plain, on any mesh, in any tree."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import Full, Local, Sharded, load, load_optimizer_state_dict, optimizer_state_dict, save
from composable_fsdp.errors import CheckpointError
from tests.helpers.checkpoint_worlds import all_ranks_raise
from tests.helpers.run_ranks import on_ranks, run_ranks


class Everything(torch.optim.SGD):
    """Keeps tensors of every kind below every container. Square weights have preconditioners of their own shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            gradient: Any = parameter.grad
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            columns = (full if full.ndim > 1 else full[:, None]).square()
            state = self.state[parameter]
            state.setdefault("last", deque(maxlen=2)).append(gradient.clone())
            deep = state.setdefault("deep", {0: (gradient * 2, [torch.zeros(len(full), len(full))])})
            deep[0][1][0].add_(columns @ columns.T)
            rows: Any = gradient.square().sum(-1)
            if isinstance(rows, DTensor):
                state["everywhere"] = rows.redistribute(placements=[Replicate()] * rows.device_mesh.ndim)
                if not any(placement.is_partial() for placement in rows.placements):
                    state["rows"] = rows
            norm = float(columns.sum())
            state["norms"] = [*state.get("norms", []), norm]
            parameter.sub_(deep[0][0], alpha=0.01 / (1 + float(deep[0][1][0].mean())))


def built(ranks: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5, bias=False), nn.Linear(5, 1))
    world = dist.get_world_size()
    if ranks == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    elif ranks == "tensor parallel":
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, both["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        mesh = both["data"]
    else:
        mesh = init_device_mesh("cpu", (world,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def described(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: described(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple, deque)):
        return type(tree).__name__, getattr(tree, "maxlen", None), [described(value) for value in tree]
    if isinstance(tree, DTensor):
        return "DTensor", tree.full_tensor().tolist()
    return ("tensor", tree.tolist()) if isinstance(tree, torch.Tensor) else tree


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: described(optimizer.state[parameter]) for name, parameter in model.named_parameters()}


def placements_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    entries = [optimizer.state[parameter] for parameter in model.parameters()]
    tensors = [(e["deep"][0][0], *e["last"], *(e[k] for k in ("rows", "everywhere") if k in e)) for e in entries]
    return [[tensor.placements for tensor in of_parameter] for of_parameter in tensors]


def saves(folder: Path, ranks: str) -> None:
    model = built(ranks)
    optimizer = Everything(model.parameters(), lr=0.1)
    train(model, optimizer, 0, 1, 2)
    save(folder, model, optimizer)
    expected, placements = state_of(model, optimizer), placements_of(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")
    for form in (Sharded(), Full(), Full(rank0_only=True)):
        fresh = Everything(model.parameters(), lr=0.1)
        load_optimizer_state_dict(model, fresh, copy.deepcopy(optimizer_state_dict(model, optimizer, form)), form)
        assert state_of(model, fresh) == expected, form
        assert placements_of(model, fresh) == placements, form
    if ranks == "plain":
        with pytest.raises(CheckpointError, match=r"the state rows of 0\.weight is a DTensor in other placements than"):
            optimizer_state_dict(model, optimizer, Local())


def loads(folder: Path, ranks: str, *, stepped: bool = False) -> None:
    model = built(ranks, seed=1)
    fresh = Everything(model.parameters(), lr=0.1)
    if stepped:
        train(model, fresh, 5, 6)
    load(folder, model, fresh)
    assert state_of(model, fresh) == torch.load(folder / "expected.pt")
    train(model, fresh, 3)


@pytest.mark.behaviour("F-07", "F-09")
def test_every_kind_comes_back_on_other_ranks_and_meshes(tmp_path: Path) -> None:
    run_ranks(saves, 2, tmp_path, "plain")
    run_ranks(loads, 2, tmp_path, "plain")
    run_ranks(loads, 3, tmp_path, "plain", stepped=True)
    run_ranks(loads, 4, tmp_path, "hybrid")
    run_ranks(loads, 1, tmp_path, "plain")


@pytest.mark.behaviour("F-07", "F-09")
def test_every_kind_comes_back_on_meshes_of_two_dims(tmp_path: Path) -> None:
    run_ranks(saves, 4, tmp_path / "hybrid", "hybrid")
    run_ranks(loads, 4, tmp_path / "hybrid", "hybrid", stepped=True)
    run_ranks(saves, 4, tmp_path / "both", "tensor parallel")
    run_ranks(loads, 4, tmp_path / "both", "tensor parallel")


@on_ranks(2)
def test_what_one_rank_alone_would_save_is_refused(tmp_path: Path) -> None:
    model = built("plain")
    weight: Any = next(model.parameters())

    def refused(value: Any, text: str, model: nn.Module = model) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[next(model.parameters())] = {"a": [torch.zeros(1), {"b": value}]}
        for call in (lambda: save(tmp_path, model, optimizer), lambda: optimizer_state_dict(model, optimizer, Full())):
            with pytest.raises(CheckpointError) as raised:
                call()
            assert text in str(raised.value), str(raised.value)

    shard = weight.detach().clone()
    refused(SimpleNamespace(mean=[shard]), "is a SimpleNamespace that holds a DTensor, of which only this rank's shard")
    refused(frozenset([shard]), "is a frozenset that holds a DTensor")
    partial = DTensor.from_local(torch.ones(3), weight.device_mesh, [Partial()])
    refused(partial, "is a DTensor of partial sums, (Partial(sum),). Keep it reduced")
    refused(torch.full((3,), float(dist.get_rank())), "on rank 1 and a tensor with the checksum")
    refused(shard, " is a DTensor of no sharded parameter. Keep it in the state of", nn.Linear(1, 1, bias=False))


class Precise(torch.optim.SGD):
    """Keeps fp32 weights, a counter and a mask beside parameters of any dtype, and a mean of their dtype."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            if not state:
                state["weights"], state["mean"] = parameter.float(), torch.zeros_like(parameter)
                state["deep"] = ({"count": torch.tensor(2**40 + 1)}, torch.ones_like(parameter, dtype=torch.int8) * 3)
            state["weights"].sub_(parameter.grad.float(), alpha=0.0123)
            state["mean"].lerp_(parameter.grad, 0.1)
            parameter.copy_(state["weights"])


def in_bf16(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = fully_shard(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).bfloat16())
    return model, Precise(model.parameters())


def step_in_bf16(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def dtypes_of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    entry = optimizer.state[next(model.parameters())]
    tensors = (entry["weights"], entry["mean"], entry["deep"][0]["count"], entry["deep"][1])
    return [tensor.dtype for tensor in tensors]


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int8]


def precise(folder: Path, *, saves: bool) -> None:
    model, optimizer = in_bf16(seed=0)
    step_in_bf16(model, optimizer)
    if saves:
        save(folder, model, optimizer)
        full = copy.deepcopy(optimizer_state_dict(model, optimizer, Full()))
        expected = state_of(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(expected, folder / "expected.pt")
        step_in_bf16(model, optimizer)
        load_optimizer_state_dict(model, optimizer, full)  # into the optimizer's own tensors
        assert state_of(model, optimizer) == expected
        assert dtypes_of_state(model, optimizer) == DTYPES
        for form, broadcasts in ((Sharded(), False), (Local(), False), (Full(), False), (Full(rank0_only=True), True)):
            given = copy.deepcopy(optimizer_state_dict(model, optimizer, form))
            fresh, new = in_bf16(seed=0)
            load_optimizer_state_dict(fresh, new, given, form, broadcast_from_rank0=broadcasts)
            assert dtypes_of_state(fresh, new) == DTYPES
            assert state_of(fresh, new) == expected
        return
    for stepped in (False, True):
        fresh, new = in_bf16(seed=1)
        if stepped:
            step_in_bf16(fresh, new)
        load(folder, fresh, new)
        assert state_of(fresh, new) == torch.load(folder / "expected.pt")
        assert dtypes_of_state(fresh, new) == DTYPES
    wide, torchs = in_bf16(seed=1)[0].float(), torch.optim.AdamW
    narrow = in_bf16(seed=1)[0]
    own = torchs(narrow.parameters())
    narrow(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    own.step()
    new = torchs(wide.parameters())
    load_optimizer_state_dict(wide, new, optimizer_state_dict(narrow, own))
    dtypes = {key: value.dtype for state in new.state.values() for key, value in state.items()}
    assert set(dtypes.values()) == {torch.float32}, dtypes  # torch's classes have the parameter's


@pytest.mark.behaviour("F-07", "F-09")
def test_state_keeps_a_dtype_other_than_that_of_its_parameter(tmp_path: Path) -> None:
    run_ranks(precise, 2, tmp_path, saves=True)
    run_ranks(precise, 3, tmp_path, saves=False)


SETTINGS: dict[Any, Any] = {
    "milestones": {3: 0.5, 10: {"rate": 0.25}},
    "options": {},
    "stages": [{}, {"length": 2}, {True: OrderedDict(a=(1, {}))}],
    "a.b": 1.5,
    7: torch.arange(3),
}


def settings(folder: Path, *, saves: bool) -> None:
    model = built("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if saves:
        optimizer.param_groups[0].update(SETTINGS)
        save(folder, model, optimizer)
    else:
        load(folder, model, optimizer)
        assert {key: repr(optimizer.param_groups[0][key]) for key in SETTINGS} == {
            k: repr(v) for k, v in SETTINGS.items()
        }


@pytest.mark.behaviour("F-09")
def test_settings_of_every_type_and_key_come_back(tmp_path: Path) -> None:
    run_ranks(settings, 2, tmp_path, saves=True)
    run_ranks(settings, 3, tmp_path, saves=False)


@pytest.mark.behaviour("F-09")
@on_ranks(4)
def test_state_that_differs_between_ranks_is_refused_unless_a_shard_is_empty(tmp_path: Path) -> None:
    model, rank = built("hybrid"), dist.get_rank()
    weight, last = (model.get_parameter(name) for name in ("1.weight", "2.weight"))  # of 5 rows and of 1 row

    def optimizer() -> torch.optim.Optimizer:
        made = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, made, 0, 1)
        return made

    def refused(text: str, change: Any) -> None:
        changed = optimizer()
        change(changed)
        with all_ranks_raise(text):
            save(tmp_path / "no", model, changed)

    some = optimizer()
    expected = state_of(model, some)
    if rank < 2:
        some.state[weight] = {}  # all of it is on ranks 2 and 3 too
    if rank % 2:  # the row is on ranks 0 and 2
        some.state[last]["step"] = torch.tensor(0.0)
        some.state[last]["note"] = "no step here"
    save(tmp_path, model, some)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    load(tmp_path, model, fresh)
    assert state_of(model, fresh) == expected

    if rank == 3:
        refused(
            "the optimizer state of 1.weight on rank 3 is another than on ranks before it, but only one is",
            lambda changed: changed.state[weight].update(note=1),
        )
    else:
        refused("on rank 3 is another than on ranks before it", lambda changed: None)
    refused(
        r"state\.1\.weight\.norm is 1 on rank 2 and 0 on rank 0, but only one is saved",
        lambda changed: changed.state[weight].update(norm=torch.tensor(rank // 2)),
    )


@on_ranks(2)
def test_lists_and_dicts_of_torchs_checkpoints_load(tmp_path: Path) -> None:
    """torch records paths: containers that it does not record are those of the optimizer that loads, if it has any."""
    model = built("plain")
    optimizer = Everything(model.parameters(), lr=0.1)
    train(model, optimizer, 0, 1)
    entries = [optimizer.state[parameter] for parameter in model.parameters()]
    for entry in entries:
        entry["last"] = tuple(entry["last"])  # DCP looks into lists and dicts only, and pickles the rest
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "opaque")
    new = built("plain", seed=1)
    with pytest.raises(CheckpointError, match=r"optimizer\.state\..* cannot be read: .* has a .*DTensor, which is not"):
        load(tmp_path / "opaque", new, Everything(new.parameters(), lr=0.1), strict=False)
    for entry in entries:
        entry["last"], entry["deep"] = list(entry["last"]), {0: list(entry["deep"][0])}
    state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=tmp_path)
    expected = state_of(model, optimizer)
    stepped, fresh = (Everything(new.parameters(), lr=0.1) for _ in range(2))
    train(new, stepped, 5, 6)
    load(tmp_path, new, stepped)
    for name, found in state_of(new, stepped).items():
        assert found["last"] == ("deque", 2, expected[name]["last"][2])
        assert found["deep"] == {0: ("tuple", None, expected[name]["deep"][0][2])}
    load(tmp_path, new, fresh)
    for name, found in state_of(new, fresh).items():
        assert found["last"] == expected[name]["last"]
        assert found["deep"]["0"][2][0] == expected[name]["deep"][0][2][0]
