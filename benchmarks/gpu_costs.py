"""Memory and time of steps beside FSDP2, in sections of ``gpu_report.py``."""

from __future__ import annotations

import re
import statistics
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_target import (
    MB,
    OURS,
    PAIR,
    PEER,
    TOLERANCE,
    CannotRun,
    Result,
    Target,
    adam,
    batch_of,
    sharded,
    step,
    width_of,
)
from libraries import LIBRARIES, shard
from models import Decoder
from sim.device import Span

from tests.gpu.sharing import without_warnings_of_torch
from tests.helpers.run_ranks import run_ranks

__all__ = ["decoder", "memory", "profile", "step_time"]


def rank_memory(target: Target, library: str, bf16: bool) -> dict[str, float]:
    width = width_of(target)
    with target.mesh() as mesh:
        model = sharded(target, library, mesh, width, bf16=bf16)
        optimizer = adam(model)
        for number in range(6):
            if number == 2:
                torch.cuda.reset_peak_memory_stats()
            step(model, optimizer, batch_of(target, dist.get_rank(), number, width, rows=512))
        torch.cuda.synchronize()
        statistics_of = torch.cuda.memory_stats()
        return {
            "peak reserved MB": torch.cuda.max_memory_reserved() / MB,
            "peak allocated MB": torch.cuda.max_memory_allocated() / MB,
            "retries": statistics_of["num_alloc_retries"],
        }


def memory(target: Target, result: Result) -> None:
    if target.device == "simulated":
        rows = simulated_steps(result, None)
        result.add(
            "Peak memory of a step in virtual time (allocated, not reserved)",
            ["ranks", "library", "peak MB"],
            rows,
        )
        return
    rows = []
    for ranks, bf16 in [(n, dtype) for n in (1, PAIR) for dtype in (False, True)]:
        for library in (OURS, PEER):
            found = run_ranks(rank_memory, ranks, target, library, bf16, timeout=120)[0]
            rows.append({"library": library, "dtype": "bf16" if bf16 else "fp32", "ranks": ranks, **found})
        ours, theirs = rows[-2]["peak reserved MB"], rows[-1]["peak reserved MB"]
        if ours > 1.05 * theirs:
            result.failures.append(f"peak reserved memory: ours {ours:.0f} MB, FSDP2 {theirs:.0f} MB")
    result.add(
        "Peak memory of a step on rank 0",
        ["library", "dtype", "ranks", "peak reserved MB", "peak allocated MB", "retries"],
        rows,
    )


def simulated_steps(result: Result, picture: str | None) -> list[dict[str, Any]]:
    """Return the time and memory of a step of both libraries on 64 ranks, and draw its work, in virtual time."""
    found = {library: simulated_step(library, 64) for library in (PEER, OURS)}
    if picture:
        draw(result, picture, {library: spans for library, (_, spans) in found.items()}, "virtual µs")
    return [row for row, _ in found.values()]


def simulated_step(library: str, ranks: int) -> tuple[dict[str, Any], list[Span]]:
    """Return the peak memory and the work of a step of a model of ``schedule_sweep.py`` at 400 Gbit/s and 20 us."""
    from schedule_sweep import MODELS, Cell, Steps
    from sim.device import Charging, Device
    from sim.ledger import Ledger
    from sim.network import Network, simulated_ranks
    from torch._subclasses.fake_tensor import FakeTensorMode

    network, of = Network(Device(flops=450e6, bandwidth=3.5e6)), MODELS["8 blocks of 4096, batch 2"]
    with simulated_ranks(network, ranks):
        meshes = of.meshes(ranks)
        with FakeTensorMode(allow_non_fake_inputs=True), Charging(network.device):
            steps = Steps(of.sharded(library, *meshes), of.batch(), network, Ledger())
            Cell(20, 400).apply(network)
            for _ in range(3):
                network.device.log = spans = []
                steps.run()
            row = {"ranks": ranks, "library": library, "peak MB": steps.record().peak}
            return row | {"step ms": max(span.end for span in spans) / 1e3}, spans


def rank_time(target: Target, bf16: bool, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of steps of both libraries, in turn."""
    width, rows = width_of(target), 512 if target.device == "cuda" else 8
    with target.mesh() as mesh:
        models = {library: sharded(target, library, mesh, width, bf16=bf16) for library in (OURS, PEER)}
        optimizers = {library: adam(model) for library, model in models.items()}
        times: dict[str, list[float]] = {library: [] for library in models}
        for number in range(rounds + 6):
            batch = batch_of(target, dist.get_rank(), number, width, rows)
            for library, model in models.items():
                target.synchronize()
                dist.barrier()
                begin = time.perf_counter()
                step(model, optimizers[library], batch)
                target.synchronize()
                if number >= 6:
                    times[library].append(1e3 * (time.perf_counter() - begin))
    return times


ROUNDS = {"cuda": 20, "simulated": 5}
"""The steps that are timed, by device, if each rank has its own."""


def step_time(target: Target, result: Result) -> None:
    rows = []
    for ranks in [n for n in target.ranks() if n <= max(2, target.count)]:
        for bf16 in (False, True):
            times = run_ranks(
                rank_time, ranks, target, bf16, 8 if ranks > target.count else ROUNDS[target.device], timeout=150
            )
            slowest = {
                lib: [max(each) for each in zip(*(of[lib] for of in times), strict=True)] for lib in (OURS, PEER)
            }
            medians = {lib: statistics.median(found) for lib, found in slowest.items()}
            rows.append(
                {
                    "ranks": ranks,
                    "GPUs": target.shared(ranks),
                    "dtype": "bf16" if bf16 else "fp32",
                    "ours ms": medians[OURS],
                    "fsdp2 ms": medians[PEER],
                    "ours/fsdp2": medians[OURS] / medians[PEER],
                }
            )
    result.add(
        "Median time of a step on the slowest rank",
        ["ranks", "GPUs", "dtype", "ours ms", "fsdp2 ms", "ours/fsdp2"],
        rows,
    )
    if target.device == "simulated":
        result.notes.append("These are times of the race detector on a CPU. The profile has virtual time.")


def rank_profile(target: Target, library: str) -> list[tuple[str, float, float, str]]:
    """Return what ran in one step: stream or thread, begin and end in microseconds, and name."""
    width, rows = width_of(target), 512
    with target.mesh() as mesh:
        model = sharded(target, library, mesh, width, bf16=True)
        optimizer = adam(model)
        for number in range(5):
            step(model, optimizer, batch_of(target, dist.get_rank(), number, width, rows))
        batch = batch_of(target, dist.get_rank(), 9, width, rows)
        torch.cuda.synchronize()
        dist.barrier()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            with torch.profiler.record_function("one step"):
                step(model, optimizer, batch)
            torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_host = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    ranges = {event.name() for event in on_host}  # the profiler also lists them on the device, beside the kernels
    end = max(event.start_ns() + event.duration_ns() for event in on_host if event.name() == "one step")
    found = []
    for event in events:
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        is_call = event.name().startswith("cuda") and event.start_ns() < end  # not of the benchmark itself
        if (on_device and event.name() not in ranges) or (not on_device and is_call):
            row = f"stream {event.device_resource_id()}" if on_device else "host"
            begin = event.start_ns() / 1e3
            found.append((row, begin, begin + event.duration_ns() / 1e3, event.name()))
    return found


def rank_priorities(target: Target, library: str) -> dict[str, int]:
    """Return the number of streams with each priority that a step makes; -1 and less are high."""
    made: list[int] = []
    of_torch = torch.cuda.Stream

    class Counted(of_torch):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Any:
            if not options:  # else it is another object for a stream that exists
                made.append(priority)
            return super().__new__(cls, device, priority, **options)

    with target.mesh() as mesh, mock.patch.object(torch.cuda, "Stream", Counted):
        model = sharded(target, library, mesh, width_of(target) // 4)
        step(model, adam(model), batch_of(target, dist.get_rank(), 0, width_of(target) // 4))
    return {f"priority {priority}": made.count(priority) for priority in sorted(set(made))}


def profile(target: Target, result: Result) -> None:
    """Count copies, host waits and idle time of a step, and draw its streams."""
    if target.device == "simulated":
        rows = simulated_steps(result, "timeline.png")
        result.add("A step in virtual time on 64 ranks", ["ranks", "library", "step ms", "peak MB"], rows)
        result.notes.append(
            "Copies, host waits and gaps need a profiler of the device; the simulated one has none. "
            "The picture has the work of streams; transfers over the network are the gaps."
        )
        return
    rows, spans = [], {}
    for ranks, library in [(n, library) for n in (1, PAIR) for library in (OURS, PEER)]:
        name = f"{library}, {ranks} rank{'s'[: ranks > 1]}"
        events = spans[name] = run_ranks(rank_profile, ranks, target, library, timeout=120)[0]
        kernels = sorted((b, e) for row, b, e, name in events if row != "host")
        if not kernels:
            raise CannotRun("the profiler recorded nothing on the device (CUPTI may not be permitted)")
        busy, until = 0.0, kernels[0][0]
        for begin, end in kernels:
            busy += max(0.0, end - max(begin, until))
            until = max(until, end)
        names = [name for row, _, _, name in events if row != "host"]
        calls = [name for row, _, _, name in events if row == "host"]
        longest = max((end - begin, call) for row, begin, end, call in events if row == "host")
        waits = [n for n in calls if re.match(r"cuda(Stream|Event|Device)Synchronize", n)]
        rows.append(
            {
                "library": name,
                "step ms": (until - kernels[0][0]) / 1e3,
                "idle ms": (until - kernels[0][0] - busy) / 1e3,
                "kernels": sum("Mem" not in n for n in names),
                "collectives": sum("nccl" in n.lower() for n in names),
                "their streams": len({row for row, _, _, n in events if row != "host" and "nccl" in n.lower()}),
                "launches": sum(bool(re.match(r"cu(da)?Launch", n)) for n in calls),
                **{f"copies {kind}": sum(f"Memcpy {kind}" in n for n in names) for kind in ("HtoD", "DtoH", "DtoD")},
                "host waits": len(waits),
                "longest call": f"{longest[1]}, {longest[0] / 1e3:.1f} ms",
            }
        )
    result.add("One step in bf16 on rank 0", list(rows[0]), rows)
    for row in rows:
        if row["library"].startswith(OURS) and row["host waits"]:
            result.failures.append(f"{row['library']}: the host waited {row['host waits']} times in a step")
    streams = [{"library": library} | run_ranks(rank_priorities, 1, target, library)[0] for library in (OURS, PEER)]
    columns = ["library", *sorted({key for row in streams for key in row if key != "library"})]
    result.add("Streams that a training makes; a priority below 0 is high", columns, streams)
    for ranks in sorted({1, PAIR}):  # with a scale of their own
        drawn = {name: found for name, found in spans.items() if f", {ranks} rank" in name}
        draw(result, f"timeline-{ranks}.png", drawn, "µs")


def draw(result: Result, name: str, spans: dict[str, list[tuple[str, float, float, str]]], unit: str) -> None:
    """Draw a picture of the streams of each library."""
    try:
        import matplotlib
    except ImportError:
        result.notes.append("There is no picture, since matplotlib is not installed.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(spans), 1, figsize=(14, 2.6 * len(spans)), squeeze=False, sharex=True)
    for (library, found), (axis,) in zip(spans.items(), axes, strict=True):
        lanes = sorted({row for row, *_ in found})
        zero = min((begin for _, begin, _, _ in found), default=0.0)
        for index, lane in enumerate(lanes):
            bars = [(begin - zero, max(end - begin, 0.1), label) for row, begin, end, label in found if row == lane]
            colors = [
                "tab:orange" if "nccl" in label.lower() else "tab:gray" if "Mem" in label else "tab:blue"
                for *_, label in bars
            ]
            axis.broken_barh(
                [(b, d) for b, d, _ in bars], (index - 0.4, 0.8), facecolors=colors, edgecolor="white", linewidth=0.2
            )
        axis.set(yticks=range(len(lanes)), yticklabels=lanes, title=library)
    axes[-1][0].set_xlabel(unit)
    figure.tight_layout()
    figure.savefig(result.folder / name, dpi=110)
    result.pictures.append(f"{result.folder.name}/{name}")


# -- a decoder, compiled or not


def rank_decoder(target: Target, library: str, compiles: bool) -> dict[str, Any]:
    """Train a decoder in bf16; return its losses, the median time of a step, and the peaks of memory."""
    is_small = target.device != "cuda"
    torch.manual_seed(0)
    sizes = (256, 64, 128, 32, 4, 2) if is_small else (32000, 2048, 5632, 512, 16, 16)
    batch, length = (2, 16) if is_small else (4, 2048)
    with target.mesh() as mesh, without_warnings_of_torch(), torch.device(target.type):
        model = Decoder(*sizes)
        for block in model.blocks if compiles else ():
            block.compile()
        shard(LIBRARIES[library], model, [*model.blocks, model.head], mesh, bf16=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not is_small)
        tokens = torch.randint(sizes[0], (batch, length))
        losses, times = [], []
        for number in range(4 if is_small else 14):
            target.synchronize()
            begin = time.perf_counter()
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            target.synchronize()
            losses.append(float(loss))
            if number >= 3:
                times.append(time.perf_counter() - begin)
        found = {"losses": losses, "step ms": 1e3 * statistics.median(times)}
        found["tokens/s"] = batch * length / found["step ms"] * 1e3
        found["parameters"] = sum(p.numel() for p in model.parameters())
        if not is_small:
            found["peak allocated MB"] = torch.cuda.max_memory_allocated() / MB
            found["peak reserved MB"] = torch.cuda.max_memory_reserved() / MB
    return found


def decoder(target: Target, result: Result) -> None:
    """Train a decoder on one rank beside FSDP2, eager and with compiled blocks."""
    rows, losses = [], {}
    for compiles, library in [(c, library) for c in (False, True) for library in (OURS, PEER)]:
        found = run_ranks(rank_decoder, 1, target, library, compiles, timeout=120)[0]
        losses[compiles, library] = found.pop("losses")
        rows.append({"library": library, "blocks": "compiled" if compiles else "eager", **found})
    result.add("Training of a decoder in bf16 on one rank", list(rows[0]), rows)
    for compiles in (False, True):
        ours, theirs = losses[compiles, OURS], losses[compiles, PEER]
        if any(abs(a - b) > TOLERANCE * abs(b) for a, b in zip(ours, theirs, strict=True)):
            result.failures.append(f"compiled {compiles}: losses {ours}, of FSDP2 {theirs}")
