"""``doctor``: the versions, the launch variables, and an all-reduce over the ranks of a job.

Functions import torch when they run: the help of the command needs none.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp.cli import printing
from composable_fsdp.errors import ConfigurationError

if TYPE_CHECKING:
    import torch.distributed as dist

_LEAVE_SECONDS = 5.0
_NUMEL = 1 << 20


class Finding(NamedTuple):
    """The result of a check on ``ranks``, or on all ranks if it is empty. A job cannot run with an ``"error"``."""

    severity: str
    check: str
    text: str
    ranks: tuple[int, ...] = ()


def add_commands(commands: printing.Commands) -> None:
    parser = printing.add_command(commands, "doctor", doctor, has_json=True)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds to wait for other ranks (%(default)s)")


def doctor(timeout: float, as_json: bool) -> int:
    """Check versions and the variables of torchrun.

    Under torchrun also: which ranks are on which host, and whether all of them reach the store and take part in an
    all-reduce over gloo. Exit code 1 if an error was found.

    Examples:

      composable-fsdp doctor

      torchrun --nproc-per-node 8 -m composable_fsdp doctor --json
    """
    if not timeout >= 1:
        raise ConfigurationError(f"--timeout must be at least 1 second, not {timeout:g}.")
    found, shows = list(check_launch(os.environ)), True
    if any(each.severity == "error" for each in found) or "RANK" not in os.environ:
        found += check_versions({0: versions()})
    else:
        speaker, others = _meet(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout)
        shows = speaker == int(os.environ["RANK"])
        found += others
    if shows and as_json:
        printing.show_json([each._asdict() for each in found])
    elif shows:
        ranks = [format_ranks(each.ranks).partition(" ")[2] if each.ranks else "all" for each in found]
        rows = [(each.severity, each.check, which, each.text) for each, which in zip(found, ranks, strict=True)]
        printing.show(printing.text_table(("", "check", "ranks", "found"), rows, ()))
    return int(any(each.severity == "error" for each in found))


def _meet(rank: int, ranks: int, seconds: float) -> tuple[int, list[Finding]]:
    """Examine all ranks over the store that torchrun's variables name."""
    import torch.distributed as dist

    from composable_fsdp.plugins.shared_memory.connect import host_identity

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=seconds)
    try:
        base = dist.TCPStore(address, port, ranks, hosts_store, limit, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, ValueError) as error:
        text = f"rank {rank} does not reach the store at {address}:{port}: {printing.first_line(str(error))}. "
        remedy = "Start rank 0, open its port in the firewall, and give MASTER_ADDR as other hosts know it"
        return rank, [Finding("error", "network", text + remedy, (rank,))]
    store = dist.PrefixStore(f"composable_fsdp doctor {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", base)
    found = examine_ranks(store, rank, ranks, seconds, host_identity() or socket.gethostname())
    store.add("left", 1)
    end = time.monotonic() + _LEAVE_SECONDS
    while hosts_store and store.add("left", 0) < ranks and time.monotonic() < end:
        time.sleep(0.01)  # the store ends with this process
    return found


def examine_ranks(store: dist.Store, rank: int, ranks: int, seconds: float, host: str) -> tuple[int, list[Finding]]:
    """All-reduce over gloo, and return the rank that shows the findings, and the findings.

    All ranks must call it together. If all do, the result is the same on all of them. Otherwise those that do get an
    error that names the others, after at most four times ``seconds``.
    """
    import torch.distributed as dist

    from composable_fsdp._consistency.rendezvous import StoreRendezvous

    problem, taken = _all_reduce(dist.PrefixStore("doctor gloo", store), rank, ranks, seconds)
    told = {"rank": rank, "host": host, "versions": versions(), "problem": problem, "seconds": taken}
    verdict = StoreRendezvous("doctor", rank, range(ranks)).meet(store, json.dumps(told), 2 * seconds)
    if verdict.missing:
        text = f"{format_ranks(verdict.missing)} did not come to the all-reduce within {seconds:g} s: not started, "
        speaker = min(set(range(ranks)) - set(verdict.missing))
        return speaker, [Finding("error", "ranks", f"{text}ended, stopped or cut off", tuple(verdict.missing))]
    notes = sorted(map(json.loads, verdict.notes), key=lambda note: note["rank"])
    return 0, [*check_versions({note["rank"]: note["versions"] for note in notes}), *check_ranks(notes)]


def _all_reduce(store: dist.Store, rank: int, ranks: int, seconds: float) -> tuple[str, float]:
    """All-reduce 4 MiB over gloo, and return why it failed, or an empty text, and the seconds that it took."""
    import torch
    import torch.distributed as dist

    ones = torch.ones(_NUMEL)
    try:
        group: Any = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=seconds))
        group.allreduce([ones.clone()]).wait()  # the first one connects
        begin = time.perf_counter()
        group.allreduce([ones]).wait()
        return "", time.perf_counter() - begin
    except RuntimeError as error:
        return printing.first_line(str(error)) or type(error).__name__, 0.0


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages, that of torch with its build, such as ``2.15.0+cu132``."""
    import torch

    from composable_fsdp._consistency.verify_ranks import library_version

    return {"python": platform.python_version(), "torch": str(torch.__version__), "composable_fsdp": library_version()}


def check_launch(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with torchrun's variables, or the number of ranks."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        yield Finding("ok", "launch", "one process. Under torchrun, doctor also checks that ranks reach each other")
        return
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    problems = [f"{name} is not set" for name in needed if name not in environment]
    problems += [
        f"{name}={environment[name][:50]} is not a number"
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
        if name in environment and not re.fullmatch(r"\d{1,9}", environment[name])
    ]
    if not problems and int(environment["RANK"]) >= int(environment["WORLD_SIZE"]):
        problems.append(f"RANK={environment['RANK']} must be less than WORLD_SIZE={environment['WORLD_SIZE']}")
    for problem in problems:
        yield Finding("error", "launch", f"{problem}: torchrun --nproc-per-node N sets all of them")
    if not problems:
        store = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        yield Finding("ok", "launch", f"{environment['WORLD_SIZE']} ranks, store at {store}")


def check_versions(by_rank: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield the versions of packages, and which differ between ranks."""
    for name in next(iter(by_rank.values())):
        found = _grouped({rank: each[name] for rank, each in by_rank.items()})
        if len(found) == 1:
            yield Finding("ok", "versions", f"{name} {next(iter(found))}")
        else:
            text = ", ".join(f"{version} on {format_ranks(ranks)}" for version, ranks in found.items())
            yield Finding("error", "versions", f"{name} differs: {text}. Install the same everywhere")


def check_ranks(notes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield which ranks are on which host, and the outcome of the all-reduce, from the note of each rank."""
    hosts = _grouped({note["rank"]: note["host"] for note in notes})
    text = "; ".join(f"{host.split(' ')[0]}: {format_ranks(ranks)}" for host, ranks in hosts.items())
    yield Finding("ok", "hosts", text)
    problems = _grouped({note["rank"]: note["problem"] for note in notes if note["problem"]})
    for problem, ranks in problems.items():
        remedy = "Set GLOO_SOCKET_IFNAME to an interface on which all ranks reach each other"
        yield Finding("error", "all-reduce", f"failed over gloo on {format_ranks(ranks)}: {problem}. {remedy}", ranks)
    if not problems:
        slowest = max(note["seconds"] for note in notes)
        speed = f"{1e3 * slowest:.1f} ms, {4e-9 * _NUMEL / slowest:.2f} GB/s"
        yield Finding("ok", "all-reduce", f"{len(notes)} ranks over gloo, 4 MiB in {speed}")


def _grouped(by_rank: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each text."""
    return {text: tuple(rank for rank in by_rank if by_rank[rank] == text) for text in by_rank.values()}
