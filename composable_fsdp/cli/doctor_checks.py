"""The checks of ``doctor``: pure functions from values of the system to findings. Nothing here reads the system."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from composable_fsdp._consistency.order_check import LEVEL_VARIABLE, OrderCheck
from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp.diagnostics._recording import FOLDER_VARIABLE, TIMELINE_VARIABLE
from composable_fsdp.plugins.shared_memory.connect import MODES, SWITCH

__all__ = ["Finding", "Machine", "RankOutcome", "Severity", "check_machine", "check_missing", "check_ranks"]

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
class Machine:
    """The values of the system that one rank sees.

    Args:
        host: the name of the host, and a text that identifies it and its network namespace.
        versions: of python, torch, numpy and composable_fsdp. Empty texts for packages that are not installed.
        requirement: the requirement of composable_fsdp for torch, such as ``torch<2.14,>=2.11``. Empty if unknown.
        backends: the backends of torch.distributed that this torch has.
        accelerator: the type of the accelerator, such as ``cuda``, or an empty text.
        native_backend: the backend for tensors on the accelerator, or an empty text.
        devices: the number of accelerators.
        environment: the variables of torchrun and of this package that are set.
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
class RankOutcome:
    """The all-reduce of one rank over gloo: why it failed, or an empty text, and the time that it took."""

    problem: str = ""
    seconds: float = 0.0


# -- one rank


def check_machine(machine: Machine, backend: str = "") -> list[Finding]:
    """Return the findings of one rank's system.

    Args:
        machine: its values.
        backend: what the program passes to ``init_process_group``, if known.
    """
    checks = (_versions, _backends, _launch, _variables)
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
    return [*_same_versions(machines), *_hosts(machines), *_all_reduce(outcomes)]


def _same_versions(machines: Mapping[int, Machine]) -> Iterator[Finding]:
    for name in next(iter(machines.values())).versions:
        by_version: dict[str, list[int]] = {}
        for rank, machine in machines.items():
            by_version.setdefault(machine.versions.get(name, ""), []).append(rank)
        if len(by_version) > 1:
            text = ", ".join(f"{version or 'none'} on {format_ranks(r)}" for version, r in by_version.items())
            strict = name in ("torch", "composable_fsdp")
            yield (_error if strict else _warning)("versions", f"{name} differs: {text}", "install the same everywhere")


def _hosts(machines: Mapping[int, Machine]) -> Iterator[Finding]:
    by_host: dict[str, list[int]] = {}
    for rank, machine in machines.items():
        by_host.setdefault(machine.host, []).append(rank)
    yield _ok("hosts", "; ".join(f"{host.split(' ')[0]}: {format_ranks(ranks)}" for host, ranks in by_host.items()))


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
