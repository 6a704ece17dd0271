"""``composable-fsdp checkpoint``: output and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from composable_fsdp.checkpoint import load_safetensors, save
from tests.helpers.single_rank_checkpoints import Tied, assert_same, flip, state_of, trained

pytest.importorskip("safetensors", reason="needs safetensors: pip install '.[checkpoint]'")

from tests.helpers.command import Done, run_command


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


# -- convert


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
