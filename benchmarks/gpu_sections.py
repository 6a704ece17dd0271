"""The sections of ``gpu_report.py``. Functions whose names begin with ``rank_`` run on every rank."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from libraries import LIBRARIES, shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(1, str(Path(__file__).parents[1]))  # after this folder

from composable_fsdp import CPUOffloadPolicy, fully_shard, plugins, unsharded_params
from tests.helpers.run_ranks import run_ranks
from tests.simulation import BACKEND, simulated_accelerator
from tests.simulation.accelerator import active
from tests.simulation.nccl import stands_in

__all__ = ["SECTIONS", "CannotRun", "Result", "Section", "Target"]

ROOT = Path(__file__).parents[1]
TOLERANCE = 2e-4
MB = 1 << 20
OURS, PEER = "ours", "fsdp2"


class CannotRun(Exception):
    """Raised by a section that cannot run here, with the reason."""


@dataclass(frozen=True)
class Target:
    """The devices of this machine: ``"cuda"`` or ``"simulated"``, their number and their name."""

    device: str
    count: int
    name: str

    @staticmethod
    def find(device: str) -> Target:
        if device == "simulated":
            return Target(device, 1, "simulated")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return Target(device, count, torch.cuda.get_device_name(0) if count else "no GPU")

    @property
    def type(self) -> str:
        """The device type of tensors."""
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def pair(self) -> int:
        """Two ranks, or one on one GPU, since NCCL takes a GPU per rank."""
        return 2 if self.device == "simulated" or self.count > 1 else 1

    @contextmanager
    def mesh(self, stand_in: str = "", *, bound: bool = False) -> Iterator[DeviceMesh]:
        """Make a mesh of all ranks; with fewer GPUs than ranks they share them, over gloo.

        Args:
            stand_in: on a simulated device, the variant of the stand-in for NCCL.
            bound: bind the default process group to the device of this rank.
        """
        if self.device == "simulated":
            with ExitStack() as stack:
                backend = BACKEND
                if stand_in:
                    backend = stack.enter_context(stands_in(stand_in, bound=bound)).backend
                group = dist.new_group(backend=backend)
                stack.enter_context(simulated_accelerator())
                yield DeviceMesh.from_group(group, "cpu")
            return
        index = dist.get_rank() % self.count
        torch.cuda.set_device(index)
        if bound:
            rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
            dist.barrier()
            dist.destroy_process_group()
            again = dist.PrefixStore("bound", store)
            dist.init_process_group(
                "nccl", store=again, rank=rank, world_size=size, device_id=torch.device("cuda", index)
            )
        yield DeviceMesh.from_group(dist.new_group(backend=self.backend(dist.get_world_size())), "cuda")

    def captured(self, run: Callable[[], torch.Tensor], times: int) -> list[float]:
        """Capture ``run`` into a CUDA graph, replay it ``times``, and return the results.

        A simulated device has no graphs: each time is a capture, which runs at once.
        """
        found = []
        if self.device == "simulated":
            for _ in range(times):
                torch.cpu.synchronize()
                side: Any = torch.cpu.Stream()
                with torch.cpu.stream(side), active[-1].capture():
                    result = run()
                torch.cpu.synchronize()
                found.append(float(result))
            return found
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()
        for _ in range(times):
            graph.replay()
            torch.cuda.synchronize()
            found.append(float(result))
        return found

    def backend(self, ranks: int) -> str:
        if self.device == "simulated":
            return BACKEND
        return "nccl" if ranks <= self.count else "gloo"

    def ranks(self) -> list[int]:
        """The numbers of ranks to run with. The race detector is slow, so that it has few."""
        return [1, 2, 4] if self.device == "cuda" else [1, 2]

    def synchronize(self) -> None:
        torch.get_device_module(self.type).synchronize()


@dataclass
class Result:
    """The tables, notes, pictures and failures of a section."""

    folder: Path
    tables: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, title: str, columns: list[str], rows: list[dict[str, Any]]) -> None:
        self.tables.append({"title": title, "columns": columns, "rows": rows})

    def content(self) -> dict[str, Any]:
        return {"tables": self.tables, "notes": self.notes, "pictures": self.pictures}


# -- models


class Block(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def build(width: int, depth: int = 4) -> nn.Sequential:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def width_of(target: Target) -> int:
    return 2048 if target.device == "cuda" else 64


def batch_of(target: Target, rank: int, step: int, width: int, rows: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, width, generator=generator).to(target.type)


def sharded(
    target: Target, library: str, mesh: DeviceMesh, width: int, *, bf16: bool = False, **options: Any
) -> nn.Module:
    model = build(width).to(target.type)
    shard(LIBRARIES[library], model, list(model), mesh, bf16=bf16, **options)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


# -- environment


def environment(target: Target, result: Result) -> None:
    from torch.utils.collect_env import get_pretty_env_info

    variables = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_", "CUDA_", "COMPOSABLE_FSDP_"))}
    result.add("Variables", ["name", "value"], [{"name": k, "value": v} for k, v in sorted(variables.items())])
    if target.device == "cuda":
        rows = []
        for index in range(target.count):
            found = torch.cuda.get_device_properties(index)
            peers = [
                other
                for other in range(target.count)
                if other != index and torch.cuda.can_device_access_peer(index, other)
            ]
            rows.append(
                {
                    "index": index,
                    "name": found.name,
                    "GiB": found.total_memory / 2**30,
                    "multiprocessors": found.multi_processor_count,
                    "peers": peers,
                }
            )
        result.add("Devices", ["index", "name", "GiB", "multiprocessors", "peers"], rows)
        result.notes.append(f"CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}")
        for command in (["nvidia-smi"], ["nvidia-smi", "topo", "-m"]):
            found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            result.notes.append(f"```text\n{(found.stdout or found.stderr).strip()}\n```")
    else:
        result.notes.append(
            "Devices are simulated on a CPU: `tests.simulation.simulated_accelerator`, and virtual time."
        )
    result.notes.append(f"```text\n{get_pretty_env_info()}\n```")


# -- the first questions on a GPU


def name_of(plugin: Any) -> str:
    """Return the name of a plugin: of a function, a class, or the class of an observer."""
    name: str = getattr(plugin, "__name__", type(plugin).__name__)
    return name


DEFAULT_NAMES = [name_of(each) for each in (*plugins.DEFAULT_TRANSPORTS, *plugins.DEFAULT_AROUND, *plugins.DEFAULT)]


def rank_losses(target: Target, case: Case) -> list[float]:
    """Return the losses of four steps of ours, with the attachments and settings of ``case``."""
    width = width_of(target)
    with case.attaching(), target.mesh(case.backend, bound=case.is_bound) as mesh:
        model: Any = sharded(target, OURS, mesh, width)
        optimizer = adam(model)
        losses = []
        for number in range(4):
            if number == 2 and case.off == "calibrate":
                model.calibrate(1)
            if number == 2 and case.off == "unsharded_params":
                with unsharded_params(model):
                    assert all(p.isfinite().all() for p in model.parameters())
            losses.append(step(model, optimizer, batch_of(target, dist.get_rank(), number, width)))
        return [float(loss) for loss in losses]


@dataclass(frozen=True)
class Case:
    """One training of :func:`rank_losses`.

    Args:
        name: its name in tables.
        attached: the plugins, by name; ``None`` for all that are on by default.
        off: a part that is off by default, which it uses.
        backend: the name of the backend; an empty text for the default.
        is_bound: pass ``device_id=`` to ``init_process_group``.
        environment: variables of its processes, which end with it if the case is bound.
    """

    name: str
    attached: tuple[str, ...] | None = None
    off: str = ""
    backend: str = ""
    is_bound: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def attaching(self) -> Iterator[None]:
        """Attach these plugins only, to what the core has itself. A process may serve several cases."""
        lists: list[list[Any]] = [plugins.TRANSPORTS, plugins.AROUND, plugins.OBSERVERS]
        before = [list(each) for each in lists]
        for each in lists if self.attached is not None else ():
            each[:] = [p for p in each if (name := name_of(p)) not in DEFAULT_NAMES or name in (self.attached or ())]
        try:
            yield
        finally:
            for each, former in zip(lists, before, strict=True):
                each[:] = former


def train_cases(target: Target, result: Result, title: str, cases: list[Case], seconds: float) -> None:
    """Train each case, within ``seconds`` for all, and compare its losses with those of the first."""
    rows, first = list[dict[str, Any]](), list[float]()
    end = time.monotonic() + seconds
    for case in cases:
        begin = time.monotonic()
        if end - begin < 5:
            result.failures.append(f"{case.name}: no time was left for it")
            continue
        try:
            losses = run_ranks(
                rank_losses, target.pair, target, case, timeout=min(60, end - begin), environment=case.environment
            )[0]
        except AssertionError as error:
            result.failures.append(f"{case.name}: {last_error(error)}")
            rows.append({"case": case.name, "result": "failed", "seconds": time.monotonic() - begin})
            continue
        first = first or losses
        is_equal = all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(losses, first, strict=True))
        if not is_equal:
            result.failures.append(f"{case.name}: losses {losses}, not {first}")
        found = "equal" if is_equal else "differs"
        rows.append({"case": case.name, "result": found, "seconds": time.monotonic() - begin})
    result.add(title, ["case", "result", "seconds"], rows)


def rank_contexts(target: Target) -> list[tuple[int, int]]:
    """Train, and return the process and the GPU of each context on this machine, as ``nvidia-smi`` lists them."""
    rank_losses(target, Case("contexts"))
    time.sleep(2)  # for threads that look at operations in flight
    if target.device == "simulated":
        return [(os.getpid(), dist.get_rank())]
    dist.barrier()
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    uuids = sorted({line.split(", ")[1] for line in lines})
    found = [(int(line.split(", ")[0]), uuids.index(line.split(", ")[1])) for line in lines]
    dist.barrier()
    return found


def contexts(target: Target, result: Result) -> None:
    """Count the contexts of each process. Devices are not split by ``CUDA_VISIBLE_DEVICES``."""
    found = sorted(set(run_ranks(rank_contexts, target.pair, target, timeout=100)[0]))
    result.add("Contexts", ["process", "GPU"], [{"process": pid, "GPU": gpu} for pid, gpu in found])
    if target.device == "simulated":
        result.notes.append("Threads that touch a simulated device without having set it raise in `tests/ranks`.")
    elif len(found) != target.pair:
        result.failures.append(f"{len(found)} contexts of {target.pair} processes: a thread has opened one on GPU 0")


def attachments(target: Target, result: Result) -> None:
    """Train with the core alone, then with each plugin that is on, then with each part that is off by default."""
    cases = [Case("core alone", ())]
    cases += [Case(name, (name,)) for name in DEFAULT_NAMES]
    cases += [Case("all that are on by default")]
    cases += [Case(off, off=off) for off in ("calibrate", "unsharded_params")]
    train_cases(target, result, "Losses with one attachment at a time, beside those of the core alone", cases, 400)


def backends(target: Target, result: Result) -> None:
    """Train with both classes of NCCL, with and without a default group that is bound to its device."""
    variants = {
        f"TORCH_DIST_USE_NCCL2={value}": ("nccl2" if value else "nccl", {"TORCH_DIST_USE_NCCL2": str(value)})
        for value in (0, 1)
    }
    cases = [
        Case(
            f"{name}, device_id= {'given' if bound else 'not given'}",
            backend=backend,
            is_bound=bound,
            environment=environment | {"BOUND": str(bound)},  # processes of their own: the default group is another
        )
        for name, (backend, environment) in variants.items()
        for bound in (False, True)
    ]
    train_cases(target, result, "Losses by the class of the backend", cases, 200)


def rank_offload(target: Target) -> dict[str, float]:
    """Train a group of 1.125 GB of shards, or a small one on a simulated device. Return times and pinned bytes."""
    width = 4096 if target.device == "cuda" else 64
    count = 18 * dist.get_world_size() if target.device == "cuda" else 3
    with target.mesh() as mesh:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        begin = time.monotonic()
        for number in range(3):
            step(model, optimizer, batch_of(target, dist.get_rank(), number, width))
        target.synchronize()
        held = sum(4 * p.to_local().numel() for p in model.parameters())
        row = {"shards MB": held / MB, "seconds of 3 steps": time.monotonic() - begin}
        if target.device == "cuda":
            row["pinned MB"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) / MB
        return row


def offload(target: Target, result: Result) -> None:
    row = run_ranks(rank_offload, target.pair, target, timeout=150)[0]
    result.add("Offload of one group, on rank 0", list(row), [row])
    if row.get("pinned MB", 0) > 2.2 * row["shards MB"] + 64:  # shards and gradients, and a tenth
        result.failures.append(f"{row['pinned MB']:.0f} MB are page-locked for {row['shards MB']:.0f} MB of shards")


def rank_capture(target: Target, is_captured: bool) -> list[float]:
    """Return the losses of three eager steps and of two more, which are captured with ``is_captured``."""
    width = width_of(target)
    with target.mesh() as mesh:
        model: Any = sharded(target, OURS, mesh, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = batch_of(target, dist.get_rank(), 0, width)

        def run() -> torch.Tensor:
            return step(model, optimizer, batch)

        losses = [float(run()) for _ in range(3)]
        return losses + (target.captured(run, 2) if is_captured else [float(run()) for _ in range(2)])


def capture(target: Target, result: Result) -> None:
    if target.device == "cuda" and target.backend(target.pair) != "nccl":
        raise CannotRun("gloo cannot be captured: it takes a GPU per rank")
    eager, captured = (run_ranks(rank_capture, target.pair, target, each, timeout=55)[0] for each in (False, True))
    differences = [abs(a - b) / max(abs(b), 1e-9) for a, b in zip(captured, eager, strict=True)]
    result.add("A captured step beside eager ones", ["largest difference"], [{"largest difference": max(differences)}])
    if max(differences) > TOLERANCE:
        result.failures.append(f"losses of a captured step differ by {max(differences):.2g}")


# -- tests


def tests(target: Target, result: Result) -> None:
    """Run the tests for the device; on the simulated one, those that train on it over several ranks."""
    files = (
        ["tests/gpu"]
        if target.device == "cuda"
        else ["tests/gpu", "tests/ranks/test_races.py", "tests/unit/test_accelerator.py"]
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--tb=short", *files]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = found.stdout.strip().splitlines()
    result.notes.append(f"`{' '.join(command[1:])}`")
    result.notes.append("```text\n" + "\n".join(lines[-40:]) + "\n```")
    if found.returncode:
        result.failures.append(lines[-1] if lines else found.stderr[-500:])


# -- parity

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "stays unsharded": {"reshard_after_forward": False},
    "bf16": {"bf16": True},
}


def rank_parity(target: Target, options: dict[str, Any]) -> list[list[float]]:
    """Return the losses of five steps of ours, FSDP2 and, without bf16, the unsharded model on all ranks' batches."""
    width, ranks = width_of(target) // 4, dist.get_world_size()
    curves = []
    with target.mesh() as mesh:
        for library in (OURS, PEER):
            model = sharded(target, library, mesh, width, **options)
            optimizer = adam(model)
            batches = [batch_of(target, dist.get_rank(), number, width) for number in range(5)]
            total = torch.stack([step(model, optimizer, batch).cpu() for batch in batches])
            dist.all_reduce(total)  # over the gloo group of all ranks
            curves.append((total / ranks).tolist())
    if not options.get("bf16"):
        model = build(width).to(target.type)
        optimizer, losses = adam(model), []
        for number in range(5):
            batches = torch.cat([batch_of(target, rank, number, width) for rank in range(ranks)])
            losses.append(step(model, optimizer, batches).item())
        curves.append(losses)
    return curves


def parity(target: Target, result: Result) -> None:
    rows = []
    for ranks in target.ranks():
        for name, options in VARIANTS.items():
            row = {"ranks": ranks, "backend": target.backend(ranks), "variant": name}
            try:
                ours, *others = run_ranks(rank_parity, ranks, target, options, timeout=90)[0]
            except AssertionError as error:
                result.failures.append(f"{name} on {ranks} ranks: {last_error(error)}")
                rows.append(row | {"result": "failed"})
                continue
            differences = [
                max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(ours, other, strict=True)) for other in others
            ]
            limit = TOLERANCE if name != "bf16" else 2e-2
            good = all(difference <= limit for difference in differences)
            rows.append(
                row
                | {
                    "from FSDP2": differences[0],
                    "from unsharded": differences[1] if len(differences) > 1 else None,
                    "allowed": limit,
                    "result": "equal" if good else "differs",
                }
            )
            if not good:
                result.failures.append(f"{name} on {ranks} ranks: losses differ by {max(differences):.2g}")
    result.add(
        "Largest relative difference of the loss over five steps of AdamW",
        ["ranks", "backend", "variant", "from FSDP2", "from unsharded", "allowed", "result"],
        rows,
    )


def last_error(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


# -- races


def rank_races(target: Target, library: str, options: dict[str, Any], planted: bool) -> int:
    """Train, and return the number of races of the simulated accelerator; CUDA's sanitizer raises instead."""
    width = width_of(target) // 4

    def train(mesh: DeviceMesh) -> None:
        model = sharded(target, library, mesh, width, **options)
        optimizer = adam(model)
        for number in range(3):
            step(model, optimizer, batch_of(target, dist.get_rank(), number, width))
        if planted:
            plant(target)
        target.synchronize()

    if target.device == "simulated":
        with simulated_accelerator() as device:
            train(DeviceMesh.from_group(dist.new_group(backend=BACKEND), "cpu"))
        return len(device.races)
    try:
        with target.mesh() as mesh:
            train(mesh)
    except Exception as error:
        if "CUDASanitizerErrors" in type(error).__name__:
            return len(getattr(error, "errors", [error]))
        raise
    return 0


def plant(target: Target) -> None:
    """Read on one stream what another one writes, without a wait."""
    module: Any = torch.get_device_module(target.type)
    written, side = torch.zeros(64, device=target.type), module.Stream()
    written.add_(1)
    with module.stream(side):
        written.add_(1)


def races(target: Target, result: Result) -> None:
    environment = {"TORCH_CUDA_SANITIZER": "1"} if target.device == "cuda" else {}
    ranks = 2 if target.count > 1 or target.device == "simulated" else 1
    rows = []
    for library, name, planted in [*((lib, v, False) for v in VARIANTS for lib in (OURS, PEER)), (OURS, "fp32", True)]:
        row = {"library": library, "variant": name + ", a wait left out" * planted, "ranks": ranks}
        try:
            found = sum(
                run_ranks(
                    rank_races, ranks, target, library, VARIANTS[name], planted, timeout=120, environment=environment
                )
            )
        except AssertionError as error:
            result.failures.append(f"{row['variant']} of {library}: {last_error(error)}")
            rows.append(row | {"reported": "failed"})
            continue
        rows.append(row | {"reported": found})
        if library == OURS and bool(found) != planted:
            result.failures.append(f"{row['variant']}: {found} accesses were reported")
    how = "the CUDA sanitizer (TORCH_CUDA_SANITIZER=1)" if target.device == "cuda" else "the simulated accelerator"
    result.add(
        f"Accesses that no stream orders, as reported by {how}, over all ranks",
        ["library", "variant", "ranks", "reported"],
        rows,
    )


# -- memory, step time, profile


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
    rows, ranks = [], min(target.count, 2)
    for bf16 in (False, True):
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
    """Return the peak memory of both libraries on 64 ranks, and draw the streams of each in virtual time."""
    from sim.device import Stream

    rows, spans = [], {}
    for library in (PEER, OURS):
        log: list[tuple[str, float, float, str]] = []

        def run(stream: Stream, duration: float, log: list[Any] = log, run: Callable[..., None] = Stream._run) -> None:
            run(stream, duration)
            log.append(
                (
                    f"stream {stream._device.streams.index(stream) if stream in stream._device.streams else '?'}",
                    stream.end - duration,
                    stream.end,
                    "",
                )
            )

        with (
            mock.patch.object(Stream, "_run", run)
            if picture
            else mock.patch.object(Stream, "_unused", None, create=True)
        ):
            rows.append(simulated_row(library, 64))
        spans[library] = last_step(log)
    if picture:
        draw(result, picture, spans, "virtual µs")
    return rows


def simulated_row(library: str, ranks: int) -> dict[str, Any]:
    """Return the peak memory of a step of a model of ``schedule_sweep.py`` at 400 Gbit/s and 20 us."""
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
                steps.run()
            return {"ranks": ranks, "library": library, "peak MB": steps.record().peak}


def last_step(log: list[tuple[str, float, float, str]]) -> list[tuple[str, float, float, str]]:
    """Return the last whole step in ``log``. Time begins again with each step."""
    steps: list[list[tuple[str, float, float, str]]] = [[]]
    latest = 0.0
    for span in log:
        if span[2] < latest / 2 and span[0] == log[0][0]:
            steps.append([])
            latest = 0.0
        latest = max(latest, span[2])
        steps[-1].append(span)
    most = max(map(len, steps))
    return next(found for found in reversed(steps) if 2 * len(found) > most)


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


def step_time(target: Target, result: Result) -> None:
    rows = []
    counts = [n for n in target.ranks() if n <= max(2, target.count)]
    for ranks in counts:
        for bf16 in (False, True):
            times = run_ranks(rank_time, ranks, target, bf16, 20 if target.device == "cuda" else 5, timeout=150)
            slowest = {
                lib: [max(each) for each in zip(*(of[lib] for of in times), strict=True)] for lib in (OURS, PEER)
            }
            medians = {lib: statistics.median(found) for lib, found in slowest.items()}
            rows.append(
                {
                    "ranks": ranks,
                    "backend": target.backend(ranks),
                    "dtype": "bf16" if bf16 else "fp32",
                    "ours ms": medians[OURS],
                    "fsdp2 ms": medians[PEER],
                    "ours/fsdp2": medians[OURS] / medians[PEER],
                }
            )
    result.add(
        "Median time of a step on the slowest rank",
        ["ranks", "backend", "dtype", "ours ms", "fsdp2 ms", "ours/fsdp2"],
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
            step(model, optimizer, batch)
            torch.cuda.synchronize()
    found = []
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        if on_device or event.name().startswith("cuda"):
            row = f"stream {event.device_resource_id()}" if on_device else "host"
            begin = event.start_ns() / 1e3
            found.append((row, begin, begin + event.duration_ns() / 1e3, event.name()))
    return found


def profile(target: Target, result: Result) -> None:
    """Count copies, host waits and idle time of a step, and draw its streams."""
    if target.device == "simulated":
        rows = simulated_steps(result, "timeline.png")
        result.add("A step in virtual time on 64 ranks", ["ranks", "library", "step ms", "peak MB", "chosen"], rows)
        result.notes.append(
            "Copies, host waits and gaps need a profiler of the device; the simulated one has none. "
            "The picture has the work of streams; transfers over the network are the gaps."
        )
        return
    rows, spans, ranks = [], {}, min(target.count, 2)
    for library in (OURS, PEER):
        events = spans[library] = run_ranks(rank_profile, ranks, target, library, timeout=120)[0]
        kernels = sorted((b, e) for row, b, e, name in events if row != "host")
        if not kernels:
            raise CannotRun("the profiler recorded nothing on the device (CUPTI may not be permitted)")
        busy, until = 0.0, kernels[0][0]
        for begin, end in kernels:
            busy += max(0.0, end - max(begin, until))
            until = max(until, end)
        names = [name for row, _, _, name in events if row != "host"]
        calls = [name for row, _, _, name in events if row == "host"]
        waits = [n for n in calls if re.match(r"cuda(Stream|Event|Device)Synchronize", n)]
        rows.append(
            {
                "library": library,
                "step ms": (until - kernels[0][0]) / 1e3,
                "idle ms": (until - kernels[0][0] - busy) / 1e3,
                "kernels": sum("Mem" not in n for n in names),
                "collectives": sum("nccl" in n.lower() for n in names),
                "their streams": len({row for row, _, _, n in events if row != "host" and "nccl" in n.lower()}),
                "launches": sum(bool(re.match(r"cu(da)?Launch", n)) for n in calls),
                **{f"copies {kind}": sum(f"Memcpy {kind}" in n for n in names) for kind in ("HtoD", "DtoH", "DtoD")},
                "host waits": len(waits) - 1,  # the last is that of the benchmark
            }
        )
    result.add("One step in bf16 on rank 0", list(rows[0]), rows)
    if rows[0]["host waits"] > 0:
        result.failures.append(f"the host waited {rows[0]['host waits']} times for the device in a step of ours")
    draw(result, "timeline.png", spans, "µs")


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


@dataclass(frozen=True)
class Section:
    """A section: its title, its function, and its time limit in seconds."""

    title: str
    run: Callable[[Target, Result], None]
    seconds: float


SECTIONS = {
    "environment": Section("Devices, versions and settings.", environment, 60),
    "contexts": Section("Contexts on each GPU: one per process.", contexts, 120),
    "attachments": Section("The core alone, then one attachment at a time.", attachments, 450),
    "backends": Section("Both classes of NCCL, with and without `device_id=`.", backends, 240),
    "parity": Section("Losses beside torch's FSDP2 and an unsharded model.", parity, 240),
    "memory": Section("Peak memory of a step beside FSDP2.", memory, 120),
    "profile": Section("Copies, host waits, idle time and timeline of a step.", profile, 120),
    "offload": Section("Offload of a group of 1.1 GB.", offload, 150),
    "capture": Section("A step captured into a CUDA graph.", capture, 120),
    "races": Section("Accesses to memory that streams do not order.", races, 200),
    "step-time": Section("Time of a step beside FSDP2.", step_time, 180),
    "tests": Section("The tests of the device.", tests, 600),
}
"""The sections, in the order of the first hour on a GPU: what tells most comes first."""
