"""Training on a simulated accelerator has no races, and each wait of the package is needed for that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import composable_fsdp
from composable_fsdp.testing import SimulatedEvent, SimulatedStream, simulated_accelerator
from tests._internals import InFlight
from tests.helpers.stream_training import BF16, SETTINGS, TRAININGS, alone, train

PACKAGE = Path(composable_fsdp.__file__).parent


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[DeviceMesh]:
    with alone() as mesh:
        yield mesh


@pytest.mark.parametrize("name", TRAININGS)
def test_training_has_no_races(name: str) -> None:
    with simulated_accelerator() as device:
        TRAININGS[name]()
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
    ("_memory/streams.py", "wait_for_current", "record_event"): "for waits on another stream than the next launch's",
    ("_memory/streams.py", "wait_for_current", "wait_event"): "for waits on another stream than the next launch's",
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

    def drop_early(self: Any, *args: Any, **options: Any) -> None:
        enqueue(self, *args, **options)
        if self._done:
            self._owned = self._held = None

    with mock.patch.object(InFlight, "enqueue", drop_early), simulated_accelerator() as device:
        train(mesh, **SETTINGS["unfused"])
    assert "reuse" in {race.kind for race in device.races}
