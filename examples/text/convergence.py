"""Compares trainings with different communication, and writes the results to files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from .options import UsageError
from .variants import PLAIN, WireBytes

WINDOW = 20  # the number of steps over which plotted losses are averaged
DIGITS = 5  # digits of a loss in the file
HEADINGS = ("variant", "validation loss per seed", "mean", "to fp32", "sent per step", "to plain")
MB = 1e6


@dataclass(frozen=True, slots=True)
class Run:
    """The losses of one training in nats per byte.

    ``validation`` maps the number of finished steps to the loss, from 0 to all. ``seconds`` is the median time of a
    step. It is not in the table, because the speed of consecutive runs on a shared machine cannot be compared.
    """

    variant: str
    seed: int
    validation: dict[int, float]
    losses: list[float]
    seconds: float

    @property
    def final(self) -> float:
        return self.validation[len(self.losses)]


def percent_apart(run: Run, plain: Run) -> float:
    """Return by how many percent the final validation loss of ``run`` is larger."""
    return 100 * (run.final / plain.final - 1)


@dataclass(slots=True)
class Comparison:
    """All runs so far, made under the same ``settings``. ``origin`` describes the machine and versions."""

    settings: dict[str, Any]
    origin: dict[str, Any]
    traffic: dict[str, WireBytes] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def has(self, variant: str, seed: int) -> bool:
        return any((run.variant, run.seed) == (variant, seed) for run in self.runs)

    def of(self, variant: str) -> list[Run]:
        """Return the runs of a variant, by seed."""
        return sorted((run for run in self.runs if run.variant == variant), key=lambda run: run.seed)

    @property
    def variants(self) -> list[str]:
        """Return the variants that have runs, the plain one first."""
        return sorted(dict.fromkeys(run.variant for run in self.runs), key=lambda name: name != PLAIN)

    def pairs(self, variant: str) -> list[tuple[Run, Run]]:
        """Return pairs of a run of a variant and the plain run with its seed, if that exists."""
        plain = {run.seed: run for run in self.of(PLAIN)}
        return [(run, plain[run.seed]) for run in self.of(variant) if run.seed in plain]

    def differences(self, variant: str) -> list[float]:
        """Return the difference of final validation losses from the plain ones in percent, by seed."""
        return [percent_apart(run, plain) for run, plain in self.pairs(variant)]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Return the cells of the table, under ``HEADINGS``."""
        for variant in self.variants:
            runs, traffic = self.of(variant), self.traffic[variant]
            differences = self.differences(variant) if variant != PLAIN else []
            yield (
                variant,
                ", ".join(f"{run.final:.4f}" for run in runs),
                f"{mean(run.final for run in runs):.4f}",
                _with_range(differences),
                f"{traffic.sent / MB:.2f} MB",
                f"{traffic.sent / traffic.plain:.3f}",
            )

    def table(self) -> Table:
        """Return the table for a terminal."""
        table = Table(title="variants", title_justify="left")
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
        for row in self.rows():
            table.add_row(*row)
        return table


@dataclass(frozen=True, slots=True)
class Files:
    """The results in one folder, under one name: data, a page in Markdown, a picture."""

    folder: Path
    name: str

    @property
    def data(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def page(self) -> Path:
        return self.folder / f"{self.name}.md"

    @property
    def curves(self) -> Path:
        return self.folder / f"{self.name}.png"

    def prepare(self, fresh: Comparison, *, resume: bool, overwrite: bool) -> Comparison:
        """Return ``fresh``, and with ``resume`` add the existing runs in the folder.

        Raises:
            UsageError: there are results but neither flag is given, or they were made under other settings.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the folder {self.folder} can not be made: {error.strerror}") from error
        if overwrite or not self.data.exists():
            return fresh
        if not resume:
            raise UsageError(
                f"{self.data} exists: pass --resume to add the runs that it lacks, --overwrite to replace it, "
                "or another --out or --name"
            )
        return _joined(json.loads(self.data.read_text()), fresh, self.data)

    def write(self, comparison: Comparison, checks: Sequence[str]) -> None:
        """Write all three files. The data are written first and atomically, so an interruption keeps the old ones."""
        draft = self.data.with_suffix(".part")
        draft.write_text(_as_json(comparison))
        draft.replace(self.data)
        self.page.write_text(_as_markdown(comparison, checks, self.curves.name))
        _draw(comparison).savefig(self.curves, dpi=110)


def _joined(found: dict[str, Any], fresh: Comparison, path: Path) -> Comparison:
    if found["settings"] != fresh.settings:
        other = ", ".join(key for key, value in found["settings"].items() if value != fresh.settings.get(key))
        raise UsageError(f"the runs in {path} differ from these in {other}: leave out --resume, or choose the same")
    runs = [
        Run(**{**run, "validation": {int(step): loss for step, loss in run["validation"].items()}})
        for run in found["runs"]
    ]
    traffic = {name: WireBytes(**each) for name, each in found["traffic"].items()}
    origin = {**fresh.origin, "commands": [*found["origin"]["commands"], *fresh.origin["commands"]]}
    return Comparison(fresh.settings, origin, traffic, runs)


def _as_json(comparison: Comparison) -> str:
    """Return the data with one line per run, so that the rest is readable."""
    runs = ",\n".join(json.dumps(_rounded(asdict(run))) for run in comparison.runs)
    parts = {
        "origin": json.dumps(comparison.origin, indent=1),
        "settings": json.dumps(comparison.settings),
        "traffic": json.dumps({name: asdict(traffic) for name, traffic in comparison.traffic.items()}),
        "runs": f"[\n{runs}\n]",
    }
    return "{\n" + ",\n".join(f'"{name}": {part}' for name, part in parts.items()) + "\n}\n"


def _with_range(differences: Sequence[float]) -> str:
    if not differences:
        return ""
    middle = f"{mean(differences):+.2f} %"
    return middle if len(differences) == 1 else f"{middle} ({min(differences):+.2f} to {max(differences):+.2f})"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, DIGITS) if isinstance(value, float) else value


def _as_markdown(comparison: Comparison, checks: Sequence[str], picture: str) -> str:
    origin, settings = comparison.origin, comparison.settings
    rows = [HEADINGS, ("---", *("---:" for _ in HEADINGS[1:])), *comparison.rows()]
    seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in comparison.runs}))
    said = ", ".join(f"{name} {value}" for name, value in settings.items())
    parts = (
        "# Training with codecs, against fp32",
        "```console\n" + "\n".join(f"$ {command}" for command in origin["commands"]) + "\n```",
        f"Final validation loss in nats per byte, seeds {seeds} in this order. A seed gives all variants the same "
        "initial values and the same batches; each run is compared with fp32 of its seed: the mean, and from lowest to "
        "highest. Validation computes with parameters as they arrive, encoded on the way, like training. Bytes are "
        "those that a rank sends to others in one training step; plain are those without codecs.",
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        "\n".join(f"- {check}" for check in checks),
        f"![loss curves]({picture})",
        f"Settings: {said}.\n\nMachine: {origin['machine']}. torch {origin['torch']}.",
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _draw(comparison: Comparison) -> Figure:
    """Plot losses on the left, and on the right the small differences from fp32."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, variant in enumerate(comparison.variants):
        runs, colour = comparison.of(variant), f"C{index}"
        _draw_band(left, [_smoothed(run.losses) for run in runs], colour, f"{variant} ({len(runs)})")
        for run in runs:
            steps, losses = zip(*run.validation.items(), strict=True)
            left.plot(steps, losses, "o", color=colour, markersize=4, zorder=3)
        pairs = comparison.pairs(variant)
        if pairs:
            _draw_band(right, [_apart(run, plain) for run, plain in pairs], colour, variant)
            last = len(pairs[0][0].losses)
            right.plot([last] * len(pairs), comparison.differences(variant), "o", color=colour, markersize=4, zorder=3)
    left.set(
        xlabel="optimizer steps",
        ylabel="loss (nats per byte)",
        title=f"training (mean of {WINDOW} steps and of seeds), dots: validation",
    )
    right.set(xlabel="optimizer steps", ylabel="difference to fp32 (%)", title="the same against fp32 of the same seed")
    right.axhspan(-1, 1, color="grey", alpha=0.15, zorder=0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(title="variant (seeds)")
    return figure


def _draw_band(axes: Axes, curves: Sequence[Sequence[float]], colour: str, label: str) -> None:
    """Plot the mean of the curves, and the range between lowest and highest."""
    steps = range(1, min(len(curve) for curve in curves) + 1)
    columns = list(zip(*curves, strict=False))
    axes.plot(steps, [mean(column) for column in columns], color=colour, linewidth=1.2, label=label)
    if len(curves) > 1:
        axes.fill_between(
            steps, [min(each) for each in columns], [max(each) for each in columns], color=colour, alpha=0.2
        )


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Return the mean of each loss and up to ``WINDOW`` - 1 losses before it."""
    return [mean(losses[max(0, step + 1 - WINDOW) : step + 1]) for step in range(len(losses))]


def _apart(run: Run, plain: Run) -> list[float]:
    """Return the differences of smoothed training losses from the plain ones, in percent."""
    curves = zip(_smoothed(run.losses), _smoothed(plain.losses), strict=True)
    return [100 * (loss / expected - 1) if math.isfinite(loss) else math.nan for loss, expected in curves]
