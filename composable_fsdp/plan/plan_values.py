"""The plan of a training step as values, as text, as JSON, and as a table of rich."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from composable_fsdp._runtime.schedule.html_table import html_table
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.plan.known_accelerators import Accelerator
from composable_fsdp.plan.plan_advice import Advice
from composable_fsdp.plan.plan_pictures import html_page, picture
from composable_fsdp.plugins.tuning.simulate import Span

__all__ = ["Plan", "Row", "saved_text", "size_text", "time_text"]

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
        rows: the memory by kind. The last row is fragmentation: what torch's caching allocator needs beside the peak.
        peak_bytes: the most bytes of tensors on the device at any time.
        peak_place: where that is.
        host_bytes: the bytes of offloaded shards, gradients and optimizer state in host memory, rounded up as pinned.
        seconds: the time of a step: forward, backward and optimizer.
        exposed: the part of it in which only collectives run.
        mfu: the share of the device's peak speed that the model's own operations use, recomputation included.
        advice: the changes of settings that save memory or time.
        spans: the predicted intervals of computation and of collectives, without the optimizer.
        curve: the memory of each kind but fragmentation, in the order of ``rows``, over the seconds of computation.
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
    advice: tuple[Advice, ...]
    spans: tuple[Span, ...]
    curve: tuple[tuple[float, tuple[int, ...]], ...]

    @property
    def reserved_bytes(self) -> int:
        """The bytes that the allocator must reserve on the device: the peak and the fragmentation."""
        return sum(row.bytes for row in self.rows)

    @property
    def fits(self) -> bool:
        """True if the device has that much."""
        return self.reserved_bytes <= self.device.bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as values for JSON, without the curve and the spans."""
        found = {name: value for name, value in asdict(self).items() if name not in ("spans", "curve")}
        return {**found, "reserved_bytes": self.reserved_bytes, "fits": self.fits}

    def summary(self) -> dict[str, str]:
        """Return the figures beside the table of memory, by title."""
        limit = self.device.bytes
        verdict = "fits" if self.fits else "does NOT fit"
        part = f"{100 * self.reserved_bytes / limit:.0f} % of {limit / GiB:.1f} GiB"
        host = {"host memory": size_text(self.host_bytes)} if self.host_bytes else {}
        share = 100 * self.exposed / self.seconds if self.seconds else 0.0
        dtypes = ", ".join(f"{dtype} {kind}" for kind, dtype in self.dtypes.items())
        exposed = f"{time_text(self.exposed)} ({share:.0f} %) exposed communication"
        return {
            "model": f"{self.model}, {self.parameters:,} parameters in {self.groups} groups",
            "job": f"{self.mesh} ranks of {self.device.name}",
            "dtypes": f"{dtypes}; {'a' if self.keeps_cache else 'no'} key/value cache is kept",
            "memory": f"{verdict}: {size_text(self.reserved_bytes)}, {part}",
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
        if self.advice:
            lines += ["", "about, with"]
            lines += [f"{saved_text(each):<35}  {each.setting}: {each.why}" for each in self.advice]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(row.name, size_text(row.bytes), size_text(row.largest)) for row in self.rows]
        parts = [html_table((), self.summary().items()), html_table(("memory", "at the peak", "at most"), rows)]
        advice = [(saved_text(each), each.setting, each.why) for each in self.advice]
        if advice:
            parts.append(html_table(("about", "with", "reason"), advice))
        if importlib.util.find_spec("matplotlib") is not None:
            data = base64.b64encode(self._picture()).decode()
            parts.append(f'<img alt="memory and streams of a step" src="data:image/png;base64,{data}">')
        return "\n".join(parts)

    def _picture(self) -> bytes:
        return picture(self._title, [row.name for row in self.rows[:-1]], self.curve, self.device.bytes, self.spans)

    @property
    def _title(self) -> str:
        return f"{self.model} on {self.mesh} ranks"

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as ``.html``, ``.png`` or ``.json``. A PNG needs matplotlib; HTML has the picture with it.

        Raises:
            ConfigurationError: the name has another ending, or matplotlib is not installed.
        """
        match Path(path).suffix:
            case ".html":
                Path(path).write_text(html_page(escape(self._title), self._repr_html_()))
            case ".png":
                Path(path).write_bytes(self._picture())
            case ".json":
                Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n")
            case _:
                raise ConfigurationError(f"a plan is saved as .html, .png or .json, not {str(path)!r}.")


def size_text(nbytes: int) -> str:
    return f"{nbytes / GiB:.2f} GiB" if abs(nbytes) >= GiB else f"{nbytes / MiB:.1f} MiB"


def time_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.2f} ms"


def saved_text(advice: Advice) -> str:
    memory = f"{size_text(abs(advice.saved_bytes))} {'less' if advice.saved_bytes >= 0 else 'more'}"
    return f"{memory}, {time_text(abs(advice.saved_seconds))} {'shorter' if advice.saved_seconds >= 0 else 'longer'}"
