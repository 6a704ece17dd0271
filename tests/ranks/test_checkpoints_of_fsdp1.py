"""State dicts of torch's FSDP1 are loaded: from rank 0, and from a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import Full, load_optimizer_state_dict, load_safetensors, load_state_dict, state_dict
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install '.[checkpoint]'")


def trained_with_fsdp1() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the full state dicts of a model that FSDP1 has trained, and of its optimizer; the latter on rank 0."""
    task, rank = TASKS["mlp"], dist.get_rank()
    model = FSDP1(task.build(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        task.loss(model, task.batch_of(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with FSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        return {name: value.clone() for name, value in model.state_dict().items()}, FSDP1.optim_state_dict(
            model, optimizer
        )


@pytest.mark.behaviour("F-04", "F-05", "F-09")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_ranks(2)
def test_full_state_dicts_of_fsdp1_are_loaded(tmp_path: Path) -> None:
    path, rank, task = tmp_path, dist.get_rank(), TASKS["mlp"]
    full, optimizer_state = trained_with_fsdp1()
    model = shard_layers(task.build(), fully_shard)
    load_state_dict(model, full if rank == 0 else {}, broadcast_from_rank0=True)
    loaded = state_dict(model, Full())
    assert loaded.keys() == full.keys()
    assert all(torch.equal(loaded[name], value) for name, value in full.items())

    optimizer = torch.optim.AdamW(model.parameters())
    load_optimizer_state_dict(model, optimizer, optimizer_state if rank == 0 else {}, broadcast_from_rank0=True)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for name, parameter in model.named_parameters():
        moment = optimizer.state[parameter]["exp_avg"].full_tensor()
        if rank == 0:
            assert torch.equal(moment, optimizer_state["state"][name]["exp_avg"]), name

    if rank == 0:
        safetensors.save_file(full, path / "model.safetensors")
    dist.barrier()
    again = shard_layers(task.build(), fully_shard)
    load_safetensors(again, path)
    assert all(torch.equal(value, full[name]) for name, value in state_dict(again, Full()).items())
