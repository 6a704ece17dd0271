"""The plan of a training step as values, and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from composable_fsdp.plan.known_accelerators import Accelerator
from composable_fsdp.plan.simulate import Span

MiB, GiB = 2**20, 2**30


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
        settings: the settings of ``plan`` and ``fully_shard`` that were given, as texts.
        dtypes: those of ``"shards"``, ``"computation"`` and ``"optimizer state"``, as texts.
        keeps_cache: the model returns a key/value cache, as those of transformers do by default.
        rows: the memory by kind.
        peak_bytes: the most bytes of tensors on the device at any time.
        peak_place: where that is.
        host_bytes: the bytes of offloaded shards, gradients and optimizer state in host memory, rounded up as pinned.
        seconds: the time of a step: forward, backward and optimizer.
        exposed: the part of it in which only collectives run.
        mfu: the share of the device's peak speed that the model's own operations use, recomputation included.
        spans: the predicted intervals of computation and of collectives, without the optimizer.
        curve: the memory of each kind, in the order of ``rows``, over the seconds of computation.
    """

    model: str
    parameters: int
    groups: int
    mesh: str
    device: Accelerator
    settings: Mapping[str, str]
    dtypes: Mapping[str, str]
    keeps_cache: bool
    rows: tuple[Row, ...]
    peak_bytes: int
    peak_place: str
    host_bytes: int
    seconds: float
    exposed: float
    mfu: float
    spans: tuple[Span, ...]
    curve: tuple[tuple[float, tuple[int, ...]], ...]

    @property
    def fits(self) -> bool:
        """True if the device has memory for the peak."""
        return self.peak_bytes <= self.device.bytes

    @property
    def share(self) -> float:
        """The part of the device's memory that the peak takes."""
        return self.peak_bytes / max(self.device.bytes, 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as values for JSON, without the curve and the spans."""
        found = {name: value for name, value in asdict(self).items() if name not in ("spans", "curve")}
        return {**found, "fits": self.fits}

    def summary(self) -> dict[str, str]:
        """Return the figures beside the table of memory, by title."""
        verdict = "fits" if self.fits else "does NOT fit"
        part = f"{100 * self.share:.0f} % of {self.device.bytes / GiB:.1f} GiB"
        host = {"host memory": size_text(self.host_bytes)} if self.host_bytes else {}
        share = 100 * self.exposed / self.seconds if self.seconds else 0.0
        dtypes = ", ".join(f"{dtype} {kind}" for kind, dtype in self.dtypes.items())
        remedy = ", which model.config.use_cache = False avoids" * self.keeps_cache
        exposed = f"{time_text(self.exposed)} ({share:.0f} %) exposed communication"
        return {
            "model": f"{self.model}, {self.parameters:,} parameters in {self.groups} groups",
            "job": f"{self.mesh} ranks of {self.device.name}, {self.device.ranks_per_host} per host",
            "dtypes": f"{dtypes}; {'a' if self.keeps_cache else 'no'} key/value cache is kept{remedy}",
            "memory": f"{verdict}: {size_text(self.peak_bytes)}, {part}",
            "peak": f"{size_text(self.peak_bytes)} in {self.peak_place}",
            **host,
            "step": f"{time_text(self.seconds)}, of which {exposed}",
            "MFU": f"{100 * self.mfu:.0f} %",
        }

    def __repr__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [f"{title:<{width}}  {text}" for title, text in self.summary().items()]
        lines += ["", f"{'memory':<{width}}  {'at the peak':>12}  {'at most':>12}"]
        lines += [f"{row.name:<{width}}  {size_text(row.bytes):>12}  {size_text(row.largest):>12}" for row in self.rows]
        return "\n".join(lines)


def size_text(nbytes: int) -> str:
    return f"{nbytes / GiB:.2f} GiB" if abs(nbytes) >= GiB else f"{nbytes / MiB:.1f} MiB"


def time_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.2f} ms"
