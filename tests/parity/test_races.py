"""Training on a simulated accelerator has no races, and each wait of the package is needed for that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import composable_fsdp
from composable_fsdp import CommunicationPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from composable_fsdp.codecs import ErrorFeedback, Int8
from composable_fsdp.testing import SimulatedEvent, SimulatedStream, simulated_accelerator
from tests._internals import InFlight
from tests.helpers.simulated_offload import simulated_offload

PACKAGE = Path(composable_fsdp.__file__).parent
WIDTH, STEPS = 64, 3


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("simulated_accelerator_alone", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


class Block(nn.Module):
    """Two linear layers, recomputed in backward if asked for."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self.layers, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.layers(x)  # type: ignore[no-any-return]


@simulated_offload()
def train(mesh: DeviceMesh, prepare: Callable[[Any], object] = id, library: Any = fully_shard, **options: Any) -> None:
    """Train some steps, the second of which runs twice without synchronizing gradients."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        library(block, mesh=mesh, **options)
    library(model, mesh=mesh, **options)
    model[1].recomputes = True
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for step in range(STEPS):
        for is_last in [False, True] if step == 1 else [True]:
            model.set_requires_gradient_sync(is_last)
            model(torch.randn(8, WIDTH)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(8, WIDTH))


BF16: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(**BF16)},
    "stays unsharded": {"reshard_after_forward": False},
    "unfused": {"prepare": lambda model: model.set_max_fused_bytes(0)},
    "deep prefetch": {"prepare": lambda model: (model.set_max_fused_bytes(0), model.set_prefetch_limit(3))},
    "smaller mesh": {"reshard_after_forward": 2},
    "own reduce group": {"prepare": lambda model: model.set_separate_reduce_scatter_group(True)},
    "bounded": {"prepare": lambda model: (model.set_max_fused_bytes(0), model.set_max_unsharded_bytes(1 << 17))},
    "one reduction in flight": {
        "prepare": lambda model: (model.set_max_fused_bytes(0), model.set_reduce_scatter_max_input_buffers(1))
    },
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "offload, unfused, bf16": {
        "offload_policy": CPUOffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(**BF16),
        "prepare": lambda model: model.set_max_fused_bytes(0),
    },
    "unused parameters reduced": {"prepare": lambda model: model.set_reduce_scatter_unused_params(True)},
    "sums held unsharded": {"prepare": lambda model: model.set_requires_all_reduce(False)},
    "own optimizer event": {
        "prepare": lambda model: model.set_post_optim_event(torch.cpu.current_stream().record_event())  # type: ignore[func-returns-value]
    },
    "int8 both ways": {
        "comm_policy": CommunicationPolicy(all_gather=Int8(), reduce_scatter=ErrorFeedback(Int8()), min_numel=1)
    },
}


@pytest.mark.parametrize("axes", [("shard",), ("replicate", "shard")], ids=["sharded", "hybrid"])
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_training_has_no_races(mesh: DeviceMesh, axes: tuple[str, ...], options: dict[str, Any]) -> None:
    with simulated_accelerator() as device:
        train(mesh[axes] if len(axes) == 1 else mesh, **options)
    assert [str(race) for race in device.races] == []


@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp32", "bf16"])
def test_fsdp2_of_torch_has_no_races_either(mesh: DeviceMesh, is_bf16: bool) -> None:
    options: dict[str, Any] = {"mp_policy": TorchMixedPrecisionPolicy(**BF16)} if is_bf16 else {}
    with simulated_accelerator() as device:
        train(mesh["shard"], library=torch_fully_shard, **options)
    assert [str(race) for race in device.races] == []


Site = tuple[str, str, str]
"""A call of a stream or an event in the package: file, function and method."""

ORDERING = {SimulatedStream: ("wait_stream", "wait_event", "record_event"), SimulatedEvent: ("wait", "record")}


def train_without(mesh: DeviceMesh, left_out: Site | None, **options: Any) -> tuple[list[object], set[Site]]:
    """Train without the calls of one site. Return the races and errors, and all sites."""
    sites: set[Site] = set()

    def seen(kind: type, name: str) -> Any:
        original = getattr(kind, name)

        def method(self: Any, *args: Any) -> Any:
            frame = sys._getframe(1)
            path = Path(frame.f_code.co_filename)
            if not path.is_relative_to(PACKAGE) or path.is_relative_to(PACKAGE / "testing"):
                return original(self, *args)
            site = str(path.relative_to(PACKAGE)), frame.f_code.co_name, name
            sites.add(site)
            if site != left_out:
                return original(self, *args)
            return SimulatedEvent(self._accelerator) if name == "record_event" else None

        return method

    failures: list[object] = []
    with simulated_accelerator() as device:
        for kind, names in ORDERING.items():
            for name in names:
                patch = mock.patch.object(kind, name, seen(kind, name))
                patch.start()
        try:
            train(mesh, **options)
        except RuntimeError as error:
            failures.append(error)
        finally:
            mock.patch.stopall()
    return [*device.races, *failures], sites


UNNOTICED = {
    ("_memory/streams.py", "blocks_the_host", "record_event"): "asks whether the device has streams",
    ("_memory/streams.py", "__init__", "record_event"): "asks whether the device has streams",
}
"""The sites whose calls can be left out without a race or an error, with the reason."""


def test_each_wait_of_the_package_is_needed(mesh: DeviceMesh) -> None:
    options = SETTINGS["unfused"]
    races, sites = train_without(mesh, None, **options)
    assert not races
    assert len(sites - UNNOTICED.keys()) == 6
    assert {site for site in sites if not train_without(mesh, site, **options)[0]} == UNNOTICED.keys()


def test_buffers_that_are_dropped_before_the_wait_are_noticed(mesh: DeviceMesh) -> None:
    enqueue = InFlight.enqueue

    def drop_early(self: Any, *args: Any) -> None:
        enqueue(self, *args)
        self._owned = self._held = None

    with mock.patch.object(InFlight, "enqueue", drop_early), simulated_accelerator() as device:
        train(mesh, **SETTINGS["unfused"])
    assert "reuse" in {race.kind for race in device.races}
