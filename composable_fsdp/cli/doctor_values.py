"""Reads the values of the system that the checks of ``doctor`` need."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from composable_fsdp._comm.shm.connect import host_identity
from composable_fsdp._memory.device_capabilities import current_accelerator
from composable_fsdp.cli.doctor_checks import Interface, Machine

__all__ = ["read_machine"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "GLOO_", "NCCL_", "OMP_", "COMPOSABLE_FSDP_")
_TORCHRUN_PORT = 29500
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""The files with the limit and the use of memory, of cgroups 2 and 1."""


def read_machine() -> Machine:
    """Return the values of this process's system."""
    environment = {name: v for name, v in os.environ.items() if name in _VARIABLES or name.startswith(_PREFIXES)}
    accelerator = current_accelerator()
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    return Machine(
        host=host_identity() or socket.gethostname(),
        versions={
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "numpy", "composable_fsdp")},
        },
        requirement=_requirement(),
        backends=tuple(name for name in ("gloo", "nccl", "xccl", "mpi") if dist.is_backend_available(name)),
        accelerator=accelerator.type if accelerator else "",
        native_backend=dist.get_default_backend_for_device(accelerator.type) if accelerator else "",
        devices=torch.accelerator.device_count() if accelerator else 0,
        interfaces=_interfaces(),
        host_addresses=_resolved(socket.gethostname())[0],
        shared_memory=_shared_memory(),
        limits={name: _limit(getattr(resource, f"RLIMIT_{name.upper()}")) for name in ("nofile", "memlock", "nproc")},
        memory=_cgroup_memory(),
        cores=_cores(),
        threads=torch.get_num_threads(),
        environment=environment,
        master_problem=_resolved(address)[1] if address else "",
        port_is_taken=_is_taken(int(port) if port.isdecimal() else _TORCHRUN_PORT),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _requirement() -> str:
    """Return this package's requirement for torch, or an empty text if it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for each in importlib.metadata.requires("composable-fsdp") or ():
            if each.startswith("torch") and not each[5:6].isalnum():
                return each
    return ""


def _interfaces() -> tuple[Interface, ...]:
    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = [each.address for each in entries if each.family in (socket.AF_INET, socket.AF_INET6)]
        usable = tuple(each for each in addresses if "%" not in each and not ip_address(each).is_link_local)
        is_loopback = bool(usable) and all(ip_address(each).is_loopback for each in usable)
        found.append(Interface(name, usable, is_up=name in states and states[name].isup, is_loopback=is_loopback))
    return tuple(found)


def _resolved(name: str) -> tuple[tuple[str, ...], str]:
    """Return the addresses of ``name``, and why there are none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return (), error.strerror or str(error)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found)), ""


def _shared_memory() -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.total, usage.free


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup_memory() -> tuple[int, int] | None:
    """Return the limit and the use of this process's cgroup, or ``None`` if it has no limit below the host's memory."""
    for names in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # absent, or "max"
            limit, used = (int((_CGROUPS / name).read_text()) for name in names)
            if limit < psutil.virtual_memory().total:
                return limit, used
    return None


def _cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return True
    return False
