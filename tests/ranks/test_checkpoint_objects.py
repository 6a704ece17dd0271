"""What is saved besides tensors, and failures of one rank in it: all ranks raise at once, and none waits."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import latest, load, load_safetensors, save, save_safetensors
from composable_fsdp.errors import CheckpointError
from tests.helpers.checkpoint_worlds import all_ranks_raise
from tests.helpers.run_ranks import on_ranks, run_ranks


class Told(nn.Module):
    def __init__(self, told: Any = None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.told = told

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state


def built(told: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = fully_shard(Told(told))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Raises:
    def __reduce__(self) -> Any:
        raise RuntimeError("no pickles today")


class Unknown:
    """Can be pickled, but not read with ``weights_only=True``."""


def in_extra(value: Any, folder: Path) -> None:
    save(folder, *built(), {"deep": [1, {"here": value}]}, timeout=20)


def in_group(value: Any, folder: Path) -> None:
    model, optimizer = built()
    optimizer.param_groups[0]["note"] = value
    save(folder, model, optimizer, timeout=20)


def in_module(value: Any, folder: Path) -> None:
    save(folder, built((value,))[0], timeout=20)


PLACES: dict[str, tuple[Callable[[Any, Path], None], str]] = {
    "extra": (in_extra, r"extra\['deep'\] cannot be saved: "),
    "group": (in_group, r"optimizer\.param_groups\[0\]\['note'\] cannot be saved: "),
    "module": (in_module, r"model\._extra_state cannot be saved: "),
}


def fails_on(place: str, folder: Path) -> None:
    action, text = PLACES[place]
    for on in ((0,), (1,), (0, 1)):
        for bad in (threading.Lock, Raises, Unknown, lambda: date.min, lambda: fails_on):
            start = time.monotonic()
            with all_ranks_raise(text):
                action(bad() if dist.get_rank() in on else None, folder)
            assert time.monotonic() - start < 10
    assert latest(folder) is None
    action((1, [2.0, None], "three", torch.ones(1)), folder)
    assert latest(folder) is not None


@pytest.mark.behaviour("F-12")
@pytest.mark.parametrize("place", PLACES)
def test_an_object_that_cannot_be_loaded_again_is_an_error_on_all_ranks(tmp_path: Path, place: str) -> None:
    run_ranks(fails_on, 2, place, tmp_path)


@pytest.mark.behaviour("F-12")
@on_ranks(2)
def test_arguments_that_are_wrong_on_one_rank_are_an_error_on_all(tmp_path: Path) -> None:
    rank, (model, optimizer) = dist.get_rank(), built()
    is_wrong = rank == 1
    values: Any = [3] if is_wrong else {"step": 3}
    calls: dict[str, Callable[[], object]] = {
        "dictionary update sequence": lambda: save(tmp_path, model, optimizer, values, timeout=20),
        "keep_last must be an int of at least 1": lambda: save(tmp_path, model, keep_last=1 - rank, timeout=20),
        "step must be an int of at least 0": lambda: save(tmp_path, model, step=-rank, timeout=20),
        "path must be a str or a path": lambda: load(rank or tmp_path, model, timeout=20),  # type: ignore[arg-type]
        "and model an nn.Module": lambda: load_safetensors([model, 1][rank], tmp_path, timeout=20),  # type: ignore[arg-type]
        "path must be a str": lambda: save_safetensors(model, [tmp_path, 1][rank], timeout=20),  # type: ignore[arg-type]
    }
    for text, call in calls.items():
        start = time.monotonic()
        with pytest.raises(CheckpointError if not is_wrong else (CheckpointError, ValueError, TypeError)) as raised:
            call()
        assert text in str(raised.value)
        assert time.monotonic() - start < 10
    assert latest(tmp_path) is None
    save(tmp_path, model, optimizer)


@on_ranks(2)
def test_a_warning_that_is_an_error_on_rank_0_comes_after_the_files_are_complete(tmp_path: Path) -> None:
    model, _ = built({"calls": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if dist.get_rank() == 0:
            with pytest.raises(UserWarning, match="leaves out the extra state of modules: _extra_state"):
                save_safetensors(model, tmp_path, timeout=20)
        else:
            save_safetensors(model, tmp_path, timeout=20)
    load_safetensors(model, tmp_path)


@pytest.mark.behaviour("F-12")
@on_ranks(2)
def test_shards_in_extra_are_refused(tmp_path: Path) -> None:
    model, optimizer = built()
    weight: Any = dict(model.named_parameters())["inner.weight"]
    momenta = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weight.grad = torch.ones_like(weight)
    momenta.step()
    for extra, name in (
        ({"averages": {"inner.weight": weight.detach().clone()}}, r"extra\['averages'\]\['inner\.weight'\]"),
        ({"second": momenta.state_dict()}, r"extra\['second'\]\['state'\]\[0\]\['momentum_buffer'\]"),
        ({"list": [1, (weight.detach(),)]}, r"extra\['list'\]"),
        ({"object": [SimpleNamespace(mean=weight.detach())]}, r"extra\['object'\]"),
    ):
        with all_ranks_raise(
            rf"{name} cannot be saved: TypeError: it has DTensors, of which each rank would save its "
        ):
            save(tmp_path, model, optimizer, extra)
    save(tmp_path, model, optimizer, {"full": weight.full_tensor()})


@pytest.mark.behaviour("F-12")
@on_ranks(2)
def test_an_asynchronous_save_goes_to_the_directory_that_was_current_when_it_was_called(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    for each in (place, elsewhere):
        each.mkdir(exist_ok=True)
    before = Path.cwd()
    try:
        os.chdir(place)
        pending = save("runs", built()[0], step=4, asynchronous=True)
        os.chdir(elsewhere)
        pending.wait()
    finally:
        os.chdir(before)
    assert pending.path == place / "runs" / "step-00000004"
    assert latest(place / "runs") == pending.path
    assert not list(elsewhere.iterdir())
    load(place / "runs", built()[0])


class Views(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        angles = torch.arange(6.0) * scale
        turns = torch.polar(torch.ones(6), angles).conj()
        self.weight = nn.Parameter(torch.polar(torch.ones(6, 2), angles[:, None].repeat(1, 2)).conj())
        self.register_buffer("turns", turns)
        self.register_buffer("sines", turns.imag)
        self.register_buffer("column", turns.view(2, 3).T[:, 1])


def views(folder: Path) -> None:
    for scale, sharded in ((0.1, True), (0.3, False)):
        model, wanted = Views(scale), Views(scale)
        assert model.sines.is_neg()  # type: ignore[operator]
        assert model.turns.is_conj()  # type: ignore[operator]
        if sharded:
            fully_shard(model)
        save_safetensors(model, folder / f"st {scale}")
        save(folder / f"dcp {scale}", model)
        for read, name in ((load_safetensors, "st"), (lambda m, path: load(path, m), "dcp")):
            new: Any = fully_shard(Views(0.2))
            read(new, folder / f"{name} {scale}")
            for key, value in wanted.state_dict().items():
                found = new.state_dict()[key]
                found = found.full_tensor() if hasattr(found, "full_tensor") else found
                assert torch.equal(found.resolve_conj().resolve_neg(), value.resolve_conj().resolve_neg()), key


@pytest.mark.behaviour("F-11")
def test_conjugate_and_negative_views_are_saved_and_loaded(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors: pip install '.[checkpoint]'")
    run_ranks(views, 2, tmp_path)
