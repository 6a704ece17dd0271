"""The figures of accelerators from which plans are made, and the costs of collectives and computation by them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

import torch

from composable_fsdp.errors import ArgumentTypeError, ConfigurationError
from composable_fsdp.plan.simulate import CollectiveCost

KnownAccelerator = Literal["a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb", "mi300x-192gb", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The speed and the memory of the device of one rank.

    Args:
        tflops: dense 10^12 floating-point operations per second in bf16 or fp16.
        gbit: the 10^9 bits per second that one rank sends to other hosts, and receives at the same time.
        gib: the memory of the device in GiB.
        name: the name in reports.
        tflops_fp32: the same as ``tflops`` for fp32. An eighth of it by default.
        memory_gb_s: the 10^9 bytes per second that the device reads or writes in its memory. By default a byte for 300
            operations.
        link_gbit: the same as ``gbit`` within a host. By default equal to it.
        host_gbit: the same between device and host memory, for offloaded parameters.
        ranks_per_host: the number of ranks of a host.
        latency_us: microseconds for a collective between two ranks, and ``per_rank_us`` for each further one.
            Estimated.
        efficiency: the share of ``tflops`` and ``memory_gb_s`` that kernels reach. Estimated.
        reserved_gib: the memory that others than torch's allocator use, such as the driver and NCCL. Estimated.
        has_streams: the device computes beside collectives. Otherwise waits block the host, as on a CPU.
        source: the origin of the figures.

    Raises:
        ConfigurationError: a figure is not a positive number. Latencies and ``reserved_gib`` may be 0.
    """

    tflops: float
    gbit: float
    gib: float
    name: str = "custom"
    tflops_fp32: float | None = None
    memory_gb_s: float | None = None
    link_gbit: float | None = None
    host_gbit: float = 256.0
    ranks_per_host: int = 8
    latency_us: float = 20.0
    per_rank_us: float = 0.5
    efficiency: float = 0.6
    reserved_gib: float = 1.0
    has_streams: bool = True
    source: str = "given"

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.name not in _NOT_NUMBERS):
            value = getattr(self, name)
            least = "at least 0" if name in _MAY_BE_ZERO else "positive"
            is_number = isinstance(value, int | float) and math.isfinite(value)
            is_right = is_number and (value > 0 or (value == 0 and name in _MAY_BE_ZERO))
            if not is_right and not (value is None and name in _OPTIONAL):
                raise ConfigurationError(f"the {name} of an Accelerator must be a number and {least}, not {value!r}.")

    @property
    def bytes(self) -> int:
        """The memory that torch's allocator may use."""
        return int((self.gib - self.reserved_gib) * 2**30)

    def seconds(self, flops: float, nbytes: int, dtype: torch.dtype) -> float:
        """Return the seconds of a kernel: the longer of those of its operations and of its memory traffic."""
        peak = self.tflops if dtype.itemsize <= 2 else self.tflops_fp32 or self.tflops / 8
        memory = self.memory_gb_s * 1e9 if self.memory_gb_s else self.tflops * 1e12 / 300
        return max(flops / (1e12 * peak), nbytes / memory) / self.efficiency

    def collective_cost(self, *, crosses_hosts: bool) -> CollectiveCost:
        """Return the cost of an all-gather or a reduce-scatter between ranks of one host, or of several."""
        gbit = self.gbit if crosses_hosts else self.link_gbit or self.gbit
        return CollectiveCost(self.latency_us * 1e-6, gbit * 1e9 / 8, self.per_rank_us * 1e-6)


_OPTIONAL = ("tflops_fp32", "memory_gb_s", "link_gbit")
_NOT_NUMBERS = ("name", "has_streams", "source")
_MAY_BE_ZERO = ("latency_us", "per_rank_us", "reserved_gib")

_TABLE = """
a100-80gb      312 19.5 2039  80 200 2400 256 www.nvidia.com/en-us/data-center/a100/
h100-80gb      989   67 3350  80 400 3600 512 www.nvidia.com/en-us/data-center/h100/
h200-141gb     989   67 4800 141 400 3600 512 www.nvidia.com/en-us/data-center/h200/
b200-180gb    2250   75 7700 180 400 7200 512 www.nvidia.com/en-us/data-center/hgx/
mi300x-192gb  1307  163 5300 192 400 3584 512 www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
"""
"""Data sheets of SXM and OAM modules: TFLOPS in bf16, without sparsity, and in fp32; GB/s of memory; GB; Gbit/s between
hosts, with a network adapter for each device, within a host, and to its memory; the source."""


def _known() -> Iterator[Accelerator]:
    names = ("tflops", "tflops_fp32", "memory_gb_s", "gib", "gbit", "link_gbit", "host_gbit")
    for name, *figures, source in map(str.split, _TABLE.strip().splitlines()):
        given: dict[str, Any] = dict(zip(names, map(float, figures), strict=True))
        given["gib"] *= 1e9 / 2**30  # from GB
        yield Accelerator(**given, name=name, source=f"https://{source}")
    cpu: dict[str, Any] = dict(zip(names, (0.05, 0.05, 10, 16, 10, 16, 100), strict=True))
    latencies: dict[str, Any] = {"latency_us": 100, "per_rank_us": 20, "reserved_gib": 0.3}
    yield Accelerator(**cpu, **latencies, name="cpu", has_streams=False, source="a core of a server, estimated")


ACCELERATORS = MappingProxyType({each.name: each for each in _known()})
"""The known accelerators by name, which has their memory."""


def as_accelerator(device: Accelerator | str) -> Accelerator:
    """Return the accelerator for the ``device=`` argument of the user. Its name may be without the memory.

    Raises:
        ConfigurationError: it is no known name.
    """
    if isinstance(device, Accelerator):
        return device
    if not isinstance(device, str):
        raise ArgumentTypeError(f"device must be an Accelerator or the name of a known one, not {device!r}.")
    found = [each for name, each in ACCELERATORS.items() if device.lower() in (name, name.partition("-")[0])]
    if not found:
        raise ConfigurationError(
            f"there are no figures for the device {device!r}. Known are {', '.join(ACCELERATORS)}; for others pass "
            "Accelerator(tflops=, gbit=, gib=), or --tflops, --gbit and --gib to the command."
        )
    return found[0]
