"""The figures of accelerators from which plans are made, and the costs of collectives and computation by them."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from composable_fsdp.errors import ConfigurationError

_MAY_BE_ZERO = ("latency_us", "per_rank_us", "reserved_gib")


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

    Raises:
        ConfigurationError: a figure is not positive. Latencies and ``reserved_gib`` may be 0.
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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) in (int, float) and not (value > 0 or (value == 0 and name in _MAY_BE_ZERO)):
                raise ConfigurationError(f"the {name} of an Accelerator must be positive, not {value!r}.")

    @property
    def bytes(self) -> int:
        """The memory that torch's allocator may use."""
        return int((self.gib - self.reserved_gib) * 2**30)

    def seconds(self, flops: float, nbytes: int, dtype: torch.dtype) -> float:
        """Return the seconds of a kernel: the longer of those of its operations and of its memory traffic."""
        peak = self.tflops if dtype.itemsize <= 2 else self.tflops_fp32 or self.tflops / 8
        memory = self.memory_gb_s * 1e9 if self.memory_gb_s else self.tflops * 1e12 / 300
        return max(flops / (1e12 * peak), nbytes / memory) / self.efficiency

    def copy_seconds(self, nbytes: int) -> float:
        """Return the seconds of a copy of ``nbytes`` bytes in device memory, which are read and written."""
        return self.seconds(0.0, 2 * nbytes, torch.float32)

    def collective_seconds(self, nbytes: int, ranks: int, messages: int = 1, *, spread: int | None = None) -> float:
        """Return the seconds of all-gathers, or of reductions, launched one after the other.

        Args:
            nbytes: the bytes of the outputs of all-gathers, or of the inputs of reductions, over all ranks.
            ranks: the number of ranks.
            messages: the number of collectives.
            spread: the number of neighbouring ranks among which these are. They fill hosts in order.
        """
        if ranks == 1 or not nbytes:
            return 0.0
        gbit = self.gbit if (spread or ranks) > self.ranks_per_host else self.link_gbit or self.gbit
        latency = 1e-6 * (self.latency_us + self.per_rank_us * (ranks - 1))
        return messages * latency + nbytes * (ranks - 1) / ranks / (gbit * 1e9 / 8)


def _known(
    name: str, tflops: float, fp32: float, gb_s: float, gb: float, gbit: float, link: float, host: float, **more: Any
) -> Accelerator:
    speed: dict[str, Any] = {"tflops": tflops, "tflops_fp32": fp32, "memory_gb_s": gb_s}
    return Accelerator(name=name, **speed, gib=gb * 1e9 / 2**30, gbit=gbit, link_gbit=link, host_gbit=host, **more)


_OF_CPU = {"latency_us": 100, "per_rank_us": 20, "reserved_gib": 0.3}
_KNOWN = (
    # Data sheets of SXM and OAM modules: TFLOPS in bf16, without sparsity, and in fp32; GB/s of memory; GB; Gbit/s
    # between hosts, with a network adapter for each device, within a host, and to its memory.
    # nvidia.com/en-us/data-center/a100, h100, h200, hgx; amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    _known("a100-80gb", 312, 19.5, 2039, 80, 200, 2400, 256),
    _known("h100-80gb", 989, 67, 3350, 80, 400, 3600, 512),
    _known("h200-141gb", 989, 67, 4800, 141, 400, 3600, 512),
    _known("b200-180gb", 2250, 75, 7700, 180, 400, 7200, 512),
    _known("mi300x-192gb", 1307, 163, 5300, 192, 400, 3584, 512),
    # A core of a server, estimated.
    _known("cpu", 0.05, 0.05, 10, 16, 10, 16, 100, has_streams=False, **_OF_CPU),
)
ACCELERATORS = MappingProxyType({each.name: each for each in _KNOWN})
"""The known accelerators by name, which has their memory."""


def as_accelerator(device: Accelerator | str) -> Accelerator:
    """Return the accelerator for the ``device=`` argument of the user. Its name may be without the memory.

    Raises:
        ConfigurationError: it is no known name.
    """
    if isinstance(device, Accelerator):
        return device
    for name, known in ACCELERATORS.items():
        if device in (name, name.partition("-")[0]):
            return known
    raise ConfigurationError(
        f"there are no figures for the device {device!r}. Known are {', '.join(ACCELERATORS)}; for others pass "
        "Accelerator(tflops=, gbit=, gib=), or --tflops, --gbit and --gib to the command."
    )
