"""Attaches what stands above the core, once in a process, when a program first uses a name of this library."""

from __future__ import annotations

from typing import Any

from composable_fsdp._api.fully_shard import fully_shard
from composable_fsdp._core.seams import OBSERVERS
from composable_fsdp._torch_version import warn_of_newer_torch
from composable_fsdp.diagnostics.recorded_events import TimelineRecorder
from composable_fsdp.optim.local_optimizer import LocalSteps
from composable_fsdp.plugins.torch_views import client_state

warn_of_newer_torch()

OBSERVERS += TimelineRecorder(), LocalSteps()  # diagnostics and optimizers stand above plugins


_attributes: Any = fully_shard
_attributes.state = client_state  # as torch's has
