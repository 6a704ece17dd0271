"""Meters of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.diagnostics import Meter, Reading, meters
from composable_fsdp.errors import ConfigurationError


class Clock:
    """The time of meters, which stands still."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(meters, "time", found)
    return found


@pytest.fixture
def model() -> Iterator[nn.Module]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield fully_shard(nn.Linear(9, 10))
    dist.destroy_process_group()


def test_speed_and_utilization_are_those_of_the_steps_since_the_last_reading(clock: Clock, model: nn.Module) -> None:
    meter = Meter(model, tokens=50, every=2, peak_flops=1e6)
    clock.now += 1.0
    assert meter(1, loss=3.0) is None
    clock.now += 3.0
    reading = meter(2, loss=torch.tensor(2.5, requires_grad=True))
    assert reading is not None
    assert reading.step == 2
    memory = reading.scalars["memory_bytes"]
    assert memory > 1 << 20
    assert reading.scalars == {
        "loss": 2.5,
        "seconds_per_step": 2.0,
        "tokens_per_second": 25.0,
        "memory_bytes": memory,
        "mfu": pytest.approx(6 * 100 * 25.0 / 1e6),
        "exposed_share": 0.0,
    }
    clock.now += 0.5
    with meter.paused():
        clock.now += 60.0
    assert meter.read(3).scalars["seconds_per_step"] == 0.5
    meter.start(10)
    clock.now += 1.0
    assert meter.read(12).scalars["seconds_per_step"] == 0.5


def test_waits_for_collectives_are_the_exposed_share(clock: Clock, model: nn.Module, monkeypatch) -> None:
    waited = [1.0]
    monkeypatch.setattr(Meter, "_seconds_waited", lambda self: waited[0])
    meter = Meter(model, tokens=1)
    clock.now += 4.0
    waited[0] += 1.0
    with meter.paused():
        clock.now += 2.0
        waited[0] += 2.0
    assert meter.read(1).scalars["exposed_share"] == 0.25
    waited[0] = None  # type: ignore[call-overload]
    meter.start(1)
    assert "exposed_share" not in meter.read(2).scalars


@pytest.mark.parametrize("options", [{"tokens": 0}, {"tokens": 8, "every": 0}, {"tokens": 8, "peak_flops": -1.0}])
def test_numbers_must_be_positive(model: nn.Module, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"^Meter: \w+ must be a positive number, not -?\d"):
        Meter(model, **options)


def test_a_plain_model_has_no_meter() -> None:
    with pytest.raises(ConfigurationError, match="sharded"):
        Meter(nn.Linear(2, 2), tokens=1)


READING = Reading(
    7, {"loss": 2.0, "tokens_per_second": 12345.6, "memory_bytes": 3.0 * 2**20, "mfu": 0.421, "exposed_share": 0.05}
)


def test_a_reading_is_one_line() -> None:
    assert str(READING) == "loss 2.000  12,346 tokens/s  3 MiB  42.1% MFU  5.0% exposed"
