"""The plan of a training step as values, and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from composable_fsdp._text import text_table
from composable_fsdp.plan.known_accelerators import Accelerator


@dataclass(frozen=True)
class Row:
    """One kind of memory of the first rank, which has the largest shards.

    Args:
        name: the kind.
        bytes: the bytes at the peak of all kinds together.
        largest: the most bytes of this kind at any time.
    """

    name: str
    bytes: int
    largest: int


@dataclass(frozen=True, repr=False)
class Plan:
    """The memory and the time of a training step, predicted without the model's memory and without other ranks.

    ``print(plan)`` shows it, and so does a notebook.

    Args:
        model: the class of the model, with ``parameters`` elements in ``groups`` groups.
        mesh: the shape of the mesh, such as ``"8x64"``.
        device: the accelerator of each rank.
        rows: the memory by kind.
        peak_bytes: the most bytes of tensors on the device at any time.
        peak_place: where that is.
        host_bytes: the bytes of offloaded shards, gradients and optimizer state in host memory.
        seconds: the time of a step: forward, backward and optimizer.
        exposed: the part of it in which only collectives run.
        mfu: the share of the device's peak speed that the model's own operations use, recomputation included.
    """

    model: str
    parameters: int
    groups: int
    mesh: str
    device: Accelerator
    rows: tuple[Row, ...]
    peak_bytes: int
    peak_place: str
    host_bytes: int
    seconds: float
    exposed: float
    mfu: float

    @property
    def fits(self) -> bool:
        """True if the device has memory for the peak."""
        return self.peak_bytes <= self.device.bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as values for JSON."""
        return {**asdict(self), "fits": self.fits}

    def memory_text(self) -> str:
        """Return the peak with its share of the device's memory."""
        share = 100 * self.peak_bytes / max(self.device.bytes, 1)
        return f"{size_text(self.peak_bytes)}, {share:.0f} % of {size_text(self.device.bytes)}"

    def __repr__(self) -> str:
        waits = f"{time_text(self.exposed)} ({100 * self.exposed / max(self.seconds, 1e-12):.0f} %)"
        lines = {
            "model": f"{self.model}, {self.parameters:,} parameters in {self.groups} groups",
            "job": f"{self.mesh} ranks of {self.device.name}, {self.device.ranks_per_host} per host",
            "memory": f"{'fits' if self.fits else 'does NOT fit'}: {self.memory_text()}",
            "peak": f"{size_text(self.peak_bytes)} in {self.peak_place}",
            "host memory": size_text(self.host_bytes) if self.host_bytes else "",
            "step": f"{time_text(self.seconds)}, of which {waits} exposed communication",
            "MFU": f"{100 * self.mfu:.0f} %",
        }
        titles = ("at the peak", "at most")
        rows = [(f"{row.name:<15}", size_text(row.bytes), size_text(row.largest)) for row in self.rows]
        return "\n".join(
            [f"{title:<15}  {text}" for title, text in lines.items() if text]
            + ["", text_table(("memory", *titles), rows, titles)]
        )


def size_text(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def time_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"
