"""A meter's readings in TensorBoard, in Weights & Biases and beside a progress bar, as the pages show them."""

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
from composable_fsdp.diagnostics import Meter

STEPS = 4


@pytest.fixture
def train_step() -> Iterator[Callable[[], Any]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(nn.Linear(9, 10))

    def step() -> torch.Tensor:
        loss = model(torch.ones(2, 9)).square().mean()
        loss.backward()
        return loss

    step.meter = Meter(model, tokens=2, every=2)  # type: ignore[attr-defined]
    yield step
    dist.destroy_process_group()


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
