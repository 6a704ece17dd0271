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

from tests.helpers import upstream

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
