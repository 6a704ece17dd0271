"""torch's ``FSDPMemTracker``, unmodified, on a sharded model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

import composable_fsdp as ours
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import SOCKETS

pytestmark = pytest.mark.behaviour("I-01", "I-03")

WIDTH = 256
BLOCKS = 3
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
MODEL_BYTES = BLOCKS * BLOCK_BYTES
ALIGNMENT = 4096
"""An upper bound of the padding between parameters in messages, in bytes."""
Snapshots = dict[str, list[dict[str, int]]]


def build_model(shard: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)])
    for block in model:
        shard(block)
    return shard(model)


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


def track_step(
    shard: Callable[..., Any], before_step: Callable[[FSDPMemTracker], None] | None = None
) -> tuple[dict[str, int], dict[str, Snapshots]]:
    """Return the peak bytes of one step by kind, and the bytes of each block in each state by kind."""
    model = build_model(shard)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    tracker = FSDPMemTracker(model, optimizer)
    x = inputs()
    tracker.track_inputs((x,))
    with tracker:
        model(x).sum().backward()
        if before_step is not None:
            before_step(tracker)
        optimizer.step()
    peak = named(tracker.get_tracker_snapshot("peak"))
    modules = {
        stats.mod_fqn: {state.value: [named(each) for each in taken] for state, taken in stats.snapshots.items()}
        for stats in tracker.memory_tracking.values()
    }
    train_after_tracking(model, optimizer)
    return peak, modules


def await_gloo(tracker: FSDPMemTracker) -> None:
    """Wait until gloo has released the message of torch's last reduce-scatter.

    Gloo's thread releases it some time after the wait returns. On a busy machine this happened during the optimizer's
    step, so that the peak included the message.
    """
    end = time.monotonic() + 10.0
    while named(tracker.get_tracker_snapshot("current"))["Temp"]:
        assert time.monotonic() < end, "temporary memory is not freed after backward"
        time.sleep(0.01)


def named(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
    (of_cpu,) = snapshot.values()
    return {getattr(kind, "value", kind): size for kind, size in of_cpu.items()}


def train_after_tracking(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Check training after the tracker is removed, and after a forward that raises."""
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, WIDTH + 1))
    model(inputs()).sum().backward()
    optimizer.step()
    assert all(type(p.grad).__name__ == "DTensor" for p in model.parameters())


@on_ranks(2, environment=SOCKETS)
def test_the_memory_tracker_reports_as_for_fsdp2() -> None:
    track_step(ours.fully_shard)  # torch up to 2.11 allocates in the first step of a process, to propagate shardings
    peak, modules = track_step(ours.fully_shard)
    torchs_peak, torchs_modules = track_step(peer.fully_shard, await_gloo)
    assert modules.keys() == torchs_modules.keys()
    for kind in ("Sharded Param", "Unsharded Param", "OptState", "Inputs"):
        assert peak[kind] == torchs_peak[kind], kind
    assert peak["Sharded Param"] == MODEL_BYTES // 2
    assert peak["Sharded Grad"] == pytest.approx(MODEL_BYTES // 2, rel=1e-3)  # slots are aligned
    assert peak["Total"] == pytest.approx(torchs_peak["Total"], rel=1e-3)
    for name, states in modules.items():
        assert [s["Unsharded Param"] for s in states["After Pre-Forward"]] == [BLOCK_BYTES], name
        assert [s["Unsharded Param"] for s in states["After Post-Forward"]] == [0], name
        assert states["Before Post-Backward"][0]["Unsharded Grad"] >= BLOCK_BYTES, name
        arriving = BLOCK_BYTES // 2  # received rows of the other rank, which are freed after they are summed
        peak_of_torch = torchs_modules[name]["Peak Backward"][0]["Total"]
        assert states["Peak Backward"][0]["Total"] <= peak_of_torch + arriving + ALIGNMENT, name


@on_ranks(2)
def test_a_group_of_several_modules_is_tracked_once_and_again() -> None:
    model: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    ours.fully_shard([model[0], model[1]])
    ours.fully_shard(model)
    for _ in range(2):
        tracker = FSDPMemTracker(model)
        with tracker:
            model(torch.ones(2, 8)).sum().backward()
        assert {stats.mod_fqn for stats in tracker.memory_tracking.values()} == {
            "FSDPSequential",
            "FSDPSequential.0",
            "FSDPSequential.1",
        }
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
