"""Draws the charts of the documentation from the results of the benchmarks, and its diagrams: ``docs/pictures``.

    python benchmarks/charts.py                 # all
    python benchmarks/charts.py --only memory   # one

Each picture is an SVG without background, once for a light and once for a dark page. Bars and points are medians; lines
through them are 95 % intervals. Of several results of one benchmark the newest is drawn. This program needs matplotlib,
but not torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS, FSDP2, THIRD, FOURTH = "#3987e5", "#e0892f", "#5fa05f", "#9a78c8"
INK = {"": "#33383f", "-dark": "#cfd3d8"}
"""The colour of text and axes, by the end of the file's name."""

Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    """Return the rows of the newest result of a benchmark, ``DATE-name.json``."""
    found = sorted(path for path in RESULTS.glob("*.json") if path.stem[len("2026-01-01-") :] == name)
    rows: list[Row] = json.loads(found[-1].read_text())["rows"]
    return rows


def axes_of(width: float = 7.2, height: float = 2.8, columns: int = 1) -> Any:
    _, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
    for axis in axes if columns > 1 else [axes]:
        axis.spines[["top", "right"]].set_visible(False)
    return axes


def bars(axis: Any, labels: Sequence[str], series: dict[str, Sequence[Any]], colors: Sequence[str], text: str) -> None:
    """Draw horizontal bars of numbers, or of medians with intervals, one group for each label."""
    height = 0.8 / len(series)
    for index, ((name, values), color) in enumerate(zip(series.items(), colors, strict=False)):
        places = [at + (index - (len(series) - 1) / 2) * height for at in range(len(labels))]
        found = [
            value if isinstance(value, dict) else dict.fromkeys(("median", "low", "high"), value) for value in values
        ]
        axis.barh(places, [each["median"] for each in found], height * 0.92, color=color, label=name)
        for place, each in zip(places, found, strict=True):
            axis.hlines(place, each["low"], each["high"], color=mpl.rcParams["text.color"], linewidth=1)
            end = (max(each["high"], each["median"]), place)
            axis.annotate(
                f"{each['median']:{text}}", end, xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
            )
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    if len(series) > 1:
        axis.legend(frameon=False, fontsize=8, ncols=len(series), loc="lower left", bbox_to_anchor=(0, 1))


# -- charts


def step_times() -> None:
    rows = rows_of("step-time-2")
    names = {
        "gpt-256": "GPT, 26 M parameters\n256 tokens",
        "gpt-32": "GPT, 26 M parameters\n32 tokens",
        "tiny-200": "200 tiny modules",
        "experts": "4 experts of\n194 parameters",
    }
    axis = axes_of(height=3.2)
    peers = {"best fsdp2": ("FSDP2", OURS), "fsdp1": ("FSDP1", THIRD), "ddp": ("DDP", FSDP2)}
    for index, (peer, (name, color)) in enumerate(peers.items()):
        ratios = [row[f"ours/{peer} wall"] for row in rows]
        places = [at + (index - 1) * 0.24 for at in range(len(rows))]
        medians = [ratio["median"] for ratio in ratios]
        axis.hlines(
            places, [r["low"] for r in ratios], [r["high"] for r in ratios], color=color, linewidth=3, alpha=0.5
        )
        axis.plot(medians, places, "o", color=color, label=f"compared with {name}")
        for place, ratio in zip(places, ratios, strict=True):
            axis.text(ratio["high"] * 1.06, place, f"{ratio['median']:.2f}", va="center", fontsize=8)
    axis.axvline(1, color=mpl.rcParams["text.color"], linewidth=0.8)
    axis.set_xscale("log")
    axis.set_xlim(0.1, 5)
    ticks = [0.1, 0.2, 0.5, 1, 2, 4]
    axis.set_xticks(ticks, map(str, ticks))
    axis.set_xticks([], minor=True)
    axis.set_yticks(range(len(rows)), [names[row["case"]] for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel("time of a step, ours / theirs (left of 1: ours is faster)")
    axis.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 0.42))


def host_time() -> None:
    rows = [row for row in rows_of("host-overhead-alone") if row["dtype"] == "fp32"]
    axis = axes_of()
    labels = [f"{row['parameters']} parameter{'s' * (row['parameters'] > 1)}" for row in rows]
    series = {name: [row[f"{key} us"] for row in rows] for name, key in (("ours", "ours"), ("FSDP2", "fsdp2"))}
    series["the necessary calls of torch, by hand"] = [row["floor us"] for row in rows]
    bars(axis, labels, series, (OURS, FSDP2, THIRD), ",.0f")
    axis.set_xscale("log")
    axis.set_xlim(20, 6000)
    axis.set_xlabel("µs of the host for one group and step, fp32, 4 ranks")


def memory() -> None:
    rows = [row for row in rows_of("memory") if row["waits"] == "host" and "bound MB" in row]
    axis = axes_of(height=3.4)
    labels = [f"{row['case']}, {row['dtype']}" for row in rows]
    series = {
        "ours": [row["ours peak MB"] / row["fsdp2 peak MB"] for row in rows],
        "lower bound": [row["bound MB"] / row["fsdp2 peak MB"] for row in rows],
    }
    bars(axis, labels, series, (OURS, THIRD), ".2f")
    axis.axvline(1, color=FSDP2, linewidth=1.5)
    axis.text(1.01, 0, "FSDP2", color=FSDP2, fontsize=8, va="center")
    axis.set_xlim(0, 1.12)
    axis.set_xlabel("peak memory of a step on CPU, relative to FSDP2's")


def exposed() -> None:
    wanted = {"ours": "ours", "fsdp2": "FSDP2", "ours, three ahead": "ours, three ahead"}
    wanted |= {"fsdp2, three ahead": "FSDP2, three ahead", "ours, 16-bit gradients": "ours, 16-bit gradients"}
    rows = [row for row in rows_of("exposure") if row["wire"] == "one" and row["variant"] in wanted]
    ranks = sorted({row["ranks"] for row in rows})
    axis = axes_of(height=3.0)
    by = {(row["ranks"], row["variant"]): row["exposed ms"] for row in rows if row["Gbit/s"] == 400}
    series = {f"{number:,} ranks": [by[number, variant] for variant in wanted] for number in ranks}
    bars(axis, list(wanted.values()), series, (OURS, FSDP2), ".0f")
    axis.set_xlabel(
        "ms of a step of about 290 that wait for communication\n8 blocks, 1.7 B parameters, 400 Gbit/s, in virtual time"
    )


def plan() -> None:
    rows = sorted(rows_of("plan-resident"), key=lambda row: float(row["predicted MB"]))
    axis = axes_of()
    series = {"predicted by plan": [row["predicted MB"] for row in rows], "measured": [row["PSS MB"] for row in rows]}
    bars(axis, [row["settings"] for row in rows], series, (OURS, FSDP2), ".0f")
    axis.set_xlim(0, 700)
    axis.set_xlabel("MB of a rank at the peak of a step\nGPT of 40 M parameters, AdamW, 2 ranks on CPU")


def construction() -> None:
    rows = [row for row in rows_of("construction") if row["unit"] == "ms"]
    axis = axes_of(height=2.2)
    series = {"ours": [row["ours"] for row in rows], "FSDP2": [row["fsdp2"] for row in rows]}
    bars(axis, [row["part"] for row in rows], series, (OURS, FSDP2), ".0f")
    axis.set_xscale("log")
    axis.set_xlim(5, 4000)
    axis.set_xlabel("ms for a model of 70 B parameters on meta at 1,024 ranks")


def safetensors() -> None:
    rows = rows_of("load-memory")
    axis = axes_of(height=2.0)
    series = {
        name: [row[f"{key} MB above shard"] for row in rows] for name, key in (("ours", "ours"), ("FSDP2", "fsdp2"))
    }
    bars(axis, [row["operation"] for row in rows], series, (OURS, FSDP2), ",.0f")
    axis.set_xscale("log")
    axis.set_xlim(10, 8000)
    axis.set_xlabel("MB above the shards, for 2 GB of safetensors on 2 ranks")


def optimizer() -> None:
    rows = [row for row in rows_of("optimizer-step") if row["what"] == "AdamW default"]
    axis = axes_of(height=2.4)
    labels = [f"{row['elements']:,} elements" for row in rows]
    names = {"local_optimizer": "local us", "DTensor, as with FSDP2": "DTensor us", "plain tensor": "plain us"}
    series = {name: [row[key] for row in rows] for name, key in names.items()}
    bars(axis, labels, series, (OURS, FSDP2, THIRD), ",.0f")
    axis.set_xscale("log")
    axis.set_xlim(10, 9000)
    axis.set_xlabel("µs of AdamW's step for one parameter")


def faults() -> None:
    rows = [row for row in rows_of("soak") if row.get("s until all raise")]
    rows = [row for row in rows if row["what"].endswith("on one rank") or row["what"].startswith("killed")]
    axis = axes_of(height=3.2)
    series = {"": [row["s until all raise"] for row in rows]}
    bars(axis, [f"{row['what']} ({row['count']} times)" for row in rows], series, (OURS,), ".2f")
    axis.set_xlim(0, 5)
    axis.set_xlabel("s from the fault until all 4 ranks have raised an error")


def codecs() -> None:
    found = json.loads(sorted(RESULTS.glob("*-convergence.json"))[-1].read_text())
    axis = axes_of(height=3.0)
    colors = {"fp32": THIRD, "bf16": FOURTH, "int8": OURS, "int4": FSDP2}
    for run in found["runs"]:
        if run["seed"] != 0 or run["variant"] not in colors:
            continue
        window = 10
        smooth = [sum(run["losses"][at - window : at]) / window for at in range(window, len(run["losses"]) + 1)]
        sent = found["traffic"][run["variant"]]["sent"] / 1e6
        label = f"{run['variant']}: {sent:.0f} MB sent per step"
        axis.plot(range(window, len(smooth) + window), smooth, color=colors[run["variant"]], label=label, linewidth=1.2)
    axis.set_ylim(1.5, 4)
    axis.set_xlabel("step")
    axis.set_ylabel("training loss, nats per byte")
    axis.legend(frameon=False, fontsize=8)


# -- diagrams


def sharding() -> None:
    """One parameter of 8 rows on 4 ranks, under three strategies."""
    axes = axes_of(height=2.5, columns=3)
    shades = (OURS, FSDP2, THIRD, FOURTH)
    titles = {
        "FULL_SHARD\nmesh (4,)": lambda row, rank: row // 2 == rank,
        "HYBRID_SHARD\nmesh (2 hosts, 2 ranks)": lambda row, rank: row // 4 == rank % 2,
        "NO_SHARD\nmesh (4, 1)": lambda row, rank: True,
    }
    for axis, (title, owns) in zip(axes, titles.items(), strict=True):
        for rank in range(4):
            for row in range(8):
                mine = owns(row, rank)
                color = shades[row // 2] if mine else "none"
                axis.add_patch(Rectangle((rank * 1.25, 7 - row), 1, 0.92, facecolor=color, edgecolor="#8888", lw=0.5))
            axis.text(rank * 1.25 + 0.5, -0.75, f"rank {rank}", ha="center", fontsize=7)
        axis.set_xlim(-0.2, 5)
        axis.set_ylim(-1.2, 8.2)
        axis.set_axis_off()
        axis.set_title(title, fontsize=8)


def step() -> None:
    """The lanes of one step of four layers: gathers ahead of computation, reductions behind it."""
    axis = axes_of(height=2.3)
    shades, layers, time = (OURS, FSDP2, THIRD, FOURTH), range(4), 1.0
    lanes = {"gather": 2, "compute": 1, "reduce": 0}

    def draw(lane: str, begin: float, length: float, layer: int, text: str) -> None:
        axis.add_patch(Rectangle((begin, lanes[lane] + 0.1), length - 0.04, 0.8, facecolor=shades[layer]))
        axis.text(begin + length / 2, lanes[lane] + 0.5, text, ha="center", va="center", fontsize=8, color="black")

    for layer in layers:  # forward
        draw("gather", time - 1, 0.8, layer, str(layer + 1))
        draw("compute", time, 1, layer, f"fwd {layer + 1}")
        time += 1
    for layer in reversed(layers):  # backward: the last layer is still there
        if layer < 3:
            draw("gather", time - 1.5, 0.8, layer, str(layer + 1))
        draw("compute", time, 1.5, layer, f"bwd {layer + 1}")
        draw("reduce", time + 1.5, 0.9, layer, str(layer + 1))
        time += 1.5
    axis.set_xlim(-0.1, time + 1)
    axis.set_ylim(0, 3)
    axis.set_yticks([0.5, 1.5, 2.5], ["reduce-scatter", "compute", "all-gather"])
    axis.set_xticks([])
    axis.set_xlabel("time; what extends beyond the computation at both ends is exposed")


def states() -> None:
    """Bytes of a rank for 7 B parameters in fp32 with AdamW, computed in bf16, by strategy and number of ranks."""
    parameters, largest = 7e9, 7e9 / 32
    axis = axes_of(height=2.6)
    ranks = (8, 64, 512)
    rows: dict[str, list[float]] = {"FULL_SHARD": [], "HYBRID_SHARD, 8 per host": [], "NO_SHARD (as DDP)": []}
    for number in ranks:
        rest = parameters * 16 / 1e9  # parameters, gradients and two moments, 4 bytes each
        transient = 3 * largest * 2 / 1e9  # two layers and the gradients of one, in bf16
        rows["FULL_SHARD"].append(rest / number + transient)
        rows["HYBRID_SHARD, 8 per host"].append(rest / 8 + transient)
        rows["NO_SHARD (as DDP)"].append(rest + parameters * 2 / 1e9)
    bars(axis, [f"{number} ranks" for number in ranks], rows, (OURS, FSDP2, THIRD), ".1f")
    axis.set_xscale("log")
    axis.set_xlim(1, 400)
    axis.set_xlabel("GB of each rank without activations: 7 B parameters, fp32 AdamW, bf16 computation")


PICTURES: dict[str, Callable[[], None]] = {
    "step-times": step_times,
    "host-time": host_time,
    "memory": memory,
    "exposed": exposed,
    "plan": plan,
    "construction": construction,
    "safetensors": safetensors,
    "optimizer": optimizer,
    "faults": faults,
    "codecs": codecs,
    "sharding": sharding,
    "step": step,
    "states": states,
}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--only", default=",".join(PICTURES), help="names of pictures")
    options.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    arguments = options.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.only.split(","):
        for end, ink in INK.items():
            colors = dict.fromkeys(
                ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink
            )
            style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "font.family": "sans-serif"}
            with mpl.rc_context(colors | style):
                PICTURES[name]()
                plt.savefig(arguments.out / f"{name}{end}.svg", transparent=True, metadata={"Date": None})
                plt.close()
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
