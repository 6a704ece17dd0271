"""``composable-fsdp checkpoint``: output and exit codes, and conversion to safetensors in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from composable_fsdp.checkpoint import load_safetensors, save
from composable_fsdp.errors import CheckpointError, ConfigurationError
from tests._internals import convert
from tests.helpers.checkpoint_worlds import WORLDS, adamw, assert_holds, fill, zeroed
from tests.helpers.command import Done, run_command
from tests.helpers.run_ranks import run_ranks
from tests.helpers.single_rank_checkpoints import Tied, assert_same, flip, state_of, trained

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install '.[checkpoint]'")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("nested", [True, False])
def test_a_checkpoint_of_dcp_itself(tmp_path: Path, nested: bool) -> None:
    model, optimizer = trained()
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(parts if nested else model.state_dict(), checkpoint_id=tmp_path / "plain", no_dist=True)
    convert(tmp_path / "plain", tmp_path / "st")
    assert_same(safetensors.load_file(tmp_path / "st" / "model.safetensors"), state_of(model))


def save_shards(path: Path) -> None:
    model = WORLDS["2, on dim 1"][1]()
    optimizer = adamw(model)
    fill(model, optimizer)
    save(path, model, optimizer)


def load_shards(path: Path) -> None:
    model = zeroed(WORLDS["3"][1]())
    load_safetensors(model, path)
    model.counter.calls = 42  # extra state is not in safetensors
    assert_holds(model)


@pytest.mark.multiprocess
@pytest.mark.behaviour("F-11")
def test_safetensors_of_a_checkpoint_load_into_shards(tmp_path: Path) -> None:
    run_ranks(save_shards, 2, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "st")
    run_ranks(load_shards, 3, tmp_path / "st")


def test_invalid_conversion_targets_and_options_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", *trained())
    (tmp_path / "file").write_text("dear")
    for target in ("a.safetensors", "file"):
        with pytest.raises(ConfigurationError, match="must be a directory"):
            convert(tmp_path / "run", tmp_path / target)
    with pytest.raises(ConfigurationError, match=r"dtype must be a floating-point one, not torch\.int8"):
        convert(tmp_path / "run", tmp_path / "x", dtype=torch.int8)
    assert names_in(tmp_path) == ["file", "run"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_invalid_conversion_sources_are_refused(tmp_path: Path) -> None:
    torch.save(trained()[0].state_dict(), tmp_path / "model.pt")
    (tmp_path / "empty").mkdir()
    dcp.save({"optimizer": {"a": torch.ones(1)}}, checkpoint_id=tmp_path / "no_model", no_dist=True)
    cases = {
        "model.pt": "model.pt is not a checkpoint, and no complete checkpoint is in it.",
        "no_model": "no_model has no model under the key 'model', and no tensors at the top level.",
        "empty": "empty is not a checkpoint, and no complete checkpoint is in it.",
        "nothing": "nothing is not a checkpoint, and it does not exist.",
    }
    for name, message in cases.items():
        with pytest.raises(CheckpointError) as raised:
            convert(tmp_path / name, tmp_path / "new")
        assert message in str(raised.value)
        assert not (tmp_path / "new").exists()


@pytest.mark.behaviour("F-12")
def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    saved = save(tmp_path / "run", *trained())
    data = saved.path / "__0_0.distcp"
    flip(data)
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path / "run", tmp_path / "new")
    assert str(raised.value).startswith(f"{data} is damaged: its CRC-32 is ")
    assert not (tmp_path / "new").exists()


def run(*arguments: str | Path) -> Done:
    return run_command("checkpoint", *arguments)


def test_the_newest_checkpoint_of_a_folder_is_shown(tmp_path: Path) -> None:
    _, path = (save(tmp_path, *trained(), step=step).path for step in (3, 12))
    for given in (tmp_path, path):
        shown = run("inspect", given, "--verify")
        lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
        assert (shown.exit_code, shown.stderr, lines[0]) == (0, "", str(path))
        assert {"model.second.weight 3 × 3 float32", "model.second.bias 3 float32"} < set(lines)
        assert any(line.startswith("step 12, saved by 1 rank with composable_fsdp ") for line in lines)
        nbytes = sum(each.stat().st_size for each in path.iterdir() if each.name != "manifest.json")
        assert lines[-2:] == [f"2 files, {nbytes} bytes", "all files have the checksums of the manifest"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoints_are_described_for_machines_and_names_are_harmless(tmp_path: Path) -> None:
    values = {"model": {"a\x1b]0;b": torch.ones(2, 3), "c": torch.tensor(1, dtype=torch.int8)}}
    dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
    shown, listed = run("inspect", tmp_path), run("inspect", tmp_path, "--json")
    assert (shown.exit_code, "\x1b" in shown.stdout + listed.stdout) == (0, False)
    assert [line.split() for line in shown.stdout.splitlines()[1:]] == [
        ["tensor", "shape", "dtype"],
        ["model.a\\x1b]0;b", "2", "×", "3", "float32"],
        ["model.c", "scalar", "int8"],
    ]
    assert json.loads(listed.stdout) == {
        **dict.fromkeys(("step", "ranks", "library", "torch", "files")),
        "path": str(tmp_path),
        "tensors": [
            {"name": "model.a\x1b]0;b", "shape": [2, 3], "dtype": "float32"},
            {"name": "model.c", "shape": [], "dtype": "int8"},
        ],
    }
    assert run("inspect", tmp_path, "--verify").stderr == f"error: {tmp_path / 'manifest.json'} is missing.\n"


@pytest.mark.behaviour("F-12")
def test_inspection_of_damage_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = save(tmp_path, *trained()).path
    flip(path / "__0_0.distcp")
    assert run("inspect", path, "--json").exit_code == 0, "sizes are right"

    def refuses(expected: str, *arguments: str | Path) -> None:
        done = run("inspect", *arguments)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1), done
        assert done.stderr.startswith(f"error: {expected}")

    refuses(f"{path / '__0_0.distcp'} is damaged: its CRC-32 is ", tmp_path, "--verify")
    (path / "__0_0.distcp").unlink()
    refuses(f"{path / '__0_0.distcp'} is missing.", tmp_path)
    refuses(f"{tmp_path / 'none'} is not a checkpoint, and it does not exist.", tmp_path / "none", "--json")
    (path / "manifest.json").unlink()
    refuses(f"{path / 'manifest.json'} is missing.", path)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / ".metadata").write_bytes(b"cos\nsystem\n(S'exit 3'\ntR.")
    refuses(f"{tmp_path / 'plain' / '.metadata'} is damaged: ", tmp_path / "plain")


def test_a_checkpoint_is_converted(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path / "run", model, optimizer)
    done = run("convert", tmp_path / "run", tmp_path / "st", "--dtype", "bfloat16")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'st'} is complete\n")
    fresh = Tied()
    load_safetensors(fresh, tmp_path / "st", convert_dtype=True)
    assert_same(state_of(fresh), {name: value.bfloat16().float() for name, value in state_of(model).items()})


def test_a_model_in_the_target_is_kept(tmp_path: Path) -> None:
    save(tmp_path / "run", *trained())
    (tmp_path / "st").mkdir()
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / "st" / name).write_text("dear")
        with pytest.raises(ConfigurationError, match="st has a model already: remove it first, or name another target"):
            convert(tmp_path / "run", tmp_path / "st")
        assert (tmp_path / "st" / name).read_text() == "dear"
        (tmp_path / "st" / name).unlink()
    convert(tmp_path / "run", tmp_path / "st")
    assert names_in(tmp_path / "st") == ["model.safetensors"]


def test_exit_codes_say_whose_fault_it_is(tmp_path: Path) -> None:
    save(tmp_path / "run", *trained())
    cases: list[tuple[list[str | Path], int, str]] = [
        (["convert", tmp_path / "none", tmp_path / "x"], 1, "none is not a checkpoint, and it does not exist."),
        (["convert", tmp_path / "run", tmp_path / "x", "--dtype", "int8"], 2, "invalid choice: 'int8'"),
        (["convert", tmp_path / "run"], 2, "the following arguments are required: target"),
    ]
    for arguments, code, message in cases:
        done = run(*arguments)
        assert (done.exit_code, message in done.stderr) == (code, True), done.stderr
