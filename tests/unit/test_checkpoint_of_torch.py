"""Why checkpoints do not use these functions of torch: if a test here fails, torch has changed, and ours can go. Each
part of ``composable_fsdp.checkpoint`` that does what a function of torch also does names its test."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import load_state_dict, optimizer_state_dict, save
from composable_fsdp.errors import CheckpointError
from tests.helpers.sharding import single_rank
from tests.helpers.single_rank_checkpoints import trained

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install '.[checkpoint]'")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def group() -> Iterator[None]:
    with single_rank():
        yield


def consolidate(folder: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    writer = dcp.HuggingFaceStorageWriter(
        str(folder), dict.fromkeys(state, 1), save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer)
    (file,) = folder.glob("*.safetensors")
    return safetensors.load_file(file)


@pytest.mark.usefixtures("group")
def test_the_hugging_face_writer_loses_scalars_and_refuses_integers(tmp_path: Path) -> None:
    """It also writes all bytes twice: first a file of each rank, of which the consolidation makes others."""
    weight = torch.arange(6.0).view(2, 3)
    found = consolidate(tmp_path / "scalar", {"weight": weight, "scale": torch.tensor(3.0)})
    assert torch.equal(found["weight"], weight)
    assert found["scale"] == 0
    assert len(list((tmp_path / "scalar" / "sharded").iterdir())) == 1
    with pytest.raises(dcp.CheckpointException):
        consolidate(tmp_path / "integer", {"weight": weight, "steps": torch.tensor([3])})


def test_the_hugging_face_reader_ignores_the_index(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 1.0)):
        safetensors.save_file({"x": torch.tensor([value])}, tmp_path / f"{name}.safetensors")
    for wanted, value in (("a", 0.0), ("b", 1.0)):
        index = {"metadata": {}, "weight_map": {"x": f"{wanted}.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        state = {"x": torch.tensor([7.0])}
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
        if state["x"].item() != value:
            return
    pytest.fail("the index counts")


class Ran(Exception):
    """Raised by code in a pickle."""


class Payload:
    def __reduce__(self) -> Any:
        return _run, ()


def _run() -> None:
    raise Ran


def test_torchs_reader_and_converter_run_code_in_the_metadata(tmp_path: Path) -> None:
    dcp.save({"model": trained()[0].state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(Ran):
        dcp.FileSystemReader(tmp_path / "saved").read_metadata()
    with pytest.raises((Ran, dcp.CheckpointException)):
        dcp_to_torch_save(tmp_path / "saved", tmp_path / "one.pt")


def test_torchs_converter_reads_our_checkpoints_and_unties_weights(tmp_path: Path) -> None:
    saved = save(tmp_path / "run", *trained())
    dcp_to_torch_save(saved, tmp_path / "one.pt")
    file = torch.load(tmp_path / "one.pt")
    assert file["optimizer"]["state"]["second.bias"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    model = file["model"]
    assert torch.equal(model["first.weight"], model["second.weight"])
    assert model["first.weight"].data_ptr() != model["second.weight"].data_ptr()


@pytest.mark.usefixtures("group")
def test_torchs_optimizer_state_steps_an_optimizer_without_state() -> None:
    """A fresh optimizer makes a step, so that it has state: with hooks, counters and, if it needs one, a closure."""
    model = fully_shard(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(None))
    assert optimizer_state_dict(model, optimizer)["state"] == {}
    assert not steps
    get_optimizer_state_dict(model, optimizer)
    assert len(steps) == 1
    with pytest.raises(TypeError, match="is not callable"):  # no closure
        get_optimizer_state_dict(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.usefixtures("group")
def test_dcps_load_raises_at_the_first_difference() -> None:
    wanted = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(4)}
    assert dist.is_initialized()
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(wanted, dcp.Metadata({}), is_coordinator=True)
    with pytest.raises(RuntimeError) as raised:
        planner.create_local_plan()
    assert "a" in str(raised.value)
    assert "key: c" not in str(raised.value)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_full", [True, False])
def test_torchs_state_dict_is_loaded_in_part_before_it_raises(is_full: bool) -> None:
    model: Any = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    options = StateDictOptions(full_state_dict=is_full)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    wrong: dict[str, Any] = {name: torch.zeros_like(value) for name, value in state.items()}
    wrong["1.bias"] = get_model_state_dict(fully_shard(nn.Linear(3, 3)), options=options)["bias"]
    with pytest.raises((RuntimeError, AssertionError)):
        set_model_state_dict(model, wrong, options=options)
    loaded = model[0].weight.full_tensor()
    assert not loaded.any()
    other = {**wrong, "0.weight": torch.ones_like(wrong["0.weight"])}
    text = r"Nothing was loaded\.\n  of another shape \(1\):\n    1\.bias: \(3,\), expected \(2,\)"
    with pytest.raises(CheckpointError, match=text):
        load_state_dict(model, other)
    assert torch.equal(model[0].weight.full_tensor(), loaded)
