"""The plan of a training step as values, as text, as JSON, and as a picture."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.plan.known_accelerators import Accelerator
from composable_fsdp.plugins.tuning.simulate import Span

__all__ = ["Plan", "Row", "size_text", "time_text"]

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


@dataclass(frozen=True)
class Plan:
    """The memory and the time of a training step, predicted without the model's memory and without other ranks.

    ``print(plan)`` shows it, and so does a notebook. :meth:`save` writes it as HTML, PNG or JSON.

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

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as values for JSON, without the curve and the spans."""
        found = {name: value for name, value in asdict(self).items() if name not in ("spans", "curve")}
        return {**found, "fits": self.fits}

    def summary(self) -> dict[str, str]:
        """Return the figures beside the table of memory, by title."""
        limit = self.device.bytes
        verdict = "fits" if self.fits else "does NOT fit"
        part = f"{100 * self.peak_bytes / limit:.0f} % of {limit / GiB:.1f} GiB"
        host = {"host memory": size_text(self.host_bytes)} if self.host_bytes else {}
        share = 100 * self.exposed / self.seconds if self.seconds else 0.0
        dtypes = ", ".join(f"{dtype} {kind}" for kind, dtype in self.dtypes.items())
        remedy = ", which model.config.use_cache = False avoids" * self.keeps_cache
        exposed = f"{time_text(self.exposed)} ({share:.0f} %) exposed communication"
        return {
            "model": f"{self.model}, {self.parameters:,} parameters in {self.groups} groups",
            "job": f"{self.mesh} ranks of {self.device.name}",
            "dtypes": f"{dtypes}; {'a' if self.keeps_cache else 'no'} key/value cache is kept{remedy}",
            "memory": f"{verdict}: {size_text(self.peak_bytes)}, {part}",
            "peak": f"{size_text(self.peak_bytes)} in {self.peak_place}",
            **host,
            "step": f"{time_text(self.seconds)}, of which {exposed}",
            "MFU": f"{100 * self.mfu:.0f} %",
        }

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [f"{title:<{width}}  {text}" for title, text in self.summary().items()]
        lines += ["", f"{'memory':<{width}}  {'at the peak':>12}  {'at most':>12}"]
        lines += [f"{row.name:<{width}}  {size_text(row.bytes):>12}  {size_text(row.largest):>12}" for row in self.rows]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as ``.html``, ``.json``, or as a picture ``.png`` of its memory and streams.

        Raises:
            ConfigurationError: the name has another ending, or it is a picture and matplotlib is not installed.
        """
        match Path(path).suffix:
            case ".html":
                title = f"{escape(self.model)} on {self.mesh} ranks"
                Path(path).write_text(f"<!doctype html><meta charset=utf-8><title>{title}</title>{self._repr_html_()}")
            case ".png":
                self._draw(path)
            case ".json":
                Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n")
            case _:
                raise ConfigurationError(f"a plan is saved as .html, .png or .json, not {str(path)!r}.")

    def _draw(self, path: str | PathLike[str]) -> None:
        """Draw the memory over the computation, and the streams over the predicted time."""
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigurationError('a PNG needs matplotlib: pip install "composable_fsdp[plot]".')
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 6), layout="constrained")
        memory, lanes = figure.subplots(2, 1, height_ratios=(2, 1))
        title = f"{self.model} on {self.mesh} ranks"
        memory.set(title=title, ylabel="GiB", xlabel="ms of computation: optimizer, forward, backward")
        series = [[held[place] / GiB for _, held in self.curve] for place in range(len(self.rows))]
        memory.stackplot([1e3 * at for at, _ in self.curve], series, labels=[row.name for row in self.rows])
        memory.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        streams = ("compute", "gather", "reduce", "replicate")
        for place, lane in enumerate(streams):
            bars = [(1e3 * each.begin, 1e3 * (each.end - each.begin)) for each in self.spans if each.stream == lane]
            lanes.broken_barh(bars, (place - 0.4, 0.8), facecolors=f"C{place}", edgecolors="white", linewidth=0.3)
        lanes.set_yticks(range(len(streams)), streams)
        lanes.set(xlabel="ms of forward and backward, predicted")
        lanes.invert_yaxis()
        figure.savefig(path, dpi=110)


def size_text(nbytes: int) -> str:
    return f"{nbytes / GiB:.2f} GiB" if abs(nbytes) >= GiB else f"{nbytes / MiB:.1f} MiB"


def time_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.2f} ms"
