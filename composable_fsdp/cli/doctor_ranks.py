"""Exchanges between the ranks of a job for ``doctor``: over a store, over sockets, and over gloo."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from composable_fsdp._consistency.store_rendezvous import StoreRendezvous
from composable_fsdp.cli.doctor_checks import (
    Finding,
    Interface,
    Machine,
    RankOutcome,
    Route,
    check_missing,
    check_ranks,
)

__all__ = ["Examined", "examine_ranks"]

_CONNECT_SECONDS = 3.0
_CLOCK_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Examined:
    """The values of ranks' systems by rank, the findings about the ranks together, and the rank that shows them."""

    machines: Mapping[int, Machine]
    findings: Sequence[Finding]
    speaker: int


def examine_ranks(store: dist.Store, rank: int, world_size: int, machine: Machine, seconds: float) -> Examined:
    """Exchange values with all ranks, connect to some on each of their interfaces, and all-reduce over gloo.

    All ranks must call it together. If all do, the result is the same on all of them. Otherwise those that do get an
    error that names the others, after at most four times ``seconds``.
    """
    meeting = StoreRendezvous("doctor", rank, range(world_size))
    token = secrets.token_hex(8)
    with _listening(token) as port:
        own = json.dumps({"rank": rank, "machine": asdict(machine), "port": port, "token": token})
        verdict = meeting.meet(store, own, seconds)
        if verdict.missing:
            errors = check_missing(verdict.missing, "the rendezvous over the store", seconds)
            return Examined({rank: machine}, errors, min(set(range(world_size)) - set(verdict.missing)))
        told = {each["rank"]: each for each in map(json.loads, verdict.notes)}
        machines = {number: _machine(told[number]["machine"]) for number in sorted(told)}
        targets = _targets(rank, {number: each.host for number, each in machines.items()})
        routes = _try_routes(rank, {target: machines[target] for target in targets}, told)
        outcome = _exchange(dist.PrefixStore("doctor gloo", store), rank, world_size, seconds, routes)
        own = json.dumps({"rank": rank, "outcome": asdict(outcome)})
        verdict = meeting.meet(store, own, 2 * seconds)
    if verdict.missing:
        speaker = min(set(machines) - set(verdict.missing))
        return Examined(machines, check_missing(verdict.missing, "the all-reduce", 2 * seconds), speaker)
    outcomes = {each["rank"]: _outcome(each["outcome"]) for each in map(json.loads, verdict.notes)}
    return Examined(machines, check_ranks(machines, dict(sorted(outcomes.items()))), 0)


def _machine(values: dict[str, Any]) -> Machine:
    lists = ("backends", "host_addresses", "cores")
    pairs = {name: values[name] and tuple(values[name]) for name in ("shared_memory", "memory")}
    interfaces = tuple(Interface(**{**each, "addresses": tuple(each["addresses"])}) for each in values["interfaces"])
    return Machine(**{**values, **{name: tuple(values[name]) for name in lists}, **pairs, "interfaces": interfaces})


def _outcome(values: dict[str, Any]) -> RankOutcome:
    return RankOutcome(**{**values, "routes": tuple(Route(**each) for each in values["routes"])})


# -- sockets


@contextmanager
def _listening(token: str) -> Iterator[int]:
    """Answer every connection to the port with ``token``, on all interfaces."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with closing(socket.create_server(("", 0), family=family, backlog=128, dualstack_ipv6=dual)) as server:
        server.settimeout(0.1)
        ends = threading.Event()

        def answer() -> None:
            while not ends.is_set():
                with suppress(OSError):  # of a peer that has gone, or because none has come
                    connection, _ = server.accept()
                    with closing(connection):
                        connection.sendall(token.encode())

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            ends.set()
            thread.join()


def _targets(rank: int, hosts: Mapping[int, str]) -> list[int]:
    """Return the ranks to which ``rank`` connects: the next one, and the first one of each other host."""
    ranks = sorted(hosts)
    following = ranks[(ranks.index(rank) + 1) % len(ranks)]
    first = {host: number for number, host in sorted(hosts.items(), reverse=True) if host != hosts[rank]}
    return sorted({following, *first.values()} - {rank})


def _try_routes(rank: int, targets: Mapping[int, Machine], told: Mapping[int, Mapping[str, Any]]) -> tuple[Route, ...]:
    here = told[rank]["machine"]["host"]
    tries = [
        (target, interface.name, address)
        for target, machine in targets.items()
        for interface in machine.interfaces
        if interface.is_up and (machine.host == here or not interface.is_loopback)
        for address in interface.addresses
    ]

    def attempt(target: int, interface: str, address: str) -> Route:
        problem = _problem(address, told[target]["port"], told[target]["token"])
        return Route(rank, target, interface, address, problem)

    with ThreadPoolExecutor(16) as threads:
        return tuple(threads.map(attempt, *zip(*tries, strict=True))) if tries else ()


def _problem(address: str, port: int, token: str) -> str:
    """Return why the rank with ``token`` does not answer, or an empty text."""
    try:
        with socket.create_connection((address, port), _CONNECT_SECONDS) as connection:
            answer = connection.recv(len(token), socket.MSG_WAITALL).decode(errors="replace")
    except OSError as error:
        return error.strerror or str(error)
    return "" if answer == token else "another process answers: the address is used by several hosts"


# -- gloo


def _exchange(store: dist.Store, rank: int, world_size: int, seconds: float, routes: tuple[Route, ...]) -> RankOutcome:
    """All-reduce 4 KiB over gloo, and compare clocks."""
    ones = torch.ones(1024)
    try:
        group: Any = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=seconds))
        group.allreduce([ones.clone()]).wait()  # the first one connects
        begin = time.perf_counter()
        group.allreduce([ones]).wait()
        taken = time.perf_counter() - begin
        offset = min((_clock_offset(group, world_size) for _ in range(_CLOCK_ROUNDS)), key=abs)
    except RuntimeError as error:
        return RankOutcome(routes, str(error).split("\n", 1)[0] or type(error).__name__)
    if not ones.eq(world_size).all():
        return RankOutcome(routes, f"the sum of ones over {world_size} ranks is {ones.min():g} to {ones.max():g}")
    return RankOutcome(routes, "", taken, offset)


def _clock_offset(group: Any, world_size: int) -> float:
    """Return the seconds by which this rank's clock is ahead of rank 0's, plus the time between their replies."""
    group.barrier().wait()
    own = torch.tensor([time.time()], dtype=torch.float64)
    all_times = [torch.empty_like(own) for _ in range(world_size)]
    group.allgather([all_times], [own]).wait()
    return float(own - all_times[0])
