"""Asynchronous saves: training goes on while one is written, and later calls wait for it."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Timer

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from composable_fsdp import fully_shard, local_optimizer
from composable_fsdp.checkpoint import latest, load, load_safetensors, save, save_safetensors
from tests.helpers.checkpoint_worlds import Gate, all_ranks_raise, local, train
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks


@pytest.mark.behaviour("F-11", "F-12")
@on_ranks(2, timeout=60)
def test_the_next_operation_waits_for_the_save(tmp_path: Path) -> None:
    """Run operations on rank 0 while rank 1, with a slow disk, is still writing."""
    model, slow = nn.Linear(3, 3), dist.get_rank() == 1
    save_safetensors(model, tmp_path / "files")
    calls = {
        "save": lambda: save(tmp_path / "run", model),
        "load": lambda: load(tmp_path / "run", model),
        "save_safetensors": lambda: save_safetensors(model, tmp_path / "files"),
        "load_safetensors": lambda: load_safetensors(model, tmp_path / "files"),
    }
    for call in calls.values():
        with pytest.MonkeyPatch.context() as monkeypatch:
            gate = Gate(monkeypatch)
            pending = save(tmp_path / "run", model, asynchronous=True, timeout=20)
            Timer(0.3 if slow else 0, gate.opened.set).start()
            call()
        assert pending.done()
        assert latest(tmp_path / "run") is not None


@pytest.mark.behaviour("F-12")
@on_ranks(2, timeout=60)
def test_a_failed_save_is_raised_by_the_next_operation(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    save_safetensors(model, tmp_path / "files")
    with pytest.MonkeyPatch.context() as monkeypatch:
        gate = Gate(monkeypatch)
        pending = save(tmp_path / "run", model, asynchronous=True, timeout=1)
        if dist.get_rank() == 0:
            gate.opened.set()
            while not pending.done():
                time.sleep(0.01)
        dist.barrier()
        gate.opened.set()
        with all_ranks_raise(
            rf"^the save before load_safetensors: .*saving {tmp_path}/run/step-00000000: rank [01]: gone"
        ):
            load_safetensors(model, tmp_path / "files")
    load_safetensors(model, tmp_path / "files")


@pytest.mark.behaviour("F-07", "F-12")
@on_ranks(2)
def test_training_continues_while_a_save_is_written(tmp_path: Path) -> None:
    task, optimizers = TASKS["tied"], []
    model = shard_layers(task.build(), fully_shard)
    optimizer = local_optimizer(torch.optim.AdamW(model.parameters()))
    train(model, optimizer, task, range(2), 2)
    save(tmp_path / "sync", model, optimizer)
    with pytest.MonkeyPatch.context() as monkeypatch:
        gate = Gate(monkeypatch)
        pending = save(tmp_path / "async", model, optimizer, asynchronous=True)
        train(model, optimizer, task, range(2, 4), 2)  # with collectives of its own
        assert not pending.done()
        gate.opened.set()
        pending.wait()
    for kind in ("sync", "async"):
        model = shard_layers(task.build(), fully_shard)
        optimizers.append(torch.optim.AdamW(model.parameters()))
        load(tmp_path / kind, model, optimizers[-1])
    for first, second in zip(optimizers[0].param_groups[0]["params"], model.parameters(), strict=True):
        assert torch.equal(local(first), local(second))
        states = optimizers[0].state[first], optimizers[1].state[second]
        for key in ("exp_avg", "exp_avg_sq"):
            assert local(states[0][key]).any() or not local(first).numel()
            assert torch.equal(local(states[0][key]), local(states[1][key]))

    state = {n: torch.zeros_like(v) for n, v in model.state_dict().items()}
    nested = {"model": state}
    dcp.load(nested, checkpoint_id=tmp_path / "sync" / "step-00000000")
    for name, value in model.state_dict().items():
        assert torch.equal(local(state[name]), local(value)), name
