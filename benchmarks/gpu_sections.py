"""The sections of ``gpu_report.py``. Functions whose names begin with ``rank_`` run on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(1, str(Path(__file__).parents[1]))  # after this folder

from gpu_costs import decoder, memory, profile, step_time
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
    build,
    sharded,
    step,
    width_of,
)
from libraries import LIBRARIES

from composable_fsdp import plugins, unsharded_params
from tests.gpu import settings
from tests.helpers.run_ranks import run_ranks
from tests.simulation import BACKEND, simulated_accelerator

__all__ = ["SECTIONS", "CannotRun", "Result", "Section", "Target"]

ROOT = Path(__file__).parents[1]


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


def rank_losses(target: Target, case: Case) -> tuple[list[float], str]:
    """Train four steps of ours as ``case`` says. Return the losses, and the class of the backend that served them."""
    width = width_of(target)
    with case.attaching(), target.mesh(case.backend, bound=case.is_bound) as mesh:
        model: Any = sharded(target, OURS, mesh, width)
        optimizer = adam(model)
        losses = []
        for number in range(4):
            if number == 2 and case.off == "unsharded_params":
                with unsharded_params(model):
                    assert all(p.isfinite().all() for p in model.parameters())
            losses.append(step(model, optimizer, batch_of(target, dist.get_rank(), number, width)))
        group, device = mesh.get_group(), torch.device(target.type)
        served_by = group._get_backend(device) if device in group._device_types else group
        return [float(loss) for loss in losses], type(served_by).__name__


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
            losses, backend = run_ranks(
                rank_losses, PAIR, target, case, timeout=min(60, end - begin), environment=case.environment
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
        rows.append({"case": case.name, "backend": backend, "result": found, "seconds": time.monotonic() - begin})
    result.add(title, ["case", "backend", "result", "seconds"], rows)


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
    found = sorted(set(run_ranks(rank_contexts, PAIR, target, timeout=100)[0]))
    result.add("Contexts", ["process", "GPU"], [{"process": pid, "GPU": gpu} for pid, gpu in found])
    if target.device == "simulated":
        result.notes.append("Threads that touch a simulated device without having set it raise in `tests/ranks`.")
    elif len(found) != PAIR:
        result.failures.append(f"{len(found)} contexts of {PAIR} processes: a thread has opened one on GPU 0")


def attachments(target: Target, result: Result) -> None:
    """Train with the core alone, then with each plugin that is on, then with each part that is off by default."""
    cases = [Case("core alone", ())]
    cases += [Case(name, (name,)) for name in DEFAULT_NAMES]
    cases += [Case("all that are on by default")]
    cases += [Case("unsharded_params", off="unsharded_params")]
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


def rank_offload(target: Target, library: str) -> dict[str, float]:
    """Train a group of 1.125 GB of shards, or a small one on a simulated device. Return times and pinned bytes."""
    width = 4096 if target.device == "cuda" else 64
    count = 18 * dist.get_world_size() if target.device == "cuda" else 3
    with target.mesh() as mesh:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
        of = LIBRARIES[library]
        of.fully_shard(model, mesh=mesh, offload_policy=of.CPUOffloadPolicy())
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
    libraries = (OURS, PEER) if target.device == "cuda" else (OURS,)
    rows = [{"library": each} | run_ranks(rank_offload, PAIR, target, each, timeout=70)[0] for each in libraries]
    result.add("Offload of one group, on rank 0", list(rows[0]), rows)
    row = rows[0]
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
    eager, captured = (run_ranks(rank_capture, PAIR, target, each, timeout=55)[0] for each in (False, True))
    differences = [abs(a - b) / max(abs(b), 1e-9) for a, b in zip(captured, eager, strict=True)]
    result.add("A captured step beside eager ones", ["largest difference"], [{"largest difference": max(differences)}])
    if max(differences) > TOLERANCE:
        result.failures.append(f"losses of a captured step differ by {max(differences):.2g}")


# -- faults


def faults(target: Target, result: Result) -> None:
    """Leave out a rank in a step, and read the errors of the other one."""
    if target.device == "simulated":
        raise CannotRun("a simulated device computes at once; tests/ranks/test_device_faults.py has such faults")
    text = run_ranks(settings.wait_for_a_missing_rank, 2, target.type, 20.0, timeout=100)[0]
    result.notes.append(f"```text\n{text}\n```")
    if not text.startswith("PeerError") or "rank 1" not in text:
        result.failures.append("the missing rank is not named")


# -- tests


def tests(target: Target, result: Result) -> None:
    """Run the tests for the device; on the simulated one, those that train on it over several ranks."""
    files = (
        ["tests/gpu"]
        if target.device == "cuda"
        else ["tests/gpu", "tests/ranks/test_races_of_processes.py", "tests/unit/test_accelerator.py"]
    )
    plugins_off = ["-p", "no:cacheprovider", "-p", "no:benchmark"]  # the latter warns of -n, and warnings are errors
    command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "-rs", *plugins_off, "--tb=short", *files]
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
            row = {"ranks": ranks, "GPUs": target.shared(ranks), "variant": name}
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
        ["ranks", "GPUs", "variant", "from FSDP2", "from unsharded", "allowed", "result"],
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
    rows, ranks = [], PAIR
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
    "decoder": Section("A decoder in bf16 beside FSDP2, eager and compiled.", decoder, 240),
    "faults": Section("A rank that does not come.", faults, 120),
    "races": Section("Accesses to memory that streams do not order.", races, 200),
    "step-time": Section("Time of a step beside FSDP2.", step_time, 180),
    "tests": Section("The tests of the device.", tests, 600),
}
"""The sections, in the order of the first hour on a GPU: what tells most comes first."""
