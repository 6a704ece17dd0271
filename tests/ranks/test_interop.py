"""A part of the exchanges of ``docs/generated/interop.md``, by the program that makes the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import load, save
from tests.helpers.interop import (
    COLUMNS,
    FLATTENED,
    FSDP2,
    MESHES,
    NESTED,
    NOTES,
    OPTIMIZERS,
    OURS,
    UNSHARDED,
    Cell,
    Way,
    differences,
    notes_of,
    outcomes,
)
from tests.helpers.interop_page import PAGE
from tests.helpers.run_ranks import run_ranks


def exact(name: str) -> list[Cell]:
    form = NESTED if name == "SOAP" else FLATTENED
    return [(name, way, form) for way in (Way("save", OURS, FSDP2), Way("load", FSDP2, OURS), Way("dict", FSDP2, OURS))]


def exchange(mesh: str, cells: list[Cell], folder: Path) -> list[list[str]]:
    return [[note.text for note in notes] for notes in outcomes(mesh, cells, folder)]


@pytest.mark.behaviour("F-07", "F-09")
@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ("2 ranks", ["Adafactor", "SOAP", "Shampoo", "AdamW8bit"]),
        ("tensor parallel 2 x 2", ["AdamW, tensor lr", "SOAP"]),
    ],
)
def test_state_and_the_next_step_are_the_same_bits_after_an_exchange(
    tmp_path: Path, mesh: str, names: list[str]
) -> None:
    cells = [cell for name in names for cell in exact(name)]
    found = run_ranks(exchange, MESHES[mesh], mesh, cells, tmp_path, timeout=240)
    assert found == [[[]] * len(cells)] * MESHES[mesh]


@pytest.mark.behaviour("F-07", "F-09")
def test_each_noted_difference_is_found_and_torchs_functions_alone_have_those_said_to_be_theirs(tmp_path: Path) -> None:
    cells: list[Cell] = [
        ("SOAP", Way("load", FSDP2, OURS), FLATTENED),
        ("SGD, momentum", Way("dict", OURS, UNSHARDED), FLATTENED),
        ("SGD", Way("dict", UNSHARDED, OURS), NESTED),
        ("AdamW", Way("dict", UNSHARDED, OURS), NESTED),
        ("SOAP", Way("dict", OURS, UNSHARDED), NESTED),
        ("AdamW, fused", Way("load", UNSHARDED, OURS), NESTED),
        ("AdamW8bit", Way("full", UNSHARDED, OURS), NESTED),
        ("AdamW8bit", Way("dict", UNSHARDED, OURS), NESTED),
    ]
    found = run_ranks(exchange, 2, "2 ranks", cells, tmp_path, timeout=240)[0]
    cut = [("AdamW8bit", Way("save", OURS, UNSHARDED), NESTED)]
    found += run_ranks(exchange, 4, "tensor parallel 2 x 2", cut, tmp_path / "cut", timeout=240)[0]
    assert {text for notes in found for text in notes} == {note.text for note in NOTES}
    assert all(found)


def keep_state_of_frozen_parameters(library: str, folder: Path) -> tuple[float, float]:
    """Return the steps of a frozen parameter after torch's ``set_state_dict``, and after our ``save`` and ``load``."""
    shard: Any = fully_shard if library == OURS else torch_fully_shard

    def built(steps: int) -> tuple[Any, torch.optim.Optimizer]:
        model = shard(nn.Linear(3, 4, bias=False), mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.Adagrad(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        model.weight.requires_grad_(False)
        return model, optimizer

    source, by_torch, by_ours = built(2), built(1), built(1)
    model_state, state = get_state_dict(*source)
    set_state_dict(*by_torch, model_state_dict=model_state, optim_state_dict=state)
    load(save(folder, *source).path, *by_ours)
    found = [optimizer.state[model.weight].get("step", -1.0) for model, optimizer in (by_torch, by_ours)]
    return float(found[0]), float(found[1])


@pytest.mark.behaviour("F-09")
@pytest.mark.parametrize("library", [OURS, FSDP2])
def test_torch_drops_the_state_of_frozen_parameters_which_our_load_restores(tmp_path: Path, library: str) -> None:
    assert run_ranks(keep_state_of_frozen_parameters, 2, library, tmp_path) == [(-1.0, 2.0)] * 2


def test_differences_are_named_at_any_depth() -> None:
    wanted = {"a": [1, (torch.ones(2), 2.0)], "b": {"c": 3}}
    assert list(differences(wanted, wanted)) == []
    found = {"a": [1, [torch.tensor([1.0, 1.5]), 2]], "b": {}}
    assert sorted(differences(found, wanted)) == [
        "['a'][1] is of type list, not tuple",
        "['a'][1][0] differs by 5.0e-01 of the largest element",
        "['a'][1][1] is of type int, not float",
        "['b'] has [], not ['c']",
    ]
    with pytest.raises(ValueError, match=r"\['b'\] has \[\], not \['c'\]"):
        notes_of(["['b'] has [], not ['c']"])


def test_the_page_has_a_row_for_each_optimizer_and_all_notes() -> None:
    page = PAGE.read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.count(" | ") == len(COLUMNS)]
    assert rows[1:] == list(OPTIMIZERS)
    for number, note in enumerate(NOTES, 1):
        assert f"\n{number}. {note.text}" in page
