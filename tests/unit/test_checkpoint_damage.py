"""Checkpoints without process groups: damage, mismatches, steps, deletion and other formats."""

from __future__ import annotations

import errno
import json
import logging
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from composable_fsdp.checkpoint import (
    latest,
    load,
    load_optimizer_state_dict,
    optimizer_state_dict,
    save,
    save_safetensors,
)
from composable_fsdp.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from tests._internals import PartialCheckpoint, checkpoint_save, directory, read_metadata
from tests.helpers.single_rank_checkpoints import Tied, assert_same, flip, state_of, trained, truncate, unreadable

pytestmark = pytest.mark.behaviour("F-12")


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(path: Path, **options: Any) -> str:
    """Load a checkpoint, check that nothing is loaded, and return the text of the error."""
    model, optimizer = trained()
    before, random_state = state_of(model), torch.get_rng_state()
    moments = {name: value.clone() for name, value in optimizer.state[model.first.weight].items()}
    with pytest.raises(CheckpointError) as raised:
        load(path, model, optimizer, **options)
    assert_same(state_of(model), before)
    assert_same(optimizer.state[model.first.weight], moments)
    assert torch.equal(torch.get_rng_state(), random_state)
    return str(raised.value)


def test_the_files_of_a_checkpoint_folder(tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = save(tmp_path / "deep" / "run", model, optimizer, {"step": 20})
    folder = tmp_path / "deep" / "run" / "step-00000020"
    assert latest(tmp_path / "deep" / "run") == saved.path == folder
    assert files_of(folder) == [".metadata", "__0_0.distcp", "manifest.json"]
    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert (body["format"], body["step"], body["ranks"], body["torch"]) == (3, 20, 1, torch.__version__)


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "flipped data": ("__0_0.distcp", flip, "__0_0.distcp is damaged: its CRC-32 is "),
    "truncated data": ("__0_0.distcp", truncate, "it is truncated or overwritten"),
    "no data": ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing."),
    "flipped metadata": (".metadata", flip, ".metadata is damaged: its CRC-32 is "),
    "no metadata": (".metadata", Path.unlink, ".metadata is missing."),
    "flipped manifest": ("manifest.json", flip, "manifest.json is damaged: "),
    "truncated manifest": ("manifest.json", truncate, "manifest.json is damaged: "),
    "no manifest": ("manifest.json", Path.unlink, "manifest.json is missing."),
}


def saved_steps(folder: Path, *values: float) -> dict[int, Path]:
    """Save a checkpoint for each of the ``values``, with steps 1, 2, …"""
    paths = {}
    for step, value in enumerate(values, 1):
        model, optimizer = trained()
        nn.init.constant_(model.first.weight, value)
        paths[step] = save(folder, model, optimizer, step=step).path
    return paths


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_newest_checkpoint_says_which_is_intact_and_can_be_left_out(tmp_path, case: str, caplog) -> None:
    name, damage, message = DAMAGE[case]
    paths = saved_steps(tmp_path, 1.0, 2.0, 3.0, 4.0)
    damage(paths[4] / name)
    truncate(paths[3] / "__0_0.distcp")
    text = refused(tmp_path)
    advice = "fallback=True loads the newest one that is intact."
    assert text.startswith(f"loading {tmp_path}: damaged. {advice}\n  {paths[4] / name}")
    assert message in text
    model, optimizer = trained()
    with caplog.at_level(logging.WARNING):
        load(tmp_path, model, optimizer, fallback=True)
    assert model.first.weight.eq(2).all()
    warnings = [record.getMessage() for record in caplog.records]
    text = f"loading {tmp_path}: step-00000002 is loaded, the newest checkpoint that is intact. Damaged:"
    assert warnings[0].startswith(f"{text}\n  {paths[4] / name}")
    assert f"\n  {paths[3]}/__0_0.distcp has " in warnings[0]
    save(tmp_path, model, optimizer, step=4)
    assert latest(tmp_path) == paths[4]
    load(tmp_path, model, optimizer)


def test_a_folder_without_an_intact_checkpoint_is_an_error(tmp_path: Path) -> None:
    paths = saved_steps(tmp_path, 1.0, 2.0)
    flip(paths[1] / "__0_0.distcp")
    (paths[2] / "manifest.json").unlink()
    expected = f"damaged.\n  {paths[2]}/manifest.json is missing.\n  {paths[1]}/__0_0."
    assert f"loading {tmp_path}: {expected}" in refused(tmp_path, fallback=True)


@pytest.mark.parametrize("name", ["", "manifest.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("verify", [True, False])
def test_fallback_goes_on_past_what_cannot_be_read(tmp_path: Path, name: str, verify: bool) -> None:
    paths = saved_steps(tmp_path, 1.0, 2.0)
    model = Tied()
    with unreadable(paths[2] / name):
        text = refused(tmp_path, verify=verify)
        assert "damaged. fallback=True loads the newest one that is intact." in text
        assert "cannot be read: [Errno 13] Permission denied: " in text
        load(tmp_path, model, fallback=True, verify=verify)
    assert torch.equal(model.first.weight, torch.full((3, 3), 1.0))


def test_fallback_goes_on_past_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = saved_steps(tmp_path, 1.0, 2.0)
    stat = os.stat

    def failing(path: Any, **options: Any) -> os.stat_result:
        if str(paths[2]) in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(CheckpointError, match=r"step-00000002/manifest\.json cannot be read: Input/output error"):
        latest(tmp_path)
    (paths[2] / "manifest.json").unlink()
    load(tmp_path, model := Tied(), fallback=True)
    assert torch.equal(model.first.weight, torch.full((3, 3), 1.0))


@pytest.mark.parametrize("version", [2, 4])
def test_another_format_is_named_and_not_reported_as_damage(tmp_path, monkeypatch, version: int) -> None:
    saved_steps(tmp_path, 1.0)
    monkeypatch.setattr(directory, "FORMAT", version)
    save(tmp_path, *trained(), step=2)
    monkeypatch.undo()
    for fallback in (True, False):
        text = refused(tmp_path, fallback=fallback)
        assert f"has format version {version} of composable_fsdp " in text
        assert ", not 3. torch.distributed.checkpoint.load reads it." in text


def test_sizes_are_compared_even_if_checksums_are_not(tmp_path: Path) -> None:
    saved = save(tmp_path, *trained())
    data = saved.path / "__0_0.distcp"
    truncate(data)
    size = data.stat().st_size
    assert f"{data} has {size} bytes instead of {size + 1}" in refused(tmp_path, verify=False)


def damage_last_item(path: Path) -> None:
    """Overwrite the last tensor that was written and its container with zeros, without changing sizes."""
    metadata = read_metadata(path)
    tensors = [place for index, place in metadata.storage_data.items() if index.offset is not None]
    item = max(tensors, key=lambda item: item.offset)
    data = bytearray((path / item.relative_path).read_bytes())
    data[item.offset : item.offset + item.length] = bytes(item.length)
    (path / item.relative_path).write_bytes(data)


def test_damage_found_while_reading_says_that_the_model_is_partly_loaded(tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = save(tmp_path, model, optimizer)
    damage_last_item(saved.path)
    other = Tied()
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path, other, torch.optim.AdamW(other.parameters()), verify=False)
    assert str(raised.value).startswith(
        f"loading {tmp_path}: {saved.path} could not be loaded: CheckpointError: the tensors in "
    )
    assert str(raised.value).endswith(
        ". The model may be loaded in part. verify=True finds damage before anything is loaded."
    )
    assert "__0_0.distcp is damaged" in refused(tmp_path)


class Expanded(nn.Linear):
    """Has a buffer whose elements share memory."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("same", torch.zeros(1).expand(4))


def test_an_expanded_buffer_gets_memory_of_its_own(tmp_path: Path) -> None:
    model, other = Expanded(), Expanded()
    model.register_buffer("same", torch.tensor([7.0]).expand(4))
    save(tmp_path, model)
    load(tmp_path, other)
    assert_same(state_of(other), state_of(model))


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    assert "none is not a checkpoint, and it does not exist." in refused(tmp_path / "none")
    assert "is not a checkpoint, and no complete checkpoint is in it." in refused(tmp_path)
    partial = PartialCheckpoint(tmp_path, 3).partial
    assert refused(tmp_path).endswith("no complete checkpoint is in it.")
    assert "step-00000003.partial is not a checkpoint" in refused(partial)
    (partial / ".metadata").touch()
    assert "step-00000003.partial/manifest.json is missing." in refused(partial)


@pytest.mark.behaviour("F-04")
def test_another_model_is_refused_with_all_differences(tmp_path: Path) -> None:
    save(tmp_path, *trained())
    other = nn.ModuleDict({"first": nn.Linear(4, 3, bias=False, dtype=torch.float64), "third": nn.Linear(2, 2)})
    other["second"] = nn.Linear(3, 3, dtype=torch.bfloat16)
    before = state_of(other)
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path, other)
    assert str(raised.value) == (
        f"loading {tmp_path}: {tmp_path}/step-00000000 does not fit ModuleDict. Nothing was loaded.\n"
        "  missing (2):\n"
        "    third.weight: float32 (2, 2)\n"
        "    third.bias: float32 (2,)\n"
        "  of another shape (1):\n"
        "    first.weight: (3, 3), expected (3, 4)\n"
        "  of another dtype (2):\n"
        "    second.weight: float32, expected bfloat16\n"
        "    second.bias: float32, expected bfloat16"
    )
    assert_same(state_of(other), before)
    with pytest.raises(CheckpointError, match=r"(?s)unexpected \(.*second.bias: float32"):
        load(tmp_path, nn.ModuleDict({"first": nn.Linear(3, 3, bias=False)}))


def test_state_without_groups_is_loaded_if_not_strict(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"first.weight": dict(optimizer.state[model.first.weight])}
    nested = {"model": model.state_dict(), "optimizer": {"state": state}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(nested, checkpoint_id=tmp_path, no_dist=True)
    other = Tied()
    fresh = torch.optim.AdamW(other.parameters(), lr=9.0)
    with pytest.raises(CheckpointError, match="has no param_groups"):
        load(tmp_path, other, fresh)
    load(tmp_path, other, fresh, strict=False)
    assert_same(fresh.state[other.first.weight], optimizer.state[model.first.weight])
    assert fresh.param_groups[0]["lr"] == 9.0


def test_common_parameters_are_loaded_if_not_strict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained()
    save(tmp_path, model, optimizer)
    other = nn.ModuleDict({"second": nn.Linear(3, 3, dtype=torch.float64), "third": nn.Linear(2, 2)})
    with caplog.at_level(logging.WARNING):
        load(tmp_path, other, strict=False)
    assert torch.equal(other.get_parameter("second.weight"), model.second.weight.double())
    assert "is loaded in part.\n  missing (2):" in caplog.text
    with pytest.raises(CheckpointError, match="of another shape"):
        load(tmp_path, nn.ModuleDict({"second": nn.Linear(4, 3)}), strict=False)


@pytest.mark.behaviour("F-09")
def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model, _ = trained()
    save(tmp_path / "without", model)
    assert "the checkpoint has no param_groups of an optimizer." in refused(tmp_path / "without")
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    save(tmp_path / "two", model, torch.optim.AdamW(groups))
    message = "has the parameters of group 0: first.weight, second.bias"
    assert message in refused(tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"this AdamW holds parameters that are not the model's, of shapes"):
        save(tmp_path, model, torch.optim.AdamW(nn.Linear(1, 1, bias=False).parameters()))
    assert latest(tmp_path) is None


@pytest.mark.behaviour("F-09")
def test_settings_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    optimizer.add_param_group({"params": [model.get_parameter("scale")], "lr": 0.5})
    save(tmp_path, model, optimizer)
    sgd = torch.optim.SGD([model.first.weight, model.second.bias], lr=9.0, momentum=0.9)
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path, model, sgd)
    assert "    param_group of scale: members: 1\n" in str(raised.value)
    assert "  param_group 0 has settings that the saved one lacks: momentum, dampening, nesterov" in str(raised.value)
    load(tmp_path, model, sgd, strict=False)
    assert (sgd.param_groups[0]["lr"], sgd.param_groups[0]["momentum"]) == (1e-3, 0.9)
    model(torch.ones(2, 3)).sum().backward()
    sgd.step()
    state = optimizer_state_dict(model, optimizer)
    with pytest.raises(CheckpointError, match="param_group 0 has settings that the saved one lacks: momentum, dampe"):
        load_optimizer_state_dict(model, sgd, {**state, "param_groups": state["param_groups"][:1]})


def test_parameters_on_the_meta_device(tmp_path: Path) -> None:
    model, _ = trained()
    save(tmp_path, model)
    with pytest.raises(CheckpointError, match=r"meta device and have no memory: first\.weight, .*\. Call "):
        load(tmp_path, model.to("meta"))


@pytest.mark.behaviour("F-09")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1}),
        ("Adagrad", {}),
        ("ASGD", {}),
        ("Adafactor", {}),
        ("LBFGS", {}),
        ("AdamW", {"lr": torch.tensor(0.1), "fused": False, "foreach": False}),
    ],
)
def test_optimizers_resume_bitwise(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    make = getattr(torch.optim, kind)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.arange(6.0).view(2, 3)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    model, other = Tied(), Tied()
    optimizers = make(model.parameters(), **options), make(other.parameters(), **options)
    step(model, optimizers[0])
    save(tmp_path, model, optimizers[0])
    load(tmp_path, other, optimizers[1])
    step(model, optimizers[0])
    step(other, optimizers[1])
    assert_same(state_of(other), state_of(model))


def test_steps_and_deletion(tmp_path: Path) -> None:
    model, _ = trained()
    assert save(tmp_path, model).step == 0
    assert save(tmp_path, model, extra={"step": 8}).step == 8
    assert save(tmp_path, model, extra={"step": 8}, step=5).step == 5
    assert save(tmp_path, model, extra={"epoch": 2}, keep_last=3).step == 9
    assert files_of(tmp_path) == [".lock", "step-00000005", "step-00000008", "step-00000009"]
    assert save(tmp_path, model, step=1, keep_last=2).step == 1
    assert files_of(tmp_path) == [".lock", "step-00000001", "step-00000009"]
    for number in (0, 2.5):
        with pytest.raises(ConfigurationError, match=f"keep_last must be an int of at least 1, not {number}"):
            save(tmp_path, model, keep_last=cast(Any, number))
    assert files_of(tmp_path) == [".lock", "step-00000001", "step-00000009"]
    with pytest.raises(ConfigurationError, match="step must be an int of at least 0, not -1, also in extra"):
        save(tmp_path, model, step=-1)


def test_no_copy_of_a_whole_parameter_is_made_in_python(tmp_path: Path) -> None:
    model = nn.ParameterList([torch.ones(1 << 23) for _ in range(2)])  # 32 MiB each
    for action in (save, load):
        tracemalloc.start()
        action(tmp_path, model)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8 << 20, action


def test_a_failed_save_leaves_existing_files_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    before = state_of(model)
    save(tmp_path, model, optimizer, step=4)

    def full(file: object, value: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_save, "write_value", full)
    for asynchronous in (False, True):
        nn.init.zeros_(model.first.weight)
        with pytest.raises(CheckpointError, match=r"saving .*step-00000004: OSError: .*No space left on device"):
            save(tmp_path, model, optimizer, step=4, asynchronous=asynchronous).wait()
        assert files_of(tmp_path) == [".lock", "step-00000004"]
        load(tmp_path, model, optimizer)
        assert_same(state_of(model), before)
    save(tmp_path, model, asynchronous=True)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, model)
    monkeypatch.undo()
    assert save(tmp_path, model).step == 5


def test_objects_of_unknown_classes_need_trust(tmp_path: Path) -> None:
    model, _ = trained()
    admitted = torch.serialization.safe_globals([type(Path()), (type(Path()), "pathlib.PosixPath")])
    with admitted:
        save(tmp_path, model, extra={"where": Path("data")})
    message = (
        r"'ranks.0.extra' cannot be read: UnpicklingError: it has an object of the class pathlib\S*PosixPath, which "
        r"torch.load\(weights_only=True\) does not admit. If you trust whoever wrote it, call torch.serialization.add_s"
    )
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, model)
    with admitted:
        assert load(tmp_path, model) == {"where": Path("data")}


def test_what_load_refuses_save_refuses_too(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy", reason="needs numpy: pip install numpy")
    model, optimizer = trained()
    for value in (numpy.float64(0.5), numpy.int64(3), numpy.ones(2), Path("data"), print, torch.nn.Linear(1, 1)):
        with pytest.raises(
            CheckpointError, match=r"extra\['best'\] cannot be saved: .* does not admit.*strings, lists, dicts and ten"
        ):
            save(tmp_path, model, extra={"best": value})
        optimizer.param_groups[0]["weight_decay"] = value
        with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\[0\]\['weight_decay'\] cannot be saved: "):
            save(tmp_path, model, optimizer)
    assert latest(tmp_path) is None
    cyclic: list[Any] = [1, print]
    cyclic.append(cyclic)
    with pytest.raises(CheckpointError, match=r"extra\['cycle'\] cannot be saved: "):
        save(tmp_path, model, extra={"cycle": cyclic})


def test_metadata_written_by_the_first_versions_of_python_3_11_is_read(tmp_path: Path, monkeypatch) -> None:
    """They pickle a member of an enum as ``getattr(class, name)``, which is read and not called."""
    model, optimizer = trained()
    with monkeypatch.context() as early:
        early.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
        path = save(tmp_path, model, optimizer).path
    assert b"getattr" in (path / ".metadata").read_bytes()
    load(path, model, optimizer)


def test_a_tied_checkpoint_fits_an_untied_model(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path, model, optimizer)
    other = Tied()
    other.second.weight = nn.Parameter(torch.zeros(3, 3))
    load(tmp_path, other)
    assert_same(state_of(other), state_of(model))


def test_swapped_arguments_are_named_with_their_order(tmp_path: Path) -> None:
    model, optimizer = trained()
    swapped: Any = save
    order = r"Call save\(path, model, optimizer, extra\)\.$"
    for arguments, text in (
        (
            (model, tmp_path, optimizer),
            rf"^path must be a str or a path, and model an nn.Module, not Tied and .* {order}",
        ),
        ((tmp_path, optimizer, model), rf"^path must .* and model an nn.Module, not PosixPath and AdamW\. {order}"),
    ):
        with pytest.raises(ArgumentTypeError, match=text):
            swapped(*arguments)
    swapped = load
    with pytest.raises(ArgumentTypeError, match=r"not Tied and PosixPath\. Call load\(path, model, optimizer\)\.$"):
        swapped(model, tmp_path)
    swapped = save_safetensors
    with pytest.raises(ArgumentTypeError, match=r"Call save_safetensors\(model, path\)\.$"):
        swapped(tmp_path, model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["7", 7.0])
def test_a_step_that_is_no_int_is_refused(tmp_path: Path, step: Any) -> None:
    text = rf"^step must be an int of at least 0, not {step!r}, also in extra\.$"
    with pytest.raises(ConfigurationError, match=text):
        save(tmp_path, *trained(), step=step)
    with pytest.raises(ConfigurationError, match=text):
        save(tmp_path, *trained(), {"step": step})


def test_a_step_may_be_any_kind_of_integer(tmp_path: Path) -> None:
    assert save(tmp_path, *trained(), step=torch.tensor(7)).path.name == "step-00000007"  # type: ignore[arg-type]
