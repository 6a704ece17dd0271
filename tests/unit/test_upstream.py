"""The public names of the installed torch's FSDP2 beside ours."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed.fsdp as torch_fsdp

from tests.helpers import upstream

OF_SOME_RELEASES = {
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
