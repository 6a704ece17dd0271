"""Meters of training, and the trackers of other libraries that they feed."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
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


STEPS = 4


@pytest.fixture
def train_step(model: nn.Module) -> Callable[[], Any]:
    def step() -> torch.Tensor:
        loss = model(torch.ones(2, 9)).square().mean()
        loss.backward()
        return loss

    step.meter = Meter(model, tokens=2, every=2)  # type: ignore[attr-defined]
    return step


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_readings_go_to_tensorboard(train_step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    meter, steps = train_step.meter, STEPS
    # [tensorboard]
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("runs/tensorboard") if dist.get_rank() == 0 else None
    for step in range(1, steps + 1):
        reading = meter(step, loss=train_step())
        if reading and writer:
            for name, value in reading.scalars.items():
                writer.add_scalar(name, value, step)
    # [end]
    assert writer is not None
    writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("runs/tensorboard").Reload()
    assert [scalar.step for scalar in events.Scalars("loss")] == [2, 4]
    assert {"tokens_per_second", "memory_bytes"} <= set(events.Tags()["scalars"])


@pytest.mark.filterwarnings("ignore")
def test_readings_go_to_wandb_without_a_network(train_step: Any, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    meter, steps = train_step.meter, STEPS
    # [wandb]
    import wandb

    run = wandb.init(project="gpt", mode="offline") if dist.get_rank() == 0 else None
    for step in range(1, steps + 1):
        reading = meter(step, loss=train_step())
        if reading and run:
            run.log(dict(reading.scalars), step=step)
    # [end]
    assert run is not None
    run.finish()
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = written.read_bytes()
    assert records.count(b"tokens_per_second") >= 2, "those of steps 2 and 4"
    assert b"memory_bytes" in records


def test_readings_stand_beside_a_progress_bar(train_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    meter, begin, steps, rank = train_step.meter, 0, STEPS, dist.get_rank()
    # [bar]
    from tqdm import tqdm

    bar = tqdm(range(begin + 1, steps + 1), disable=rank != 0)
    for step in bar:
        loss = train_step()  # the body of the loop
        if reading := meter(step, loss=loss):
            bar.set_postfix_str(str(reading))
    # [end]
    assert "4/4" in out.getvalue()
    assert "loss 0." in out.getvalue() or "loss 1." in out.getvalue(), out.getvalue()
