"""The differences between devices, and between the backends of process groups.

Only this module branches on the kind of a device, or on the name or class of a backend, so that a new device has one
place. Where communicators and streams are made, they ask for capabilities once, and buckets and groups get them from
there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist

__all__ = [
    "BackendCapabilities",
    "DeviceCapabilities",
    "backend_capabilities",
    "current_accelerator",
    "current_device",
    "default_generator",
    "device_capabilities",
    "is_accelerator",
    "is_host",
    "widest_float",
]

_STAGES_THROUGH_HOST = ("", "gloo")
"""Backends that are not native to an accelerator, or none at all."""
_WITHOUT_PROCESSES = ("fake", "threaded", "simulated_accelerator", "simulated_accelerator_alone")
"""Backends without other processes, or without a device that completes work by itself."""

_AVERAGING = {"ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"}
_COALESCING = {"ProcessGroupNCCL"}
"""Classes of backends, since ``"nccl"`` names several: by release, an environment variable, and torchcomms. Other
classes have neither ability. ``ProcessGroupNCCL2`` has the coalesced calls too, but they launch once per tensor.
"""


@dataclass(frozen=True, slots=True)
class DeviceCapabilities:
    """The abilities of one kind of device.

    Args:
        module: the module of torch with its streams and events.
        has_streams: work runs on streams, and a wait orders streams. Otherwise streams are *null*: the host orders the
            work, and a wait for a collective blocks it.
        fuses_copies: one kernel that concatenates or splits many tensors also casts them, at the cost of one copy.
    """

    module: ModuleType
    has_streams: bool
    fuses_copies: bool

    def is_capturing(self) -> bool:
        """Return whether the current stream is captured, into a CUDA graph."""
        return bool(getattr(self.module, "is_current_stream_capturing", bool)())


def device_capabilities(device: torch.device) -> DeviceCapabilities:
    """Return the capabilities of ``device``. They are made once, and again where streams are simulated for a while."""
    module = torch.get_device_module(device)
    return _capabilities(module, module.Stream)


@lru_cache(maxsize=4)
def _capabilities(module: ModuleType, stream_class: object) -> DeviceCapabilities:
    # Not a new stream: torch has 32 per priority, and each request takes the next one.
    has_streams = module.current_stream().record_event() is not None
    return DeviceCapabilities(module, has_streams=has_streams, fuses_copies=has_streams)


@dataclass(frozen=True, slots=True)
class BackendCapabilities:
    """The abilities of a process group for tensors on one kind of device.

    Args:
        name: the name of the backend; an empty text if the process group has none for this kind of device.
        averages: reductions can compute averages.
        coalesces: several all-gathers, or several reduce-scatters, can be one launch.
        is_watchable: operations run in processes with a store, and can be lost and aborted.
        has_own_transports: the library has transports of its own, in shared memory and over this backend.
    """

    name: str
    averages: bool
    coalesces: bool
    is_watchable: bool
    has_own_transports: bool

    @property
    def is_native(self) -> bool:
        """True if the backend moves the memory of an accelerator without staging it through the host."""
        return self.name not in _STAGES_THROUGH_HOST


def backend_capabilities(group: dist.ProcessGroup, device_type: str) -> BackendCapabilities:
    """Return the capabilities of ``group`` for tensors on ``device_type``.

    ``dist.get_backend`` returns what ``init_process_group`` was given: ``"cpu:gloo,cuda:nccl"`` as it is, and
    ``"undefined"`` if it was given nothing.
    """
    backends = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",") if ":" in part)
    name = backends.get(device_type, "")
    backend: Any = group  # a process group in Python is its own backend
    if type(group) is dist.ProcessGroup:
        device = torch.device(device_type)
        backend = group._get_backend(device) if device in group._device_types else None
    wrapped = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL: has no coalesced calls
    classes, wrapped_classes = (frozenset(each.__name__ for each in type(b).__mro__) for b in (backend, wrapped))
    return BackendCapabilities(
        name=name,
        averages=bool(_AVERAGING & wrapped_classes),
        coalesces=bool(_COALESCING & classes),
        is_watchable=name not in _WITHOUT_PROCESSES,
        has_own_transports=device_type == "cpu" and "ProcessGroupGloo" in wrapped_classes,
    )


def is_host(device: torch.device) -> bool:
    """Return whether ``device`` is the memory of the host."""
    return device.type == "cpu"


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` has memory of its own."""
    return device.type not in ("cpu", "meta")


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype of ``device``: Apple's has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def current_accelerator() -> torch.device | None:
    """Return the kind of accelerator of this machine, without an index; ``None`` if there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def current_device(device_type: str) -> torch.device:
    """Return the device of this type on which this process computes."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operations on ``device`` use."""
    if is_host(device):
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    module.init()
    return cast(torch.Generator, module.default_generators[device.index])
