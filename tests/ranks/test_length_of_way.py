"""Limit the number of files, stack frames and calls of the package that run for one parameter group.

The files and frames are a cost like time and memory, because a person who debugs a step reads all of them. The number
of calls is most of the host time of small groups.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_fsdp
from composable_fsdp import fully_shard
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import SOCKETS

# Bounds may only be lowered. Aims: 15 files and 12 frames in forward, 18 files in backward, 20 files in fully_shard.
# Of the files, 7, 6 and 11 are of plugins, codecs and reports that are attached by default. In forward, one file and
# two calls are the `__getattr__` of sharded modules, which torch's own modules have too.
FORWARD_FILES, FORWARD_DEPTH, FORWARD_CALLS = 17, 12, 86
BACKWARD_FILES, BACKWARD_DEPTH, BACKWARD_CALLS = 17, 12, 150
SHARD_FILES, SHARD_DEPTH = 28, 12

PACKAGE = f"{Path(composable_fsdp.__file__).parent}{os.sep}"

WIDTH = 1024
"""A weight of 4 MiB, which is gathered alone."""

WARM_UP = 6
"""Steps until the ranks no longer compare operations before they run."""

LAYERS, MIDDLE = 5, 2
"""The number of groups below the root, and the index of the measured one: neither the first nor the last."""


class Way:
    """The files of the package that run while it is entered, the number of calls, and the maximum stack depth."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.depth = 0
        self.calls = 0

    def __enter__(self) -> Way:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not _is_ours(frame):
            return
        self.calls += 1
        self.files.add(frame.f_code.co_filename.removeprefix(PACKAGE))
        depth, each = 0, cast("FrameType | None", frame)
        while each is not None:
            depth += _is_ours(each)
            each = each.f_back
        self.depth = max(self.depth, depth)

    def assert_at_most(self, *, files: int, depth: int, calls: int | None = None) -> None:
        found = f"{len(self.files)} files, {self.depth} frames deep, {self.calls} calls:"
        text = "\n".join([found, *sorted(self.files)])
        assert len(self.files) <= files, text
        assert self.depth <= depth, text
        assert calls is None or self.calls <= calls, text


def _is_ours(frame: FrameType) -> bool:
    """Return whether ``frame`` belongs to the package. ``run_ranks``, which calls the tests, does not count."""
    path = frame.f_code.co_filename
    return path.startswith(PACKAGE) and not path.startswith(f"{PACKAGE}testing{os.sep}")


class Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reached: Callable[[], object]) -> torch.Tensor:
        ctx.reached = reached
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.reached()
        return gradient, None


class Measured(nn.Module):
    """Calls ``layer`` inside ``forward_way`` if that is set, and its backward inside ``backward_way``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.forward_way: Way | None = None
        self.backward_way: Way | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forward_way is None or self.backward_way is None:
            return cast(torch.Tensor, self.layer(x))
        x = cast(torch.Tensor, Boundary.apply(x, self.backward_way.__exit__))
        with self.forward_way:
            x = self.layer(x)
        return cast(torch.Tensor, Boundary.apply(x, self.backward_way.__enter__))


def measure_a_steady_step() -> tuple[Way, Way]:
    torch.manual_seed(0)
    layers = [Measured(nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    for each in layers:
        fully_shard(each.layer, reshard_after_forward=True)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, WIDTH)
    forward, backward = Way(), Way()
    for step in range(WARM_UP + 1):
        if step == WARM_UP:
            layers[MIDDLE].forward_way, layers[MIDDLE].backward_way = forward, backward
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return forward, backward


@on_ranks(2, environment=SOCKETS)
def test_a_steady_step_of_one_group_passes_through_few_files_and_calls() -> None:
    forward, backward = measure_a_steady_step()
    switches = int("spmd_types" in sys.modules)  # torch 2.14 imports it if it is installed; hooks switch its checks off
    forward.assert_at_most(
        files=FORWARD_FILES + switches, depth=FORWARD_DEPTH + switches, calls=FORWARD_CALLS + 4 * switches
    )
    backward.assert_at_most(
        files=BACKWARD_FILES + switches, depth=BACKWARD_DEPTH + switches, calls=BACKWARD_CALLS + 8 * switches
    )


@on_ranks(2, environment=SOCKETS)
def test_fully_shard_of_a_linear_layer_passes_through_few_files() -> None:
    mesh, linear, way = init_device_mesh("cpu", (2,)), nn.Linear(8, 8), Way()
    first = fully_shard(nn.Linear(8, 8), mesh=mesh)  # installs hooks that exist once per process and are not measured
    with way:
        fully_shard(linear, mesh=mesh)
    del first
    way.assert_at_most(files=SHARD_FILES, depth=SHARD_DEPTH)
