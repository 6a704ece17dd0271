"""``doctor``: checks whether this machine, and the ranks of a job, can train."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import torch.distributed as dist
import typer
from rich.table import Table
from rich.text import Text

from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp.cli.doctor_checks import Finding, Machine, Severity, check_machine
from composable_fsdp.cli.doctor_ranks import Examined, examine_ranks
from composable_fsdp.cli.doctor_values import read_machine
from composable_fsdp.cli.printing import Json, console, count, print_json

__all__ = ["doctor"]

_LEAVE_SECONDS = 5.0
_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}


def doctor(
    timeout: Annotated[float, typer.Option(min=1, help="seconds to wait for other ranks")] = 30.0,
    backend: Annotated[str, typer.Option(help="the backend that your program gives to init_process_group")] = "",
    as_json: Json = False,
) -> None:
    """Check versions, backends, network, shared memory, limits, threads, and the variables of torchrun.

    Under torchrun also: whether ranks reach each other on each interface, over the store and over gloo, and the
    differences of their versions and clocks. Exit code 1 if an error was found.

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
