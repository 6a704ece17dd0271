"""Names of parameters without those of wrappers, and the reports of mismatches and errors of several ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from composable_fsdp.checkpoint import load, load_safetensors, load_state_dict, save, state_dict
from composable_fsdp.errors import CheckpointError
from tests._internals import Mismatch, join_rank_texts, leave_common_unexpected, mismatch_text, plain_name, refuse, said


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_orig_mod._orig_mod.a._checkpoint_wrapped_module.weight", "a.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("a.old_checkpoint_wrapped_module.0", "a.old_checkpoint_wrapped_module.0"),
        ("_orig_modern.weight", "_orig_modern.weight"),
        ("a._orig_mod", "a._orig_mod"),
    ],
)
def test_only_whole_components_are_left_out(name: str, plain: str) -> None:
    assert plain_name(name) == plain


class Adapters(nn.Module):
    """``left_checkpoint_wrapped_module.0`` and ``left0`` were both called ``left0`` before."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.left_checkpoint_wrapped_module = nn.ModuleList([nn.Linear(2, 2)])
        self.left0 = nn.Linear(2, 2)
        self.wrapped = checkpoint_wrapper(nn.Linear(2, 2))


def test_modules_whose_names_end_like_a_wrappers_are_saved(tmp_path: Path) -> None:
    model, new = Adapters(1), Adapters(2)
    save(tmp_path, model)
    load(tmp_path, new)
    names = [name.replace("wrapped._checkpoint_wrapped_module.", "wrapped.") for name in model.state_dict()]
    assert list(state_dict(new)) == names
    for found, expected in zip(new.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)


def by_dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Write what torch's functions return, with the names of a compiled model."""
    found: Any = get_optimizer_state_dict(model, optimizer)
    state = {f"_orig_mod.{name}": entry for name, entry in found["state"].items()}
    groups = [{**g, "params": [f"_orig_mod.{name}" for name in g["params"]]} for g in found["param_groups"]]
    named = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    dcp.save(
        {"model": named, "optimizer": {"state": state, "param_groups": groups}}, checkpoint_id=folder, no_dist=True
    )
    return load


def by_safetensors(folder: Path, model: nn.Module, _: torch.optim.Optimizer) -> Callable[..., Any]:
    save_file(
        {f"0._orig_mod.{n[2:]}" if n[0] == "0" else n: v for n, v in model.state_dict().items()},
        folder / "m.safetensors",
    )
    return lambda folder, model, _: load_safetensors(model, folder / "m.safetensors")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [by_dcp, by_safetensors])
def test_files_with_the_names_of_a_compiled_model_load(tmp_path: Path, write: Callable[..., Any]) -> None:
    model, new = (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)) for _ in range(2))
    optimizer, fresh = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, new))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    write(tmp_path, model, optimizer)(tmp_path, new, fresh)
    for found, expected in zip(new.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)
        if write is by_dcp:
            assert torch.equal(fresh.state[found]["momentum_buffer"], optimizer.state[expected]["momentum_buffer"])


def test_two_parameters_of_one_name_are_refused() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    model._orig_mod = nn.Linear(1, 1)
    expected = r"'weight' and '_orig_mod\.weight' are both 'weight' without parts of wrappers\. Rename the attribute\."
    with pytest.raises(CheckpointError, match=expected):
        state_dict(model)
    with pytest.raises(CheckpointError, match=expected):
        load_state_dict(model, {})


def test_equal_errors_are_shown_once_and_others_name_their_ranks() -> None:
    assert join_rank_texts({0: "bad", 1: "bad"}, 2) == "bad"
    assert join_rank_texts({0: "bad", 1: "bad"}, 3) == "ranks 0-1: bad"
    assert join_rank_texts({1: "worse", 2: "bad", 3: "worse"}, 4) == "ranks 1, 3: worse; rank 2: bad"


def test_differences_are_reported_by_kind_with_the_ranks_that_have_them() -> None:
    first = Mismatch(missing={"a": "x"}, unexpected={"b": "y", "c": "z"}, others=["same", "own"])
    second = Mismatch(missing={"a": "x"}, unexpected={"c": "z", "e": "v"}, others=["same"], dtypes={"f": "u"})
    leave_common_unexpected([first, second])
    assert mismatch_text({0: first, 2: second}).splitlines() == [
        "  missing (1):",
        "    a: x",
        "  unexpected (1):",
        "    c: z",
        "  of another dtype (1):",
        "    f: u (on rank 2)",
        "  same",
        "  own (on rank 0)",
    ]
    with pytest.raises(CheckpointError, match=r"^it does not fit\. Nothing was loaded\.\n  missing \(1\):\n    a: x$"):
        refuse("it does not fit", {0: Mismatch(missing={"a": "x"})})
    refuse("it does not fit", {0: Mismatch(), 1: Mismatch()})


def test_errors_are_printed_in_full_without_colors_or_stacks() -> None:
    assert said(ValueError("one.\ntwo.")) == "ValueError: one.\ntwo"
    assert said(RuntimeError("\x1b[1mlost\x1b[0m.\nException raised from f at a.cpp:1 (most")) == "RuntimeError: lost"
    colourful = "Weights only load failed. \x1b[1mdo those steps\x1b[0m.\n\tWeightsUnpickler error: "
    refused = "Unsupported global: GLOBAL a.B was not an allowed global by default. Please use x.\n\nCheck the docs."
    assert said(pickle.UnpicklingError(colourful + refused)) == (
        "UnpicklingError: it has an object of the class a.B, which torch.load(weights_only=True) does not admit. If "
        "you trust whoever wrote it, call torch.serialization.add_safe_globals([a.B]) first"
    )
    assert (
        said(pickle.UnpicklingError(f"{colourful}Unsupported operand 0\n")) == "UnpicklingError: Unsupported operand 0"
    )


def test_long_lists_are_truncated() -> None:
    lines = mismatch_text({0: Mismatch(missing={f"layers.{i}.weight": "float32 (2,)" for i in range(33)})}).splitlines()
    assert lines[0] == "  missing (33):"
    assert lines[1:3] == ["    layers.0.weight: float32 (2,)", "    layers.1.weight: float32 (2,)"]
    assert lines[21:] == ["    and 13 more"]
