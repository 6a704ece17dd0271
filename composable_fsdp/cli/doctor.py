"""``doctor``: checks whether this machine, and the ranks of a job, can train."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from rich.text import Text

from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp._consistency.store_rendezvous import StoreRendezvous
from composable_fsdp._memory.device_capabilities import current_accelerator
from composable_fsdp.cli.doctor_checks import (
    Finding,
    Machine,
    RankOutcome,
    Severity,
    check_machine,
    check_missing,
    check_ranks,
)
from composable_fsdp.cli.printing import Json, console, count, print_json
from composable_fsdp.plugins.shared_memory.connect import host_identity

__all__ = ["Examined", "doctor", "examine_ranks", "read_machine"]

_LEAVE_SECONDS = 5.0
_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "COMPOSABLE_FSDP_")
_TORCHRUN_PORT = 29500


def doctor(
    timeout: Annotated[float, typer.Option(min=1, help="seconds to wait for other ranks")] = 30.0,
    backend: Annotated[str, typer.Option(help="the backend that your program gives to init_process_group")] = "",
    as_json: Json = False,
) -> None:
    """Check versions, backends, and the variables of torchrun and of this package.

    Under torchrun also: which ranks are on which host, whether all of them reach the store and take part in an
    all-reduce over gloo, and the differences of their versions. Exit code 1 if an error was found.

    Examples:

    composable-fsdp doctor

    torchrun --nproc-per-node 8 -m composable_fsdp doctor --json
    """
    machine = read_machine()
    is_broken = any(
        each.check == "launch" and each.severity is Severity.ERROR for each in check_machine(machine, backend)
    )
    rank, world_size = machine.number("RANK", 0), machine.number("WORLD_SIZE", 1)
    if world_size == 1 or is_broken:
        examined = Examined({rank: machine}, [], rank)
    else:
        examined = _examine(machine, rank, world_size, timeout)
    rows = _rows(examined, backend)
    if rank == examined.speaker:
        if as_json:
            print_json([{"ranks": ranks, **asdict(finding)} for finding, ranks in rows])
        else:
            _show(rows, world_size)
    raise typer.Exit(int(any(finding.severity is Severity.ERROR for finding, _ in rows)))


def _examine(machine: Machine, rank: int, world_size: int, seconds: float) -> Examined:
    """Meet the other ranks over the store that torchrun's variables name."""
    address, port = machine.environment["MASTER_ADDR"], int(machine.environment["MASTER_PORT"])
    has_agent = machine.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = timedelta(seconds=seconds)
    try:
        base = dist.TCPStore(
            address, port, world_size, rank == 0 and not has_agent, limit, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        problem = str(error).split("\n", 1)[0]
        text = f"rank {rank} does not reach the store at {address}:{port}: {problem}"
        remedy = "start rank 0, open its port in the firewall, and give MASTER_ADDR as other hosts know it"
        return Examined({rank: machine}, [Finding("network", Severity.ERROR, text, remedy)], rank)
    attempt = machine.environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"composable_fsdp doctor {attempt}", base)
    examined = examine_ranks(store, rank, world_size, machine, seconds)
    store.add("left", 1)
    end = time.monotonic() + _LEAVE_SECONDS
    while rank == 0 and not has_agent and store.add("left", 0) < len(examined.machines) and time.monotonic() < end:
        time.sleep(0.01)  # the store ends with this process
    return examined


@dataclass(frozen=True, slots=True)
class Examined:
    """The values of ranks' systems by rank, the findings about the ranks together, and the rank that shows them."""

    machines: Mapping[int, Machine]
    findings: Sequence[Finding]
    speaker: int


def examine_ranks(store: dist.Store, rank: int, world_size: int, machine: Machine, seconds: float) -> Examined:
    """Exchange values with all ranks, and all-reduce over gloo.

    All ranks must call it together. If all do, the result is the same on all of them. Otherwise those that do get an
    error that names the others, after at most four times ``seconds``.
    """
    meeting = StoreRendezvous("doctor", rank, range(world_size))
    verdict = meeting.meet(store, json.dumps({"rank": rank, "machine": asdict(machine)}), seconds)
    if verdict.missing:
        errors = check_missing(verdict.missing, "the rendezvous over the store", seconds)
        return Examined({rank: machine}, errors, min(set(range(world_size)) - set(verdict.missing)))
    told = {each["rank"]: each["machine"] for each in map(json.loads, verdict.notes)}
    machines = {number: _machine(told[number]) for number in sorted(told)}
    outcome = _all_reduce(dist.PrefixStore("doctor gloo", store), rank, world_size, seconds)
    verdict = meeting.meet(store, json.dumps({"rank": rank, "outcome": asdict(outcome)}), 2 * seconds)
    if verdict.missing:
        speaker = min(set(machines) - set(verdict.missing))
        return Examined(machines, check_missing(verdict.missing, "the all-reduce", 2 * seconds), speaker)
    outcomes = {each["rank"]: RankOutcome(**each["outcome"]) for each in map(json.loads, verdict.notes)}
    return Examined(machines, check_ranks(machines, dict(sorted(outcomes.items()))), 0)


def _machine(values: dict[str, Any]) -> Machine:
    return Machine(**{**values, "backends": tuple(values["backends"])})


def _all_reduce(store: dist.Store, rank: int, world_size: int, seconds: float) -> RankOutcome:
    """All-reduce 4 KiB over gloo."""
    ones = torch.ones(1024)
    try:
        group: Any = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=seconds))
        group.allreduce([ones.clone()]).wait()  # the first one connects
        begin = time.perf_counter()
        group.allreduce([ones]).wait()
        taken = time.perf_counter() - begin
    except RuntimeError as error:
        return RankOutcome(str(error).split("\n", 1)[0] or type(error).__name__)
    if not ones.eq(world_size).all():
        return RankOutcome(f"the sum of ones over {world_size} ranks is {ones.min():g} to {ones.max():g}")
    return RankOutcome("", taken)


def read_machine() -> Machine:
    """Return the values of this process's system."""
    environment = {name: v for name, v in os.environ.items() if name in _VARIABLES or name.startswith(_PREFIXES)}
    accelerator = current_accelerator()
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    return Machine(
        host=host_identity() or socket.gethostname(),
        versions={
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "numpy", "composable_fsdp")},
        },
        requirement=_requirement(),
        backends=tuple(name for name in ("gloo", "nccl", "xccl", "mpi") if dist.is_backend_available(name)),
        accelerator=accelerator.type if accelerator else "",
        native_backend=dist.get_default_backend_for_device(accelerator.type) if accelerator else "",
        devices=torch.accelerator.device_count() if accelerator else 0,
        environment=environment,
        master_problem=_resolution_problem(address) if address else "",
        port_is_taken=_is_taken(int(port) if port.isdecimal() else _TORCHRUN_PORT),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _requirement() -> str:
    """Return this package's requirement for torch, or an empty text if it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for each in importlib.metadata.requires("composable-fsdp") or ():
            if each.startswith("torch") and not each[5:6].isalnum():
                return each
    return ""


def _resolution_problem(name: str) -> str:
    """Return why the host ``name`` has no address, or an empty text."""
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return True
    return False


def _rows(examined: Examined, backend: str) -> list[tuple[Finding, list[int]]]:
    """Return the distinct findings, each with the ranks that have it; none for those about the ranks together."""
    rows: dict[Finding, list[int]] = {}
    for rank, machine in examined.machines.items():
        for finding in check_machine(machine, backend):
            rows.setdefault(finding, []).append(rank)
    return [*rows.items(), *((finding, []) for finding in examined.findings)]


def _show(rows: Sequence[tuple[Finding, list[int]]], world_size: int) -> None:
    table = Table("", "check", "ranks", "found")
    table.columns[-1].overflow = "fold"
    for finding, ranks in rows:
        style = _STYLES[finding.severity]
        who = "all" if len(ranks) in (0, world_size) else format_ranks(ranks).partition(" ")[2]
        text = f"{finding.text}\n→ {finding.remedy}" if finding.remedy else finding.text
        table.add_row(Text(finding.severity.value, style), finding.check, who, text)
    out = console()
    out.print(table)
    errors, warnings = (sum(f.severity is kind for f, _ in rows) for kind in (Severity.ERROR, Severity.WARNING))
    out.print(f"{count(errors, 'error')}, {count(warnings, 'warning')}")
