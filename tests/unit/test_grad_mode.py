"""Functions that run without recording by autograd."""

from __future__ import annotations

import pytest
import torch

from tests._internals import CommStreams, without_grad


@without_grad
def records_inside(fails: bool = False) -> bool:
    if fails:
        raise ValueError("raised by the test")
    return torch.is_grad_enabled()


@pytest.mark.parametrize("outside", [True, False])
def test_operations_inside_are_not_recorded_and_the_mode_is_restored(outside: bool) -> None:
    with torch.set_grad_enabled(outside):
        assert not records_inside()
        assert torch.is_grad_enabled() == outside


def test_the_mode_is_restored_after_an_exception() -> None:
    with torch.enable_grad():
        with pytest.raises(ValueError, match="raised by the test"):
            records_inside(fails=True)
        assert torch.is_grad_enabled()


class FinishedWork:
    def wait(self) -> None:
        """Return at once."""


@pytest.mark.parametrize("outside", [True, False])
def test_nothing_is_recorded_when_a_collective_is_launched_and_finished(outside: bool) -> None:
    recorded: list[bool] = []

    def launch() -> FinishedWork:
        recorded.append(torch.is_grad_enabled())
        return FinishedWork()

    streams = CommStreams(torch.device("cpu"))
    with torch.set_grad_enabled(outside):
        first = streams.reduce.run(launch, lambda: recorded.append(torch.is_grad_enabled()))
        second = streams.replicate.run(launch, lambda: recorded.append(torch.is_grad_enabled()), after=first)
        second.wait()
        assert torch.is_grad_enabled() == outside
    assert recorded == [False] * 4
