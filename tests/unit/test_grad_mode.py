"""Functions that run without autograd's recording."""

from __future__ import annotations

import pytest
import torch

from tests._internals import without_grad


@without_grad
def grad_mode_within(fails: bool = False) -> bool:
    """Whether autograd records here."""
    if fails:
        raise ValueError("on purpose")
    return torch.is_grad_enabled()


@pytest.mark.parametrize("outside", [True, False])
def test_nothing_is_recorded_within_and_the_mode_is_as_before_afterwards(outside: bool) -> None:
    with torch.set_grad_enabled(outside):
        assert not grad_mode_within()
        assert torch.is_grad_enabled() == outside


def test_the_mode_is_as_before_after_an_exception() -> None:
    with torch.enable_grad():
        with pytest.raises(ValueError, match="on purpose"):
            grad_mode_within(fails=True)
        assert torch.is_grad_enabled()
