"""Checkpoints of several ranks, converted by one process and loaded by other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from composable_fsdp.checkpoint import latest
from tests._internals import Kind, convert
from tests.helpers.checkpoint_conversion import load_everything, load_model, load_tensors, save_everything
from tests.helpers.checkpoint_worlds import Everything, adamw, assert_holds, zeroed
from tests.helpers.run_ranks import run_ranks

pytest.importorskip("safetensors", reason="needs safetensors: pip install '.[checkpoint]'")

MAX_FILE_BYTES = 300
"""So small that there are several files."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_everything, 2, "2, on dim 1", folder)
    return folder


def through(saved: Path, folder: Path, *kinds: Kind) -> Path:
    """Convert ``saved`` to one kind after the other."""
    here = saved
    for i, kind in enumerate(kinds):
        there = folder / f"{i}-{kind.value}"
        convert(here, there, kind, max_file_bytes=MAX_FILE_BYTES)
        here = there
    return here


WITH_ALL = [(Kind.DCP,), (Kind.TORCH, Kind.DCP), (Kind.DCP, Kind.TORCH, Kind.TORCH, Kind.DCP, Kind.DCP)]
MODEL_ONLY = [(Kind.SAFETENSORS, Kind.DCP), (Kind.SAFETENSORS, Kind.TORCH, Kind.SAFETENSORS, Kind.DCP)]


@pytest.mark.behaviour("F-07", "F-09", "F-12")
@pytest.mark.parametrize("kinds", WITH_ALL, ids=lambda kinds: " ".join(kinds))
def test_a_conversion_loses_nothing_on_any_number_of_ranks(
    saved: Path, tmp_path: Path, kinds: tuple[Kind, ...]
) -> None:
    path = through(saved, tmp_path, *kinds)
    for ranks, world in ((2, "2, on dim 1"), (3, "3")):
        run_ranks(load_everything, ranks, world, path)


@pytest.mark.behaviour("F-11")
@pytest.mark.parametrize("kinds", MODEL_ONLY, ids=lambda kinds: " ".join(kinds))
def test_the_model_survives_safetensors(saved: Path, tmp_path: Path, kinds: tuple[Kind, ...]) -> None:
    run_ranks(load_model, 3, "3", through(saved, tmp_path, *kinds))


@pytest.mark.behaviour("F-11")
def test_safetensors_of_a_checkpoint_load_into_shards(saved: Path, tmp_path: Path) -> None:
    path = through(saved, tmp_path, Kind.SAFETENSORS)
    assert len(list(path.glob("model-*.safetensors"))) > 2
    run_ranks(load_tensors, 3, "3", path)


@pytest.mark.behaviour("F-04", "F-09")
def test_a_torch_file_of_a_checkpoint_loads_into_an_unsharded_model(saved: Path, tmp_path: Path) -> None:
    state = torch.load(through(saved, tmp_path, Kind.TORCH))
    model = zeroed(Everything())
    model.load_state_dict(state["model"])
    optimizer = adamw(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        if names[id(parameter)] in state["optimizer"]["state"]:
            optimizer.state[parameter] = state["optimizer"]["state"][names[id(parameter)]]
    assert_holds(model, optimizer)
    assert state["model"]["head.weight"] is not None
    assert state["model"]["head.weight"].data_ptr() == state["model"]["embedding.weight"].data_ptr()
    assert state["step"] == 20
    assert [state["ranks"][rank]["extra"]["rank"] for rank in ("0", "1")] == [0, 1]


def test_the_source_of_a_copy_is_unchanged(saved: Path, tmp_path: Path) -> None:
    newest = latest(saved)
    assert newest is not None
    before = {file.name: file.read_bytes() for file in newest.iterdir()}
    through(saved, tmp_path, Kind.DCP)
    assert {file.name: file.read_bytes() for file in newest.iterdir()} == before
