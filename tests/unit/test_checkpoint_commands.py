"""``composable-fsdp checkpoint``: output and exit codes, and conversion to safetensors in one process."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
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
from tests.helpers.fresh_process import run_program
from tests.helpers.run_ranks import run_ranks
from tests.helpers.single_rank_checkpoints import Tied, assert_same, flip, state_of, trained

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install '.[checkpoint]'")


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    model = Tied()
    load_safetensors(model, folder)
    return state_of(model)


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


def test_dtypes_of_floating_point_tensors_change(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path / "run", model, optimizer, {"step": 1})
    left_out = convert(tmp_path / "run", tmp_path / "half", dtype=torch.bfloat16)
    assert left_out == ["extra and random number generators", "optimizer"]
    stored = safetensors.load_file(tmp_path / "half" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    model_of_halves = Tied().bfloat16()
    load_safetensors(model_of_halves, tmp_path / "half")
    assert_same(state_of(model_of_halves), {name: value.bfloat16() for name, value in state_of(model).items()})


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
    left_out = convert(tmp_path / "run", tmp_path / "st", max_file_bytes=300)
    assert left_out == ["extra and random number generators", "extra state of modules", "optimizer"]
    assert len(list((tmp_path / "st").glob("model-*.safetensors"))) > 2
    run_ranks(load_shards, 3, tmp_path / "st")


def test_an_existing_target_is_replaced_only_with_force(tmp_path: Path) -> None:
    new, _ = trained()
    save(tmp_path / "old", Tied(), step=0)
    save(tmp_path / "new", new, step=0)
    convert(tmp_path / "old", tmp_path / "st")
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path / "new", tmp_path / "st")
    assert str(raised.value) == f"{tmp_path / 'st'} exists already. Pass --force to replace it."
    convert(tmp_path / "new", tmp_path / "st", force=True)
    assert_same(tensors_in(tmp_path / "st"), state_of(new))
    assert names_in(tmp_path) == ["new", "old", "st"]


def test_invalid_conversion_targets_and_options_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", *trained())
    (tmp_path / "file").write_text("dear")
    for target in ("a.safetensors", "file"):
        with pytest.raises(ConfigurationError, match="must be a directory"):
            convert(tmp_path / "run", tmp_path / target, force=True)
    with pytest.raises(ConfigurationError, match=r"is the source of the conversion\. Name another target\."):
        convert(tmp_path / "run", tmp_path / "run", force=True)
    with pytest.raises(ConfigurationError, match=r"dtype must be a floating-point one, not torch\.int8"):
        convert(tmp_path / "run", tmp_path / "x", dtype=torch.int8)
    with pytest.raises(ConfigurationError, match="max_file_bytes must be at least 1, not 0"):
        convert(tmp_path / "run", tmp_path / "x", max_file_bytes=0)
    assert names_in(tmp_path) == ["file", "run"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_invalid_conversion_sources_are_refused(tmp_path: Path) -> None:
    torch.save(trained()[0].state_dict(), tmp_path / "model.pt")
    (tmp_path / "empty").mkdir()
    dcp.save({"optimizer": {"a": torch.ones(1)}}, checkpoint_id=tmp_path / "no_model", no_dist=True)
    cases = {
        "model.pt": "model.pt is a file, and no directory of a checkpoint. torch.load(path, mmap=True) reads one",
        "no_model": "no_model has no model: neither a state dict under the key 'model' nor tensors at the ",
        "empty": "empty is not a checkpoint, and no complete checkpoint is in it.",
        "nothing": "nothing is not a checkpoint, and it does not exist.",
    }
    for name, message in cases.items():
        with pytest.raises(CheckpointError) as raised:
            convert(tmp_path / name, tmp_path / "new")
        assert message in str(raised.value)
        assert not (tmp_path / "new").exists()


@pytest.mark.behaviour("F-12")
def test_a_failed_conversion_leaves_the_target_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    saved = save(tmp_path / "run", model, optimizer)
    convert(saved, tmp_path / "target")

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        convert(saved, tmp_path / "target", force=True)
    monkeypatch.undo()
    assert names_in(tmp_path / "target") == ["model.safetensors"]
    assert_same(tensors_in(tmp_path / "target"), state_of(model))


@pytest.mark.behaviour("F-12")
def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    saved = save(tmp_path / "run", *trained())
    data = saved.path / "__0_0.distcp"
    flip(data)
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path / "run", tmp_path / "new")
    assert str(raised.value).startswith(f"{data} is damaged: its CRC-32 is ")
    assert not (tmp_path / "new").exists()


@pytest.mark.multiprocess
@pytest.mark.behaviour("F-12")
def test_a_killed_conversion_leaves_the_target_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    model, optimizer = trained()
    saved, target = save(tmp_path / "run", model, optimizer), tmp_path / "target"
    convert(saved, target)
    script = (
        "import os, signal\n"
        "from tests._internals import Replacement, convert\n"
        "def killed(*args, **options):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Replacement.commit = killed\n"
        f"convert({str(saved.path)!r}, {str(target)!r}, force=True)"
    )
    assert run_program(script).returncode == -signal.SIGKILL
    assert any(".incomplete" in name for name in names_in(target))
    assert_same(tensors_in(target), state_of(model))
    convert(saved, target, force=True)
    assert names_in(target) == ["model.safetensors"]


def run(*arguments: str | Path) -> Done:
    return run_command("checkpoint", *arguments)


def test_a_checkpoint_is_shown_as_a_table(tmp_path: Path) -> None:
    saved = save(tmp_path, *trained(), {"step": 20, "position": 4})
    shown = run("inspect", tmp_path / "step-00000020")
    assert shown.exit_code == 0
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "first.weight 3 × 3 float32 36 bytes" in lines
    assert "second.weight 3 × 3 float32 as first.weight" in lines
    assert "model: 2 tensors, 1 more tied to these, 48 bytes" in lines
    assert "optimizer: state of 2 parameters" in lines
    assert "optimizer: 104 bytes" in lines
    assert "ranks: no tensors" in lines
    assert any(line.startswith("step 20, saved by 1 rank with composable_fsdp ") for line in lines)
    assert str(saved.path) in shown.stdout


def test_the_newest_checkpoint_of_a_folder_is_shown(tmp_path: Path) -> None:
    for step in (3, 12):
        save(tmp_path, *trained(), step=step)
    shown = run("inspect", tmp_path)
    assert (shown.exit_code, shown.stdout.splitlines()[0]) == (0, f"{tmp_path}/step-00000012")
    flip(tmp_path / "step-00000012" / "__0_0.distcp")
    damaged = run("inspect", tmp_path, "--verify")
    assert damaged.exit_code == 1
    assert f"damaged: {tmp_path}/step-00000012/__0_0.distcp is damaged: its CRC-32 is " in damaged.stdout
    (tmp_path / "step-00000012" / "manifest.json").unlink()
    missing = run("inspect", tmp_path)
    assert (missing.exit_code, "step-00000012/manifest.json is missing." in missing.stderr) == (1, True)


KINDS: dict[str, Callable[[Path], Path]] = {
    "ours": lambda path: save(path, *trained()).path,
    "dcp": lambda path: _plain(path),
}


def _plain(path: Path) -> Path:
    dcp.save({"model": trained()[0].state_dict()}, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_described_for_machines(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path / "made")
    found = json.loads(run("inspect", path, "--json").stdout)
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert sorted(tensors) == ["first.weight", "second.bias", "second.weight"]
    assert tensors["second.bias"] == {
        "name": "second.bias",
        "shape": [3],
        "dtype": "float32",
        "nbytes": 12,
        "same_as": None,
    }
    assert tensors["second.weight"]["same_as"] == (None if kind == "dcp" else "first.weight")


INTACT = "all files have the checksums of the manifest\n"


@pytest.mark.behaviour("F-12")
def test_verify_finds_damage_and_names_the_file(tmp_path: Path) -> None:
    path = KINDS["ours"](tmp_path / "made")
    intact = run("inspect", path, "--verify")
    assert (intact.exit_code, intact.stdout.endswith(INTACT)) == (0, True)
    assert INTACT not in run("inspect", path).stdout
    flip(path / "__0_0.distcp")
    assert run("inspect", path).exit_code == 0, "sizes are right"
    damaged = run("inspect", path, "--verify")
    message = f"{path / '__0_0.distcp'} is damaged: its CRC-32 is "
    assert (damaged.exit_code, f"\ndamaged: {message}" in damaged.stdout) == (1, True)
    shown = run("inspect", path, "--verify", "--json")
    assert (shown.exit_code, message in "".join(json.loads(shown.stdout)["problems"])) == (1, True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_without_a_manifest_cannot_be_verified(tmp_path: Path) -> None:
    path = KINDS["dcp"](tmp_path / "dcp")
    assert run("inspect", path).exit_code == 0
    found = run("inspect", path, "--verify")
    assert (found.exit_code, "manifest.json is missing." in found.stdout + found.stderr) == (1, True), found


def test_a_checkpoint_is_converted(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path / "run", model, optimizer)
    done = run("convert", tmp_path / "run", tmp_path / "st", "--dtype", "bfloat16")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'st'} is complete\n")
    assert done.stderr == "left out: extra and random number generators, optimizer\n"
    fresh = Tied()
    load_safetensors(fresh, tmp_path / "st", convert_dtype=True)
    assert_same(state_of(fresh), {name: value.bfloat16().float() for name, value in state_of(model).items()})


def test_exit_codes_say_whose_fault_it_is(tmp_path: Path) -> None:
    save(tmp_path / "run", *trained())
    cases: list[tuple[list[str | Path], int, str]] = [
        (["inspect", tmp_path / "none"], 1, "none is not a checkpoint, and it does not exist."),
        (["inspect", tmp_path], 1, "is not a checkpoint, and no complete checkpoint is in it."),
        (["verify", tmp_path], 2, "invalid choice: 'verify' (choose from"),
        (["convert", tmp_path / "none", tmp_path / "x"], 1, "none is not a checkpoint"),
        (["convert", tmp_path / "run", tmp_path / "x.pt"], 2, "x.pt. Between directories of checkpoints and files of"),
        (["convert", tmp_path / "run", tmp_path / "y.ckpt"], 2, "format_utils dcp_to_torch SOURCE TARGET, or torch_to"),
        (["convert", tmp_path / "run", tmp_path / "x", "--dtype", "int8"], 2, "invalid choice: 'int8'"),
        (["convert", tmp_path / "run"], 2, "the following arguments are required: target"),
    ]
    for arguments, code, message in cases:
        done = run(*arguments)
        assert (done.exit_code, message in done.stderr) == (code, True), done.stderr
