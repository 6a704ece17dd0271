"""Conversion in one process: between formats, refused conversions, and complete targets."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim.swa_utils import AveragedModel

from composable_fsdp.checkpoint import load, optimizer_state_dict, save
from composable_fsdp.errors import CheckpointError, ConfigurationError
from tests._internals import Kind, convert, open_source
from tests.helpers.fresh_process import run_program
from tests.helpers.single_rank_checkpoints import Tied, assert_same, flip, state_of, trained

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install '.[checkpoint]'")


def loaded(path: Path) -> dict[str, torch.Tensor]:
    model = Tied()
    load(path, model)
    return state_of(model)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- formats


def test_a_torch_file_becomes_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained()
    file = {"model": model.state_dict(), "optimizer": optimizer_state_dict(model, optimizer), "epoch": 5, "step": 3}
    torch.save(file, tmp_path / "all.pt")
    assert convert(tmp_path / "all.pt", tmp_path / "new", Kind.DCP) == ["epoch"]
    fresh = Tied()
    again = torch.optim.AdamW(fresh.parameters())
    assert load(tmp_path / "new", fresh, again) == {}
    assert_same(state_of(fresh), state_of(model))
    for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
        assert_same(again.state[new], optimizer.state[old])
    manifest = open_source(tmp_path / "new").manifest
    assert manifest is not None
    assert (manifest.step, manifest.ranks) == (3, 1)


@pytest.mark.parametrize("to", [Kind.DCP, Kind.SAFETENSORS])
def test_tensors_without_elements_are_converted(tmp_path: Path, to: Kind) -> None:
    state = {"none": torch.zeros(4, 0), "some": torch.ones(3)}
    torch.save(state, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "new", to)
    convert(tmp_path / "new", tmp_path / "back.pt", Kind.TORCH, model_only=True)
    assert_same(torch.load(tmp_path / "back.pt"), state)


def test_averages_round_trip_through_a_torch_file(tmp_path: Path) -> None:
    model, _ = trained()
    averages = AveragedModel(model)
    averages.update_parameters(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    averages.update_parameters(model)
    path = save(tmp_path / "run", model, averages=averages).path
    convert(path, tmp_path / "all.pt", Kind.TORCH)
    file = torch.load(tmp_path / "all.pt", weights_only=True)
    assert file["averages"]["steps"] == 2
    assert_same(file["averages"]["values"], averages.module.state_dict())
    convert(tmp_path / "all.pt", tmp_path / "new", Kind.DCP)
    fresh = AveragedModel(model)
    load(tmp_path / "new", model, averages=fresh)
    assert int(fresh.n_averaged) == 2
    assert_same(fresh.module.state_dict(), averages.module.state_dict())


def test_a_plain_state_dict_becomes_a_checkpoint_and_comes_back(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "new", Kind.DCP)
    assert_same(loaded(tmp_path / "new"), state_of(model))
    convert(tmp_path / "new", tmp_path / "again.pt", Kind.TORCH, model_only=True)
    again = torch.load(tmp_path / "again.pt")
    assert_same(again, state_of(model))
    assert again["second.weight"] is not again["second.bias"]
    assert again["second.weight"].data_ptr() == again["first.weight"].data_ptr()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("nested", [True, False])
def test_a_checkpoint_of_dcp_itself(tmp_path: Path, nested: bool) -> None:
    model, optimizer = trained()
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(parts if nested else model.state_dict(), checkpoint_id=tmp_path / "plain", no_dist=True)
    convert(tmp_path / "plain", tmp_path / "new", Kind.DCP)
    assert_same(loaded(tmp_path / "new"), state_of(model))
    convert(tmp_path / "plain", tmp_path / "st", Kind.SAFETENSORS)
    assert_same(safetensors.load_file(tmp_path / "st" / "model.safetensors"), state_of(model))


def test_dtypes_change_for_the_model_only(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path / "run", model, optimizer)
    convert(tmp_path / "run", tmp_path / "half.pt", Kind.TORCH, dtype=torch.bfloat16)
    state = torch.load(tmp_path / "half.pt")
    assert_same(state["model"], {name: value.bfloat16() for name, value in state_of(model).items()})
    assert state["optimizer"]["state"]["second.bias"]["exp_avg"].dtype == torch.float32
    for to in (Kind.DCP, Kind.SAFETENSORS):
        convert(tmp_path / "half.pt", tmp_path / to.value, to, dtype=torch.float32)
        specs = open_source(tmp_path / to.value).tensors
        assert {spec.dtype for path, spec in specs.items() if path[0] == "model"} == {torch.float32}


def test_data_not_supported_by_safetensors_are_named(tmp_path: Path) -> None:
    save(tmp_path / "run", *trained(), {"step": 1})
    assert convert(tmp_path / "run", tmp_path / "st", Kind.SAFETENSORS) == [
        "extra and random number generators",
        "optimizer",
    ]


# -- refused conversions


@pytest.mark.parametrize(("name", "kind"), [("file.pt", Kind.TORCH), ("st", Kind.SAFETENSORS)])
def test_an_existing_target_is_replaced_only_with_force(tmp_path: Path, name: str, kind: Kind) -> None:
    old, new = Tied(), trained()
    save(tmp_path / "old", old, step=0)
    save(tmp_path / "new", *new, step=0)
    convert(tmp_path / "old", tmp_path / name, kind, model_only=True)
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path / "new", tmp_path / name, kind)
    assert str(raised.value) == f"{tmp_path / name} exists already. Pass --force to replace it."
    convert(tmp_path / "new", tmp_path / name, kind, force=True)
    convert(tmp_path / name, tmp_path / "check", Kind.DCP)
    assert_same(loaded(tmp_path / "check"), state_of(new[0]))
    assert names_in(tmp_path) == sorted(["check", name, "new", "old"])


def test_invalid_conversion_targets_are_refused(tmp_path: Path) -> None:
    saved = save(tmp_path / "run", *trained())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work.txt").write_text("dear")
    (tmp_path / "file").write_text("dear")
    cases: list[tuple[Path, Kind, type[Exception], str]] = [
        (tmp_path / "mine", Kind.DCP, CheckpointError, "exists already, and --force replaces no directory. Delete it"),
        (tmp_path / "mine", Kind.TORCH, ConfigurationError, "is a directory. Name a file."),
        (tmp_path / "a.safetensors", Kind.SAFETENSORS, ConfigurationError, "must be a directory"),
        (tmp_path / "file", Kind.SAFETENSORS, ConfigurationError, "must be a directory"),
        (saved.path, Kind.DCP, CheckpointError, "exists already, and --force replaces no directory. Delete it first."),
        (tmp_path / "x", Kind.FOLDER, ConfigurationError, "can be converted to dcp, torch, safetensors, not to folder"),
    ]
    convert(saved, tmp_path / "model.pt", Kind.TORCH)
    with pytest.raises(ConfigurationError, match=r"is the source of the conversion\. Name another target\."):
        convert(tmp_path / "model.pt", tmp_path / "model.pt", Kind.TORCH, force=True)
    for target, to, kind, message in cases:
        with pytest.raises(kind) as raised:
            convert(tmp_path / "run", target, to, force=True)
        assert message in str(raised.value)
    assert names_in(tmp_path / "mine") == ["work.txt"]
    assert names_in(tmp_path) == ["file", "mine", "model.pt", "run"]
    with pytest.raises(ConfigurationError, match=r"dtype must be a floating-point one, not torch\.int8"):
        convert(tmp_path / "run", tmp_path / "x", Kind.DCP, dtype=torch.int8)
    with pytest.raises(ConfigurationError, match="max_file_bytes must be at least 1, not 0"):
        convert(tmp_path / "run", tmp_path / "x", Kind.DCP, max_file_bytes=0)


def test_invalid_conversion_sources_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "by_number.pt")
    torch.save(model, tmp_path / "module.pt")
    torch.save([1], tmp_path / "list.pt")
    torch.save({"a": torch.ones(1), 2: torch.ones(1)}, tmp_path / "numbers.pt")
    torch.save({"state_dict": model.state_dict()}, tmp_path / "no_model.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    cases = {
        "by_number.pt": "the optimizer's state is by number, and only the model says which parameters these are.",
        "module.pt": "has objects of classes that torch.load(weights_only=True) does not admit: ",
        "list.pt": "list.pt has a list instead of a state dict.",
        "numbers.pt": "numbers.pt has no state dict, but a mapping with the key 2, which is no name.",
        "no_model.pt": "no_model.pt has no model: neither a state dict under the key 'model' nor tensors at the ",
        "text.pt": "text.pt is damaged, ",
        "nothing": "nothing is not a checkpoint, and it does not exist.",
    }
    for name, message in cases.items():
        with pytest.raises(CheckpointError) as raised:
            convert(tmp_path / name, tmp_path / "new", Kind.DCP)
        assert message in str(raised.value)
        assert not (tmp_path / "new").exists()


@pytest.mark.behaviour("F-12")
@pytest.mark.parametrize("to", [Kind.DCP, Kind.TORCH, Kind.SAFETENSORS])
def test_a_failed_conversion_leaves_the_target_unchanged(
    tmp_path: Path, to: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    saved = save(tmp_path / "run", model, optimizer)
    target = tmp_path / "target"
    if to is not Kind.DCP:
        convert(saved, target, to)

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writers: dict[Kind, tuple[Any, str]] = {
        Kind.DCP: (dcp.FileSystemWriter, "write_data"),
        Kind.TORCH: (torch, "save"),
        Kind.SAFETENSORS: (os, "pwrite"),
    }
    monkeypatch.setattr(*writers[to], full)
    with pytest.raises(OSError, match="No space left on device"):
        convert(saved, target, to, model_only=True, force=True)
    monkeypatch.undo()
    if to is Kind.DCP:
        assert names_in(tmp_path) == ["run"]
        return
    assert names_in(tmp_path) == ["run", "target"]
    convert(target, tmp_path / "check", Kind.DCP)
    assert_same(loaded(tmp_path / "check"), state_of(model))


@pytest.mark.behaviour("F-12")
def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    saved = save(tmp_path / "run", *trained())
    data = saved.path / "__0_0.distcp"
    flip(data)
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path / "run", tmp_path / "new", Kind.DCP)
    assert str(raised.value).startswith(f"{data} is damaged: its CRC-32 is ")
    assert not (tmp_path / "new").exists()


@pytest.mark.multiprocess
@pytest.mark.behaviour("F-12")
@pytest.mark.parametrize("to", [Kind.DCP, Kind.TORCH, Kind.SAFETENSORS])
def test_a_killed_conversion_leaves_the_target_and_the_next_one_cleans_up(tmp_path: Path, to: Kind) -> None:
    model, optimizer = trained()
    saved = save(tmp_path / "run", model, optimizer)
    target = tmp_path / "target"
    if to is not Kind.DCP:
        convert(saved, target, to)
    script = (
        "import os, signal\n"
        "from tests._internals import Kind, Replacement, convert\n"
        "def killed(*args, **options):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.replace = Replacement.commit = os.rename = killed\n"
        "from pathlib import Path\n"
        "Path.rename = killed\n"
        f"convert({str(saved.path)!r}, {str(target)!r}, Kind({to.value!r}), force=True)"
    )
    assert run_program(script).returncode == -signal.SIGKILL
    left = {name for folder in (tmp_path, target) if folder.is_dir() for name in names_in(folder)}
    assert any(".incomplete" in name for name in left)
    if to is not Kind.DCP:
        convert(target, tmp_path / "check", Kind.DCP)
        assert_same(loaded(tmp_path / "check"), state_of(model))
    convert(saved, target, to, force=True)
    left = {name for folder in (tmp_path, target) if folder.is_dir() for name in names_in(folder)}
    assert not any(".incomplete" in name for name in left)
