"""Checkpoints of an earlier version in ``tests/data/checkpoints``: how they were written, and how they are read.

Commit 75f2667 wrote ``format-1.tar.xz``: ``python -c "from tests.helpers import stored_checkpoints as s; s.write()"``.
Never write it again: later versions must read these files. A later format gets an archive of its own beside it.
"""

from __future__ import annotations

import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from composable_fsdp import CommunicationPolicy, CommunicationState, ErrorFeedback, Int8, fully_shard
from composable_fsdp.checkpoint import (
    Full,
    Local,
    load,
    load_optimizer_state_dict,
    load_safetensors,
    load_state_dict,
    optimizer_state_dict,
    save,
    save_safetensors,
    state_dict,
)
from tests.helpers.checkpoint_worlds import WORLDS, Everything, adamw, assert_holds, expected_value, fill, local, zeroed
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tensor_classes import inner_of, model_of

__all__ = ["STORED", "extract", "read", "read_on_the_writers_ranks", "write"]

ARCHIVE = Path(__file__).parents[1] / "data" / "checkpoints" / "format-1.tar.xz"

STORED = {name: WORLDS[name] for name in ("2, on dim 1", "3", "2x2 hybrid", "3x2 tensor-parallel")}
"""The worlds that saved a checkpoint of their own: sharded, uneven, hybrid and tensor parallel."""

SUBCLASSES = ["tagged", "pair", "coded"]
FEEDBACK = CommunicationPolicy(reduce_scatter=ErrorFeedback(Int8()), min_numel=1)


def filled(model: Everything) -> tuple[Everything, torch.optim.Optimizer]:
    optimizer = adamw(model)
    fill(model, optimizer)
    return model, optimizer


def classes(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of tensor subclasses, and an optimizer whose state has them too."""
    model = model_of(SUBCLASSES, seed)
    if dist.is_initialized():
        for module in model.children():
            fully_shard(module)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(wanted, lr=0.1, momentum=0.9)
    for parameter in wanted:
        optimizer.state[parameter]["momentum_buffer"] = parameter.detach().clone()
    return model, optimizer


def with_feedback() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), comm_policy=FEEDBACK)


# -- write


def write_world(name: str, folder: Path) -> None:
    model, optimizer = filled(STORED[name][1]())
    averages = averages_of(model)
    averages.update_parameters(model)
    save(folder / name, model, optimizer, {"rank": dist.get_rank()}, step=7, averages=averages)


def write_forms(folder: Path) -> None:
    model, optimizer = filled(WORLDS["2, on dim 1"][1]())
    for name, form in (("full", Full()), ("local", Local())):
        state = {"model": state_dict(model, form), "optimizer": optimizer_state_dict(model, optimizer, form)}
        if isinstance(form, Local) or dist.get_rank() == 0:
            torch.save(state, folder / f"{name}-{dist.get_rank()}.pt")
    with warnings.catch_warnings(action="ignore"):  # extra state is left out
        save_safetensors(model, folder / "safetensors")
        save_safetensors(model, folder / "safetensors in parts", max_file_bytes=200)
    save(folder / "classes", *classes(1), step=7)


def write_feedback(folder: Path) -> None:
    model = with_feedback()
    state = CommunicationState(model).state_dict()
    for name, kept in state.items():
        local(kept["residual"]).copy_(expected_value(f"{name} {dist.get_rank()}", local(kept["residual"])))
        kept["rounds"] = 3
    CommunicationState(model).load_state_dict(state)
    save(folder / "error feedback", model, step=7)


def write() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_to(Path(folder))
        ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(folder, ".")


def write_to(folder: Path) -> None:
    save(folder / "unsharded", *filled(Everything()), {"rank": 0}, step=7)
    for name, (ranks, _) in STORED.items():
        run_ranks(write_world, ranks, name, folder)
    run_ranks(write_forms, 2, folder)
    run_ranks(write_feedback, 2, folder)


# -- read


def extract(folder: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")


def blank() -> tuple[Everything, torch.optim.Optimizer]:
    """Return a model without the stored values: on two ranks if there is a process group of two, else unsharded."""
    model = zeroed(WORLDS["2, on dim 1"][1]() if dist.is_initialized() else Everything())
    return model, adamw(model)


def read(folder: Path) -> None:
    """Read what any number of ranks can read, on two ranks or without process groups."""
    for name in ("unsharded", *STORED):
        model, optimizer = blank()
        averages = None if name == "unsharded" else averages_of(model)
        assert load(folder / name, model, optimizer, averages=averages)["rank"] in (0, 1)
        assert_holds(model, optimizer)
        if averages is not None:
            assert int(averages.n_averaged) == 1
            holds_averages(model, averages.module)
    model, optimizer = blank()
    stored: dict[str, Any] = torch.load(folder / "full-0.pt", weights_only=True)
    load_state_dict(model, stored["model"])
    load_optimizer_state_dict(model, optimizer, stored["optimizer"])
    assert_holds(model, optimizer)
    for name in ("safetensors", "safetensors in parts"):
        model, _ = blank()
        model.counter.calls = 42  # extra state is not in safetensors
        load_safetensors(model, folder / name)
        assert_holds(model)
    subclasses, momenta = classes(2)
    load(folder / "classes", subclasses, momenta)
    holds_classes(subclasses, momenta)


def averages_of(model: Everything) -> AveragedModel:
    """Return averages in float32, as the stored ones are."""
    averages = AveragedModel(model)
    averages.module.float()
    return averages


def holds_averages(model: Everything, averages: nn.Module) -> None:
    averaged = dict((*averages.named_parameters(), *averages.named_buffers()))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        wanted = local(tensor).float() if tensor.is_floating_point() else tensor
        assert torch.equal(local(averaged[name]), wanted), name


def holds_classes(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for (name, found), full in zip(model.named_parameters(), model_of(SUBCLASSES, 1).parameters(), strict=True):
        for tensor in (found, *optimizer.state.get(found, {}).values()):
            for inner, value in inner_of(tensor).items():
                wanted = inner_of(full)[inner]
                assert torch.equal(value, wanted if inner == "columns" else wanted.chunk(ranks)[rank]), (name, inner)


def read_on_the_writers_ranks(folder: Path) -> None:
    """Read what only the two ranks that wrote it can read."""
    model, optimizer = blank()
    stored: dict[str, Any] = torch.load(folder / f"local-{dist.get_rank()}.pt", weights_only=True)
    load_state_dict(model, stored["model"], Local())
    load_optimizer_state_dict(model, optimizer, stored["optimizer"], Local())
    assert_holds(model, optimizer)
    compressed = with_feedback()
    load(folder / "error feedback", compressed)
    state = CommunicationState(compressed).state_dict()
    assert state
    for name, kept in state.items():
        residual = local(kept["residual"])
        assert torch.equal(residual, expected_value(f"{name} {dist.get_rank()}", residual)), name
        assert kept["rounds"] == 3
