"""The checks of ``doctor``: pure functions from values of the system to findings. Nothing here reads the system."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from composable_fsdp._comm.shm.connect import MODES, SWITCH
from composable_fsdp._consistency.order_check import LEVEL_VARIABLE, OrderCheck
from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp.diagnostics._recording import FOLDER_VARIABLE, TIMELINE_VARIABLE

__all__ = [
    "Finding",
    "Interface",
    "Machine",
    "RankOutcome",
    "Route",
    "Severity",
    "check_machine",
    "check_missing",
    "check_ranks",
]

MIB, GIB = 1 << 20, 1 << 30

_OWN_VARIABLES: Mapping[str, tuple[str, ...]] = {
    LEVEL_VARIABLE: tuple(level.value for level in OrderCheck),
    SWITCH: MODES,
    FOLDER_VARIABLE: (),
    TIMELINE_VARIABLE: (),
    "COMPOSABLE_FSDP_TRACEBACK": (),
}
"""The environment variables that this package reads, with the words that each may have. Empty: any text."""


class Severity(str, Enum):
    """The severity of a finding. Jobs fail, or will fail, because of an error."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Args:
        check: the name of the check.
        severity: its severity.
        text: what was found.
        remedy: what to do. Empty if nothing is wrong.
    """

    check: str
    severity: Severity
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface, with its IPv4 addresses and its global IPv6 addresses."""

    name: str
    addresses: tuple[str, ...]
    is_up: bool = True
    is_loopback: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """The values of the system that one rank sees.

    Args:
        host: a text that identifies the host and its network namespace.
        versions: of python, torch, numpy and composable_fsdp. Empty texts for packages that are not installed.
        requirement: the requirement of composable_fsdp for torch, such as ``torch<2.14,>=2.11``. Empty if unknown.
        backends: the backends of torch.distributed that this torch has.
        accelerator: the type of the accelerator, such as ``cuda``, or an empty text.
        native_backend: the backend for tensors on the accelerator, or an empty text.
        devices: the number of accelerators.
        interfaces: the network interfaces.
        host_addresses: the addresses to which the host's name resolves.
        shared_memory: total and free bytes of /dev/shm, or ``None`` if it is not there.
        limits: the soft limits ``nofile``, ``memlock`` (bytes) and ``nproc``. ``None`` if unlimited.
        memory: the memory limit of the cgroup and the bytes used, or ``None`` without a limit.
        cores: the cores on which this rank may run.
        threads: the threads of a torch operation on CPU.
        environment: the variables of torchrun, gloo, NCCL and OpenMP that are set.
        master_problem: why ``MASTER_ADDR`` does not resolve, or an empty text.
        port_is_taken: whether ``MASTER_PORT``, or torchrun's default, is in use here.
    """

    host: str
    versions: Mapping[str, str]
    requirement: str
    backends: tuple[str, ...]
    accelerator: str
    native_backend: str
    devices: int
    interfaces: tuple[Interface, ...]
    host_addresses: tuple[str, ...]
    shared_memory: tuple[int, int] | None
    limits: Mapping[str, int | None]
    memory: tuple[int, int] | None
    cores: tuple[int, ...]
    threads: int
    environment: Mapping[str, str]
    master_problem: str
    port_is_taken: bool

    def number(self, name: str, default: int) -> int:
        """Return the environment variable ``name`` as a number, or ``default`` if it has none."""
        text = self.environment.get(name, "")
        return int(text) if text.isdecimal() else default

    @property
    def ranks_here(self) -> int:
        """The number of ranks on this host."""
        return max(1, self.number("LOCAL_WORLD_SIZE", 1))

    @property
    def spans_hosts(self) -> bool:
        """True if the job is known to have ranks on other hosts."""
        return self.number("WORLD_SIZE", 1) > self.number("LOCAL_WORLD_SIZE", 1 << 62)


@dataclass(frozen=True, slots=True)
class Route:
    """An attempt to connect from one rank to another, at one address of the other's interfaces."""

    source: int
    target: int
    interface: str
    address: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """The exchanges of one rank with the others.

    Args:
        routes: its attempts to connect.
        problem: why its all-reduce over gloo failed, or an empty text.
        seconds: the time of the all-reduce.
        clock_offset: the seconds by which its clock is ahead of rank 0's.
    """

    routes: tuple[Route, ...] = ()
    problem: str = ""
    seconds: float = 0.0
    clock_offset: float = 0.0


# -- one rank


def check_machine(machine: Machine, backend: str = "") -> list[Finding]:
    """Return the findings of one rank's system.

    Args:
        machine: its values.
        backend: what the program passes to ``init_process_group``, if known.
    """
    checks = (_versions, _backends, _interfaces, _shared_memory, _limits, _memory, _launch, _variables, _threads)
    return [found for check in checks for found in check(machine)] + list(_offload(machine, backend))


def _ok(check: str, text: str) -> Finding:
    return Finding(check, Severity.OK, text)


def _warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Severity.WARNING, text, remedy)


def _error(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Severity.ERROR, text, remedy)


def _versions(machine: Machine) -> Iterator[Finding]:
    installed = ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version)
    torch = machine.versions.get("torch", "")
    if not machine.versions.get("numpy"):
        yield _error("versions", "numpy is not installed: torch's object collectives need it", "pip install numpy")
    if machine.requirement and not _admits(machine.requirement, torch):
        yield _error(
            "versions",
            f"torch {torch} is not supported: composable_fsdp needs {machine.requirement}",
            f'pip install "{machine.requirement}"',
        )
    else:
        yield _ok("versions", installed)


def _admits(requirement: str, version: str) -> bool:
    """Return whether a requirement such as ``torch<2.14,>=2.11`` admits ``version``. Only ``<`` and ``>=`` count."""
    known = _numbers(version)
    least, limit = (re.findall(rf"{sign}\s*([\d.]+)", requirement) for sign in (">=", "<(?!=)"))
    return all(known >= _numbers(each) for each in least) and all(known < _numbers(each) for each in limit)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``(2, 13, 0)`` for ``2.13.0+cpu``, also for its pre-releases."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def _backends(machine: Machine) -> Iterator[Finding]:
    if "gloo" not in machine.backends:
        yield _error("backends", "this torch has no gloo", "install a build of torch with gloo")
    if machine.accelerator and machine.native_backend not in machine.backends:
        yield _error(
            "backends",
            f"this torch has no {machine.native_backend or 'backend'} for {machine.accelerator}",
            f"install a build of torch for {machine.accelerator}",
        )
    if 0 < machine.devices < machine.ranks_here:
        yield _error(
            "backends",
            f"{machine.ranks_here} ranks share {machine.devices} devices",
            f"torchrun --nproc-per-node {machine.devices}",
        )
    devices = f"; {machine.devices} {machine.accelerator}" if machine.accelerator else "; no accelerator"
    yield _ok("backends", ", ".join(machine.backends) + devices)


def _interfaces(machine: Machine) -> Iterator[Finding]:
    known = {each.name: each for each in machine.interfaces}
    usable = [each for each in machine.interfaces if each.is_up and each.addresses]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = machine.environment.get(variable, "")
        if not value or (variable.startswith("NCCL") and value.startswith("^")):
            continue
        for name in value.lstrip("=").split(","):
            # NCCL takes prefixes, unless the value begins with "=".
            exact = variable.startswith("GLOO") or value.startswith("=")
            named = [known[name]] if name in known else [] if exact else [i for i in usable if i.name.startswith(name)]
            names = ", ".join(each.name for each in usable)
            if not any(each in usable for each in named):
                yield _error(
                    "network",
                    f"{variable} names {name}, which is {'down or has no address' if named else 'no interface'}",
                    f"{variable}=NAME with one of {names}",
                )
    if machine.spans_hosts and all(each.is_loopback for each in usable):
        yield _error(
            "network", "there is no interface to other hosts", "give the container a network (docker --network host)"
        )
    reachable = [each for each in machine.host_addresses if not each.startswith("127.") and each != "::1"]
    if machine.spans_hosts and "GLOO_SOCKET_IFNAME" not in machine.environment and not reachable:
        resolved = f"to {', '.join(machine.host_addresses) or 'no address'}"
        yield _warning(
            "network",
            f"the name of this host resolves {resolved}, where gloo would listen",
            "GLOO_SOCKET_IFNAME=NAME with the interface to the other hosts",
        )
    yield _ok("network", ", ".join(f"{each.name} {' '.join(each.addresses)}" for each in usable) or "no interface")


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    remedy = "docker run --shm-size=8g, or --ipc=host; on a host: mount -o remount,size=50% /dev/shm"
    if machine.shared_memory is None:
        yield _warning("shared memory", "there is no /dev/shm: DataLoader workers and NCCL need it", remedy)
        return
    total, free = machine.shared_memory
    text = f"/dev/shm has {_size(total)}, {_size(free)} free"
    if free < 64 * MIB:
        yield _error("shared memory", f"{text}: DataLoader workers and NCCL fail", remedy)
    elif total < GIB:
        yield _warning("shared memory", f"{text}: little for DataLoader workers and NCCL", remedy)
    else:
        yield _ok("shared memory", text)


def _limits(machine: Machine) -> Iterator[Finding]:
    ranks = machine.number("WORLD_SIZE", 1)
    files = 256 + 8 * ranks  # estimated: a socket to each rank for each of some process groups
    threads = machine.ranks_here * (machine.threads + 32)  # estimated: those of operations, autograd, gloo and NCCL
    nofile, memlock, nproc = (machine.limits.get(name) for name in ("nofile", "memlock", "nproc"))
    if nofile is not None and nofile < files:
        yield _error(
            "limits",
            f"{nofile} open files for each process: {ranks} ranks need about {files} for their sockets",
            "ulimit -n 65536, or LimitNOFILE= of the service",
        )
    if nproc is not None and nproc < threads:
        yield _error(
            "limits",
            f"{nproc} threads for this user: {machine.ranks_here} ranks here need about {threads}",
            "ulimit -u 65536, or TasksMax= of the service",
        )
    if machine.accelerator and memlock is not None and memlock < GIB:
        yield _warning(
            "limits",
            f"{_size(memlock)} of locked memory: RDMA and GPUDirect register more",
            "ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )
    named = {"open files": nofile, "locked bytes": memlock, "threads of the user": nproc}
    yield _ok("limits", ", ".join(f"{'unlimited' if value is None else value} {name}" for name, value in named.items()))


def _memory(machine: Machine) -> Iterator[Finding]:
    if machine.memory is None:
        yield _ok("memory", "no limit by a cgroup")
        return
    limit, used = machine.memory
    left = max(0, limit - used)
    text = f"the cgroup's limit is {_size(limit)}, {_size(left)} left for {machine.ranks_here} ranks"
    if left < GIB * machine.ranks_here:
        yield _warning("memory", f"{text}: processes above it are killed", "docker run --memory, or MemoryMax=")
    else:
        yield _ok("memory", text)


def _launch(machine: Machine) -> Iterator[Finding]:
    found = machine.environment
    by_torchrun = "torchrun --nproc-per-node N sets all of them"
    if "RANK" not in found and "WORLD_SIZE" not in found:
        if machine.port_is_taken:
            yield _warning(
                "launch", "port 29500, torchrun's default, is taken", "torchrun --standalone, or another --master-port"
            )
        yield _ok("launch", "one process. Under torchrun, doctor also checks that ranks reach each other")
        return
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if absent := [name for name in needed if name not in found]:
        yield _error("launch", f"{', '.join(absent)} not set", by_torchrun)
    numbers = [*needed[:2], "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
    for name in (name for name in numbers if name in found and not found[name].isdecimal()):
        yield _error("launch", f"{name}={found[name]} is not a number", by_torchrun)
    for low, high, strict in (
        ("RANK", "WORLD_SIZE", True),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE", True),
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE", False),
    ):
        first, second = machine.number(low, -1), machine.number(high, -1)
        if -1 not in (first, second) and (first >= second if strict else first > second):
            relation = "less than" if strict else "at most"
            yield _error("launch", f"{low}={first} must be {relation} {high}={second}", by_torchrun)
    address, port = (found.get(name, "") for name in needed[2:])
    if machine.master_problem:
        yield _error(
            "launch",
            f"MASTER_ADDR={address} does not resolve: {machine.master_problem}",
            "the name or address of the host of rank 0, as the other hosts know it",
        )
    elif machine.spans_hosts and (address == "localhost" or address.startswith("127.")):
        yield _error(
            "launch",
            f"MASTER_ADDR={address} is another host on each host",
            "the name or address of the host of rank 0: torchrun --rdzv-endpoint HOST:PORT",
        )
    if port.isdecimal() and not 0 < int(port) < 1 << 16:
        yield _error("launch", f"MASTER_PORT={port} is no port", "a number from 1024 to 65535")
    if machine.port_is_taken and found.get("RANK") == "0" and found.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield _error("launch", f"MASTER_PORT={port} is taken on the host of rank 0", "another MASTER_PORT")
    yield _ok("launch", f"{found.get('WORLD_SIZE')} ranks, {machine.ranks_here} here, store at {address}:{port}")


def _variables(machine: Machine) -> Iterator[Finding]:
    for name, value in machine.environment.items():
        if name.startswith("COMPOSABLE_FSDP_") and name not in _OWN_VARIABLES:
            yield _warning("variables", f"{name} has no effect", f"one of {', '.join(_OWN_VARIABLES)}")
        elif value and _OWN_VARIABLES.get(name) and value not in _OWN_VARIABLES[name]:
            words = ", ".join(_OWN_VARIABLES[name])
            yield _error("variables", f"{name}={value} is not one of {words}", f"{name} with one of {words}, or unset")


def _threads(machine: Machine) -> Iterator[Finding]:
    cores, ranks = len(machine.cores), machine.ranks_here
    wanted = max(1, cores // ranks)
    text = f"{machine.threads} threads for each of {ranks} ranks on {cores} cores"
    if machine.threads > wanted and ranks > 1:
        yield _warning("threads", f"{text}: ranks take cores from each other", f"OMP_NUM_THREADS={wanted}")
    elif not machine.accelerator and 2 * machine.threads <= wanted:
        yield _warning("threads", f"{text}: operations leave cores idle", f"OMP_NUM_THREADS={wanted}")
    else:
        yield _ok("threads", text)


def _offload(machine: Machine, backend: str) -> Iterator[Finding]:
    if not machine.accelerator:
        return
    both = f"cpu:gloo,{machine.accelerator}:{machine.native_backend}"
    if backend and "gloo" not in backend:
        yield _warning(
            "offload",
            f"{backend} does not serve tensors on CPU: with CPUOffloadPolicy, full_tensor() and GradScaler fail",
            f'init_process_group("{both}")',
        )
    else:
        yield _ok("offload", f'for CPUOffloadPolicy: init_process_group("{both}"), or no backend')


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


# -- all ranks


def check_missing(missing: Sequence[int], what: str, seconds: float) -> list[Finding]:
    """Return an error that names the ranks that did not come to the exchange ``what`` within ``seconds``."""
    return [
        _error(
            "ranks",
            f"{format_ranks(missing)} did not come to {what} within {seconds:g} s",
            "look at the output and the host of these ranks: not started, ended, stopped, or cut off from the store",
        )
    ]


def check_ranks(machines: Mapping[int, Machine], outcomes: Mapping[int, RankOutcome]) -> list[Finding]:
    """Return the findings about the ranks together."""
    return [
        *_same_versions(machines),
        *_pinning(machines),
        *_routes(machines, [route for each in outcomes.values() for route in each.routes]),
        *_all_reduce(outcomes),
        *_clocks({rank: each.clock_offset for rank, each in outcomes.items() if not each.problem}),
    ]


def _same_versions(machines: Mapping[int, Machine]) -> Iterator[Finding]:
    for name in next(iter(machines.values())).versions:
        by_version: dict[str, list[int]] = {}
        for rank, machine in machines.items():
            by_version.setdefault(machine.versions.get(name, ""), []).append(rank)
        if len(by_version) > 1:
            text = ", ".join(f"{version or 'none'} on {format_ranks(r)}" for version, r in by_version.items())
            strict = name in ("torch", "composable_fsdp")
            yield (_error if strict else _warning)("versions", f"{name} differs: {text}", "install the same everywhere")


def _pinning(machines: Mapping[int, Machine]) -> Iterator[Finding]:
    by_host: dict[str, dict[int, Machine]] = {}
    for rank, machine in machines.items():
        by_host.setdefault(machine.host, {})[rank] = machine
    for ranks in by_host.values():
        cores = [frozenset(machine.cores) for machine in ranks.values()]
        shared = [rank for rank, own in zip(ranks, cores, strict=True) if len(own) == 1 and cores.count(own) > 1]
        if shared and len(set().union(*cores)) > 1:
            yield _warning(
                "threads",
                f"{format_ranks(shared)} are pinned to the core of another rank",
                "give each rank cores of its own: taskset, numactl, or --cpu-bind of the launcher",
            )


def _routes(machines: Mapping[int, Machine], routes: Iterable[Route]) -> Iterator[Finding]:
    pairs: dict[tuple[int, int], list[Route]] = {}
    by_interface: dict[str, list[Route]] = {}
    for route in routes:
        pairs.setdefault((route.source, route.target), []).append(route)
        by_interface.setdefault(route.interface, []).append(route)
    for (source, target), tried in pairs.items():
        if all(route.problem for route in tried):
            addresses = "; ".join(f"{route.interface} {route.address}: {route.problem}" for route in tried)
            yield _error(
                "network",
                f"rank {source} does not reach rank {target} on any interface ({addresses})",
                "open the firewall between these hosts for all TCP ports, or put both into one network",
            )
    for name, tried in by_interface.items():
        failed = [route for route in tried if route.problem]
        reached = ", ".join(sorted({f"{route.source}→{route.target}" for route in tried if not route.problem}))
        if not failed:
            yield _ok("network", f"{name}: {reached} reached")
            continue
        lost = ", ".join(sorted({f"{route.source}→{route.target}" for route in failed}))
        chosen = [v for v in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if _chooses(machines, failed, v, name)]
        text = f"{name}: {lost} not reached ({failed[0].address}: {failed[0].problem})"
        others = ", ".join(n for n, each in by_interface.items() if not any(route.problem for route in each))
        remedy = f"NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME with one of {others}" if others else "mend the network"
        if chosen:
            yield _error("network", f"{text}, and {' and '.join(chosen)} chooses it", remedy)
        else:
            yield _warning("network", text, remedy)


def _chooses(machines: Mapping[int, Machine], failed: Sequence[Route], variable: str, name: str) -> bool:
    values = [machines[route.source].environment.get(variable, "") for route in failed]
    return any(name in value.lstrip("=").split(",") for value in values)


def _all_reduce(outcomes: Mapping[int, RankOutcome]) -> Iterator[Finding]:
    by_problem: dict[str, list[int]] = {}
    for rank, outcome in outcomes.items():
        if outcome.problem:
            by_problem.setdefault(outcome.problem, []).append(rank)
    for problem, ranks in by_problem.items():
        yield _error(
            "all-reduce",
            f"failed over gloo on {format_ranks(ranks)}: {problem}",
            "GLOO_SOCKET_IFNAME with an interface on which all ranks reach each other",
        )
    if not by_problem:
        slowest = max(outcome.seconds for outcome in outcomes.values())
        yield _ok("all-reduce", f"{len(outcomes)} ranks over gloo, {1e3 * slowest:.1f} ms for 4 KiB")


def _clocks(offsets: Mapping[int, float]) -> Iterator[Finding]:
    if len(offsets) < 2:
        return
    first, last = min(offsets, key=offsets.__getitem__), max(offsets, key=offsets.__getitem__)
    apart = offsets[last] - offsets[first]
    text = f"rank {last}'s is {apart:.3f} s ahead of rank {first}'s" if apart > 1e-3 else "less than 1 ms apart"
    if apart > 1:
        remedy = "synchronize the hosts' clocks: chronyd or systemd-timesyncd"
        yield _warning("clocks", f"{text}: times in logs and diagnostics do not compare", remedy)
    else:
        yield _ok("clocks", text)
