"""The public names of the installed torch's FSDP2 beside ours."""

from __future__ import annotations

import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import _fully_shard
from torch.torch_version import TorchVersion

from tests._internals import NEWEST, OLDEST
from tests.helpers import upstream
from tests.helpers.fresh_process import run_program

OF_SOME_RELEASES = {
    "fully_shard(dp_mesh_dims)",  # 2.11
    "MixedPrecisionPolicy(param_dtype_override_fn)",  # up to 2.14
    "FSDPModule.set_keep_unsharded_storage",  # from 2.15 on
    "GradientReductionHandle(root)",
}


def test_every_difference_from_the_installed_torch_has_a_reason_and_every_reason_a_difference() -> None:
    differences = {each for row in upstream.comparisons() for each in row.differences}
    assert differences <= upstream.REASONS.keys()
    assert upstream.REASONS.keys() - differences <= OF_SOME_RELEASES


def test_the_page_for_the_installed_torch_is_up_to_date() -> None:
    assert upstream.page().read_text() == upstream.render(), "python -m tests.helpers.upstream makes it"


def is_in_torch(name: str) -> bool:
    """Return whether the installed torch's FSDP2 has ``name``, of a module, a member, a parameter or a word."""
    if name.startswith("torch."):
        return find_spec(name) is not None
    owner, _, rest = name.replace("(", ".").rstrip(")").partition(".")
    found = getattr(torch_fsdp, owner, None)
    if not rest:
        sources = Path(_fully_shard.__file__).parent.glob("*.py")
        return found is not None or any(re.search(rf"\b{name}\b", source.read_text()) for source in sources)
    return rest in inspect.signature(found).parameters if "(" in name else hasattr(found, rest)  # type: ignore[arg-type]


def test_names_are_in_the_releases_that_the_page_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "upstream.md").read_text()
    section = text.partition("## Releases of the names")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (no release|[\d.]+)[^|]* \| (.*) \|$", section, flags=re.MULTILINE)
    assert [release for release, _ in rows] == ["2.11", "2.13", "2.14", "2.15", "no release"]
    for release, names in rows:
        expected = release != "no release" and TorchVersion(torch.__version__) >= TorchVersion(release)
        for name in re.findall("`(.*?)`", names):
            assert is_in_torch(name) is expected, f"{name} in torch {torch.__version__}"


def test_a_torch_that_is_newer_than_the_tested_ones_is_warned_of_once_and_not_refused() -> None:
    program = """
import sys, warnings, torch
warnings.resetwarnings()
warnings.showwarning = lambda message, category, file, *_: print(category.__name__, file, message)
torch.__version__ = sys.argv[1]
import composable_fsdp, composable_fsdp.optim
from composable_fsdp import fully_shard
"""
    newer = run_program(program, "2.16.0.dev20261128+cpu")
    assert newer.stdout.splitlines() == [
        "UntestedTorchWarning <string> This is torch 2.16.0.dev20261128+cpu; composable_fsdp was tested with torch "
        "2.11 to 2.15. It uses private parts of torch, which may have changed. If training fails, install one of "
        "these, or a newer composable_fsdp. Else filter this composable_fsdp.errors.UntestedTorchWarning."
    ]
    for tested in ("2.15.3+cu132", "2.11.0"):
        assert run_program(program, tested).stdout == ""


def test_the_range_of_torch_is_the_same_wherever_it_is_said() -> None:
    root = Path(__file__).parents[2]
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    assert f'"torch>={oldest}",' in (root / "pyproject.toml").read_text()
    assert f"torch-{oldest}%20to%20{newest}-" in (root / "README.md").read_text()
    for page in ("README.md", "docs/index.md", "docs/compatibility.md"):
        assert f"torch {oldest} to {newest}" in " ".join((root / page).read_text().split()), page


def test_a_name_a_parameter_and_a_default_that_only_torch_has_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_is_last_backward(self: object, is_last_backward: bool = True, *, recurse: bool = True) -> None: ...

    def forget_gradients(self: object) -> None: ...

    monkeypatch.setattr(torch_fsdp.FSDPModule, "set_is_last_backward", set_is_last_backward)
    with mock.patch.object(torch_fsdp.FSDPModule, "forget_gradients", forget_gradients, create=True):
        found = {each for row in upstream.comparisons() for each in row.differences} - upstream.REASONS.keys()
    assert found == {
        "FSDPModule.set_is_last_backward(is_last_backward)",
        "FSDPModule.set_is_last_backward(recurse)",
        "FSDPModule.forget_gradients",
    }
