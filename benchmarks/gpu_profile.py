"""What runs in a step, and what waits: sections of ``gpu_report.py``, and the events that others count."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu_result import CannotRun, Result
from gpu_target import MB, OURS, PAIR, PEER, Target, adam, batch_of, sharded, step, width_of
from libraries import LIBRARIES
from report import spread
from sim.device import Span
from torch import nn

from composable_fsdp import plugins
from composable_fsdp.plugins.profiler_labels import ProfilerLabels
from tests.helpers.run_ranks import kill_ranks, run_ranks

__all__ = ["device_events", "host_waits", "offload", "profile"]

HOST = "host"
WAITS = re.compile(r"cuda(Stream|Event|Device)Synchronize")
COLLECTIVE = re.compile("nccl", re.IGNORECASE)


# -- events


def device_events(run: Callable[[], object], *ranges: str) -> list[Span]:
    """Return what runs on the device in ``run``, the calls of the host to it, and the host's ranges of some names.

    Times are in microseconds. The place is the stream, or the host.
    """
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("all of it"):
            run()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_host = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    names = {event.name() for event in on_host}  # the profiler also lists ranges on the device, beside the kernels
    last = max(event.start_ns() + event.duration_ns() for event in on_host if event.name() == "all of it")
    found = []
    for event in events:
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        is_call = event.name().startswith("cuda") and event.start_ns() < last  # not of this function
        if (on_device and event.name() not in names) or (not on_device and (is_call or event.name() in ranges)):
            begin = event.start_ns() / 1e3
            place = f"stream {event.device_resource_id()}" if on_device else HOST
            found.append(Span(place, begin, begin + event.duration_ns() / 1e3, event.name()))
    if all(span.place == HOST for span in found):
        raise CannotRun("the profiler recorded nothing on the device (CUPTI may not be permitted)")
    return found


def host_waits(events: Sequence[Span]) -> int:
    return sum(bool(WAITS.match(span.what)) for span in events if span.place == HOST)


def gaps(kernels: Sequence[Span]) -> list[float]:
    """Return the microseconds of each time in which nothing runs between the first and the last of ``kernels``."""
    found, until = [], kernels[0].end
    for span in sorted(kernels, key=lambda each: each.begin):
        if span.begin > until:
            found.append(span.begin - until)
        until = max(until, span.end)
    return found


def counts(events: Sequence[Span], steps: int) -> dict[str, Any]:
    """Return the columns of a table about ``events`` of a number of steps."""
    kernels = sorted((span for span in events if span.place != HOST), key=lambda span: span.begin)
    calls = [span for span in events if span.place == HOST]
    idle, names = gaps(kernels), [span.what for span in kernels]
    collectives = Counter(span.place for span in kernels if COLLECTIVE.search(span.what))
    longest = max(calls, key=lambda span: span.end - span.begin)
    return {
        "profiled step ms": (max(span.end for span in kernels) - kernels[0].begin) / 1e3 / steps,
        "idle ms a step": sum(idle) / 1e3 / steps,
        "longest gap us": max(idle, default=0.0),
        "kernels": sum(not name.startswith("Mem") for name in names),
        "collectives by stream": ", ".join(f"{place}: {count}" for place, count in sorted(collectives.items())) or "0",
        "launches": sum(bool(re.match(r"cu(da)?Launch", span.what)) for span in calls),
        **{f"copies {kind}": sum(f"Memcpy {kind}" in name for name in names) for kind in ("HtoD", "DtoH", "DtoD")},
        "host waits": host_waits(events),
        "longest call": f"{longest.what}, {(longest.end - longest.begin) / 1e3:.1f} ms",
    }


# -- a profile of two steps

UNLABELED = f"{OURS}, no labels"


@contextmanager
def without_labels() -> Iterator[None]:
    before = list(plugins.OBSERVERS)
    plugins.OBSERVERS[:] = [each for each in before if not isinstance(each, ProfilerLabels)]
    assert len(plugins.OBSERVERS) < len(before)
    try:
        yield
    finally:
        plugins.OBSERVERS[:] = before


def rank_profile(target: Target, variant: str) -> tuple[float, list[Span]]:
    """Return the median milliseconds of a step without a profiler, and the events of two steps."""
    width, rows = width_of(target), 512
    with target.mesh() as mesh, without_labels() if variant == UNLABELED else nullcontext():
        model = sharded(target, variant.split(",")[0], mesh, width, bf16=True)
        optimizer = adam(model)
        times = []
        for number in range(9):
            batch = batch_of(target, dist.get_rank(), number, width, rows)
            target.synchronize()
            begin = time.perf_counter()
            step(model, optimizer, batch)
            target.synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
        dist.barrier()
        events = device_events(lambda: [step(model, optimizer, batch) for _ in range(2)])
        return statistics.median(times[4:]), events


def profile(target: Target, result: Result) -> None:
    """Count kernels, copies, collectives, host waits and idle time of two steps, and draw their streams."""
    if target.device == "simulated":
        simulated_profile(result)
        return
    for ranks in target.ranks():
        rows, drawn = [], {}
        for variant in (OURS, PEER, UNLABELED):
            plain, events = run_ranks(rank_profile, ranks, target, variant, timeout=60)[0]
            rows.append({"ranks": ranks, "library": variant, "step ms": plain} | counts(events, 2))
            if variant == OURS and rows[-1]["host waits"]:
                result.failures.append(f"the host waited {rows[-1]['host waits']} times in two steps on {ranks} ranks")
            drawn[variant] = events
        result.add("Two steps in bf16 on rank 0, the counts of both", rows)
        draw(result, f"timeline-{ranks}.png", drawn, "µs")


def simulated_profile(result: Result) -> None:
    found = {library: simulated_step(library, 64) for library in (PEER, OURS)}
    result.add("A step in virtual time on 64 ranks", [row for row, _ in found.values()])
    result.notes.append(
        "Host waits, gaps and labels need a profiler of the device; the simulated one has none. The picture has the "
        "work of streams, and the network."
    )
    draw(result, "timeline.png", {library: spans for library, (_, spans) in found.items()}, "virtual µs")


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


def draw(result: Result, name: str, spans: dict[str, list[Span]], unit: str) -> None:
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
        lanes = sorted({span.place for span in found})
        zero = min((span.begin for span in found), default=0.0)
        for index, lane in enumerate(lanes):
            bars = [span for span in found if span.place == lane]
            colors = [
                "tab:orange" if COLLECTIVE.search(bar.what) else "tab:gray" if "Mem" in bar.what else "tab:blue"
                for bar in bars
            ]
            places = [(bar.begin - zero, max(bar.end - bar.begin, 0.1)) for bar in bars]
            axis.broken_barh(places, (index - 0.4, 0.8), facecolors=colors, edgecolor="white", linewidth=0.2)
        axis.set(yticks=range(len(lanes)), yticklabels=lanes, title=library)
    axes[-1][0].set_xlabel(unit)
    figure.tight_layout()
    figure.savefig(result.folder / name, dpi=110)
    pyplot.close(figure)
    result.pictures.append(f"{result.folder.name}/{name}")


# -- offloaded shards

LEDGER = {
    "copies HtoD": "Memcpy HtoD",
    "collectives": "(?i)nccl",
    "kernels": "(?!Mem)(?i:(?!.*nccl)).*",
    "copies DtoH": "Memcpy DtoH",
    "waits of the host": WAITS.pattern,
    "optimizer": "optimizer$",
}
"""The names of kinds of work in an offloaded step."""


def rank_offload(target: Target, libraries: Sequence[str]) -> list[tuple[dict[str, Any], list[Span]]]:
    """Train a group of 0.6 GB of shards with each library, one after the other, or a small one on a simulated device.

    Return the seconds of six steps, and page-locked bytes of the first library; and the events of one more step.
    """
    width = 4096 if target.device == "cuda" else 64
    count = 9 * dist.get_world_size() if target.device == "cuda" else 3
    found = []
    for library in libraries:
        with target.mesh() as mesh:
            torch.manual_seed(0)
            model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
            of = LIBRARIES[library]
            of.fully_shard(model, mesh=mesh, offload_policy=of.CPUOffloadPolicy())
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

            def train(number: int, model: Any = model, optimizer: Any = optimizer) -> None:
                model(batch_of(target, dist.get_rank(), number, width)).square().mean().backward()
                with torch.profiler.record_function("optimizer"):
                    optimizer.step()
                optimizer.zero_grad()

            times = []
            for number in range(6):
                target.synchronize()
                dist.barrier()
                begin = time.monotonic()
                train(number)
                target.synchronize()
                times.append(time.monotonic() - begin)
            row: dict[str, Any] = {"shards MB": sum(4 * p.to_local().numel() for p in model.parameters()) / MB}
            row |= {"first step s": times[0], "steps 2 to 6 s": spread(times[1:])}
            events: list[Span] = []
            if target.device == "cuda":
                if not found:
                    row["pinned MB"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) / MB
                events = device_events(partial(train, 6), "optimizer")
            found.append((row, events))
    return found


def ledger(events: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Yield when each kind of work of a step begins and ends, in the order of the begins."""
    zero = min(span.begin for span in events)
    kinds = {kind: [span for span in events if re.match(pattern, span.what)] for kind, pattern in LEDGER.items()}
    kinds["kernels"] = [span for span in kinds["kernels"] if span.place != HOST]
    for kind, spans in sorted(kinds.items(), key=lambda item: min((span.begin for span in item[1]), default=0.0)):
        if spans:
            yield {
                "work": kind,
                "count": len(spans),
                "begin ms": (min(span.begin for span in spans) - zero) / 1e3,
                "end ms": (max(span.end for span in spans) - zero) / 1e3,
                "busy ms": sum(span.end - span.begin for span in spans) / 1e3,
            }


def offload(target: Target, result: Result) -> None:
    """Train with offloaded shards, each library first once, and list what runs when in one step."""
    if target.device == "simulated":
        result.add("Offload of one group, on rank 0", [run_ranks(rank_offload, PAIR, target, (OURS,))[0][0][0]])
        import offload_order

        sums, rows = offload_order.measure()
        result.add("An offloaded step in virtual time", sums)
        result.add("What waits for what in it", rows)
        return
    rows = []
    for order in ((OURS, PEER), (PEER, OURS)):
        kill_ranks()  # processes without page-locked memory
        found = dict(zip(order, run_ranks(rank_offload, target.most, target, order, timeout=70)[0], strict=True))
        rows += [{"library": library, "first": order[0]} | row for library, (row, _) in found.items()]
        if order[0] == OURS:
            ledgers = [{"library": library} | row for library, (_, events) in found.items() for row in ledger(events)]
    result.add("Offload of one group, on rank 0", rows)
    result.add("A step of it, on rank 0", ledgers)
    row = rows[0]
    if row.get("pinned MB", 0) > 2.2 * row["shards MB"] + 64:  # shards and gradients, and a tenth
        result.failures.append(f"{row['pinned MB']:.0f} MB are page-locked for {row['shards MB']:.0f} MB of shards")
