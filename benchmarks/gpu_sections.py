"""The sections of ``gpu_report.py``, in the order of what they tell. Functions named ``rank_...`` run on every rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

sys.path.insert(1, str(Path(__file__).parents[1]))  # after this folder

from gpu_costs import codecs, optimizers, training
from gpu_fault import FAULTS, LAST
from gpu_profile import offload, profile
from gpu_result import UNFINISHED, Result, Section
from gpu_target import (
    MB,
    OURS,
    PAIR,
    PEER,
    TOLERANCE,
    Target,
    adam,
    batch_of,
    last_error,
    sharded,
    step,
    width_of,
)
from report import machine

from composable_fsdp import stream_changed_params, stream_full_params
from composable_fsdp.plugins.weight_stream import SentParams
from tests.helpers.run_ranks import run_ranks
from tests.simulation import BACKEND, simulated_accelerator

__all__ = ["SECTIONS", "find_target", "machine"]

find_target = Target.find

ROOT = Path(__file__).parents[1]


def output_of(*command: str) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError as error:
        return str(error)
    return (found.stdout or found.stderr).strip()


def environment(target: Target, result: Result) -> None:
    variables = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_", "CUDA_", "COMPOSABLE_FSDP_"))}
    result.add("Variables", [{"name": name, "value": value} for name, value in sorted(variables.items())])
    if target.device == "simulated":
        result.notes.append(
            "Devices are simulated on a CPU: `tests.simulation.simulated_accelerator`, and virtual time."
        )
        return
    rows = []
    for index in range(target.count):
        found = torch.cuda.get_device_properties(index)
        others = set(range(target.count)) - {index}
        peers = [other for other in sorted(others) if torch.cuda.can_device_access_peer(index, other)]
        size = {"GiB": found.total_memory / 2**30, "multiprocessors": found.multi_processor_count}
        rows.append({"index": index, "name": found.name} | size | {"peers": peers})
    result.add("Devices", rows)
    result.notes.append(f"CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}")
    for command in (["nvidia-smi"], ["nvidia-smi", "topo", "-m"], [sys.executable, "-m", "pip", "list"]):
        result.notes.append(f"```text\n{output_of(*command)}\n```")


# -- streams of weights to another process

Buckets = Iterator[list[torch.Tensor]]


def full_buckets(model: Any) -> Buckets:
    for bucket in stream_full_params(model, 64 << 20, dtype=torch.bfloat16):
        yield [] if bucket.packed is None else [bucket.packed]


def full_tensors(model: Any) -> Buckets:
    """What is done without streams: an all-gather for each parameter."""
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        yield [parameter.detach().full_tensor().to(torch.bfloat16)]


def changed_values(sent: SentParams, model: Any) -> Buckets:
    """Change one of 50 values, and stream what has changed. The first time it is everything."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().view(-1)[::50].mul_(1.5)
    for flush in stream_changed_params(model, sent, 64 << 20, dtype=torch.bfloat16, rank0_only=True):
        yield [each for each in (flush.values, flush.indices) if each is not None]


def receive(inbox: Any, outbox: Any) -> None:
    """In another process: copy what comes, and send back sums of its bytes, until ``None`` comes."""
    for tensor in iter(inbox.get, None):
        copy = tensor.clone()
        del tensor
        outbox.put(int(copy.view(torch.uint8).sum(dtype=torch.int64)))


def rank_streams(target: Target) -> list[dict[str, Any]]:
    """Send the weights of a sharded model from rank 0 to a process on its GPU, in each way three times."""
    width = 2 * width_of(target)
    rows, context = [], multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    receiver = context.Process(target=receive, args=(inbox, outbox), daemon=True)
    is_sender = dist.get_rank() == 0
    if is_sender:
        receiver.start()
    ways: list[tuple[str, str, Callable[[Any], Buckets]]] = [
        (OURS, "stream of all", full_buckets),
        (OURS, "stream of changes", partial(changed_values, SentParams())),
        (OURS, "each parameter", full_tensors),
        (PEER, "each parameter", full_tensors),
    ]
    with target.mesh("gloo") as mesh:
        for library, name, way in ways:
            model = sharded(target, library, mesh, width)
            for _ in range(3):
                target.synchronize()
                dist.barrier()
                begin, nbytes, messages, equal = time.perf_counter(), 0, 0, True
                for tensors in way(model):
                    for tensor in tensors if is_sender else ():
                        inbox.put(tensor)
                        equal = outbox.get() == int(tensor.view(torch.uint8).sum(dtype=torch.int64)) and equal
                        messages, nbytes = messages + 1, nbytes + tensor.nbytes
                dist.barrier()
                seconds = time.perf_counter() - begin
            row = {"library": library, "way": name, "messages": messages, "MB": nbytes / MB}
            rows.append(row | {"seconds": seconds, "GB/s": nbytes / seconds / 1e9, "equal": equal})
    if is_sender:
        inbox.put(None)
        receiver.join(10)
    return rows


def streams(target: Target, result: Result) -> None:
    """Stream weights from all ranks to another process on the GPU of the first, by CUDA's handles of memory."""
    rows = run_ranks(rank_streams, target.most, target, timeout=100)[0]
    result.add("Weights to another process, the third time", rows)
    result.failures += [f"{row['way']} of {row['library']}: other bytes arrived" for row in rows if not row["equal"]]


# -- CUDA graphs, and memory of the backend

REPLAYS = 10


def rank_capture(target: Target, library: str) -> dict[str, Any]:
    """Capture a step. Return losses of eager steps and of replays, their milliseconds, and memory."""
    width = width_of(target)
    with target.mesh() as mesh:
        runs = []
        for captures in (False, True):
            model: Any = sharded(target, library, mesh, width)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            batch = batch_of(target, dist.get_rank(), 0, width)

            def run(model: Any = model, optimizer: Any = optimizer, batch: torch.Tensor = batch) -> torch.Tensor:
                return step(model, optimizer, batch)

            losses = [float(run()) for _ in range(3)]
            target.synchronize()
            begin = time.perf_counter()
            losses += target.captured(run, REPLAYS) if captures else [float(run()) for _ in range(REPLAYS)]
            runs.append((losses, 1e3 * (time.perf_counter() - begin) / REPLAYS))
        (eager, eager_ms), (captured, captured_ms) = runs
    difference = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(captured, eager, strict=True))
    row = {"largest difference": difference, "eager ms": eager_ms, "capture and replay ms": captured_ms}
    if target.device == "cuda":
        row |= {"allocated MB": torch.cuda.memory_allocated() / MB, "reserved MB": torch.cuda.memory_reserved() / MB}
    return row


def rank_pooled(target: Target, pooled: bool) -> list[float]:
    """Return the losses of three steps, with messages in memory of the backend's own allocator if ``pooled``."""
    width = width_of(target)
    with target.mesh("gloo") as mesh:
        model: Any = sharded(target, OURS, mesh, width, bf16=True)
        for each in (model, *model) if pooled else ():
            each.set_allocate_memory_from_process_group_for_comm(True)
        optimizer = adam(model)
        return [float(step(model, optimizer, batch_of(target, dist.get_rank(), n, width))) for n in range(3)]


def graphs(target: Target, result: Result) -> None:
    """Capture a step of one rank, replay it ten times, and train with memory that NCCL has registered."""
    rows = [{"library": OURS} | run_ranks(rank_capture, 1, target, OURS, timeout=55)[0]]
    if target.device == "cuda":
        try:
            rows.append({"library": PEER} | run_ranks(rank_capture, 1, target, PEER, timeout=55)[0])
        except AssertionError as error:
            rows.append({"library": PEER, "problem": last_error(error)[:160]})
    result.add(f"A captured step on one rank, beside eager ones, {REPLAYS} replays", rows)
    if rows[0]["largest difference"] > TOLERANCE:
        result.failures.append(f"a captured step: {rows[0]}")
    plain, pooled = (run_ranks(rank_pooled, PAIR, target, each, timeout=55)[0] for each in (False, True))
    equal = all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(pooled, plain, strict=True))
    result.add("Messages in memory of the process group, 2 ranks", [{"losses": str(pooled), "equal": equal}])
    if not equal:
        result.failures.append(f"memory of the process group: losses {pooled}, not {plain}")


# -- faults


def fault(target: Target, folder: Path, name: str) -> dict[str, Any]:
    """Run two ranks under torchrun, of which the last has a fault. Return what the other one says, and exit codes."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PAIR), "--monitor-interval", "2"]
    command = [sys.executable, *launcher, "benchmarks/gpu_fault.py", target.type, name, str(folder)]
    limit = 80 if target.device == "cuda" else 300
    with (folder / "output.txt").open("w") as output:
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=limit, check=False)
    end = time.time()
    begin = json.loads((folder / f"{LAST}.json").read_text())["time"] if (folder / f"{LAST}.json").exists() else end
    path = folder / "0.json"
    other = (
        json.loads(path.read_text()) if path.exists() else {"time": end, "text": "no error before torchrun ended it"}
    )
    codes = re.findall(r"exitcode\s*:\s*(-?\d+)", (folder / "output.txt").read_text())
    row = {"fault": name, "s until the other's error": other["time"] - begin, "s until torchrun's end": end - begin}
    return row | {"exit codes": ", ".join(codes), "of torchrun": status.returncode, "text": other["text"]}


def faults(target: Target, result: Result) -> None:
    """Let the last of two ranks raise, be killed, not come, or have no memory left, all at once."""
    with ThreadPoolExecutor(len(FAULTS)) as pool:
        rows = list(pool.map(lambda name: fault(target, result.folder / f"fault-{name}", name), FAULTS))
    texts = {row["fault"]: row.pop("text") for row in rows}
    result.notes += [f"{name}:\n\n```text\n{text}\n```" for name, text in texts.items()]
    result.add("Faults of the last of two ranks", rows)
    result.failures += [f"{name}: the rank is not named" for name, text in texts.items() if "rank 1" not in text]


# -- the sanitizer

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "stays unsharded": {"reshard_after_forward": False},
    "bf16": {"bf16": True},
}


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


def sanitizer(target: Target, result: Result) -> None:
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
    result.add(f"Accesses that no stream orders, as reported by {how}, over all ranks", rows)


# -- classes of NCCL


@dataclass(frozen=True)
class Case:
    """A training with a backend, bound to its device or not, in processes with an environment."""

    backend: str
    is_bound: bool
    environment: dict[str, str] = field(default_factory=dict)


def rank_backend(target: Target, case: Case) -> tuple[list[float], str, int]:
    """Train four steps. Return the losses, the class of the backend, and the contexts on all GPUs."""
    width = width_of(target)
    with target.mesh(case.backend, bound=case.is_bound) as mesh:
        model: Any = sharded(target, OURS, mesh, width)
        optimizer = adam(model)
        losses = [float(step(model, optimizer, batch_of(target, dist.get_rank(), n, width))) for n in range(4)]
        group, device = mesh.get_group(), torch.device(target.type)
        served_by = group._get_backend(device) if device in group._device_types else group
        time.sleep(2)  # for threads that look at operations in flight
        lines = output_of("nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader")
        dist.barrier()
        return losses, type(served_by).__name__, len(lines.splitlines()) if target.device == "cuda" else PAIR


def backends(target: Target, result: Result) -> None:
    """Train with both classes of NCCL, with and without a default group that is bound to its device."""
    rows, first = list[dict[str, Any]](), list[float]()
    for value, bound in [(value, bound) for value in (0, 1) for bound in (False, True)]:
        # Processes of their own: the default group is another.
        variables = {"TORCH_DIST_USE_NCCL2": str(value), "BOUND": str(bound)}
        case = Case("nccl2" if value else "nccl", bound, variables)
        row: dict[str, Any] = {"TORCH_DIST_USE_NCCL2": value, "device_id": "given" if bound else "not given"}
        try:
            losses, name, contexts = run_ranks(
                rank_backend, PAIR, target, case, timeout=60, environment=case.environment
            )[0]
        except AssertionError as error:
            result.failures.append(f"{row}: {last_error(error)}")
            continue
        first = first or losses
        equal = all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(losses, first, strict=True))
        rows.append(row | {"class": name, "losses are equal": equal, "contexts of 2 processes": contexts})
        if not equal or contexts != PAIR:
            result.failures.append(f"{rows[-1]}")
    result.add("Training by the class of the backend", rows)


# -- tests


def tests(target: Target, result: Result) -> None:
    """Run the tests for the device; on the simulated one, the module about it. What has run is in a file."""
    files = ["tests/gpu"] if target.device == "cuda" else ["tests/gpu", "tests/unit/test_accelerator.py"]
    plugins_off = ["-p", "no:cacheprovider", "-p", "no:benchmark"]  # the latter warns of -n, and warnings are errors
    workers = ["-n", "4"] if target.device == "cuda" else []
    command = [sys.executable, "-m", "pytest", "-v", *workers, "-rs", *plugins_off, "--tb=short", *files]
    result.notes.append(f"`{' '.join(command[1:])}`, all of it in `{result.folder.name}/tests.txt`")
    result.write(UNFINISHED)
    with (result.folder / "tests.txt").open("w") as output:
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    lines = (result.folder / "tests.txt").read_text().strip().splitlines()
    result.notes.append("```text\n" + "\n".join(lines[-30:]) + "\n```")
    if status:
        result.failures.append(lines[-1] if lines else "no output")


SECTIONS = {
    "environment": Section("Devices, versions and settings.", environment, 10, 60),
    "training": Section("A decoder in bf16 beside FSDP2, eager and compiled, on 1 and 2 ranks.", training, 160, 240),
    "profile": Section("Kernels, copies, collectives, host waits and gaps of two steps.", profile, 60, 120),
    "offload": Section("Offload of a group of 0.6 GB of shards.", offload, 60, 120),
    "optimizers": Section("Steps of optimizers beside torch's on DTensors.", optimizers, 80, 140),
    "codecs": Section("Encoded messages, compiled and not, and torchao's.", codecs, 70, 140),
    "streams": Section("Streams of weights to another process on the GPU.", streams, 35, 110),
    "graphs": Section("A step captured into a CUDA graph; memory of NCCL.", graphs, 40, 120),
    "faults": Section("A rank that raises, is killed, does not come, or has no memory.", faults, 45, 100),
    "sanitizer": Section("Accesses to memory that streams do not order.", sanitizer, 30, 110),
    "backends": Section("Both classes of NCCL, with and without `device_id=`; contexts.", backends, 45, 120),
    "tests": Section("The tests of the device.", tests, 75, 600),
}
"""The sections, in the order of what they tell."""
