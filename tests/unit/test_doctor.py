"""The checks of ``composable-fsdp doctor``, given values of systems that are not fit for training."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest

from composable_fsdp.cli.doctor import Finding, check_launch, check_ranks, check_versions
from tests.helpers.command import Done, run_command

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "head"}
LAUNCHED |= {"MASTER_PORT": "29500"}
BY_TORCHRUN = "torchrun --nproc-per-node N sets all of them"
VERSIONS = {"python": "3.11.7", "torch": "2.13.0+cu130", "numpy": "2.4.6", "composable_fsdp": "0.1.0"}


def test_a_launch_by_torchrun_has_no_problems() -> None:
    assert list(check_launch(LAUNCHED)) == [Finding("ok", "launch", "4 ranks, 2 here, store at head:29500")]
    (alone,) = check_launch({})
    assert (alone.severity, alone.text[:12]) == ("ok", "one process.")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "first"}, "RANK=first is not a number below 1000000"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http is not a number below 65536"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a number below 65536"),
        ({"WORLD_SIZE": "9" * 5000}, f"WORLD_SIZE={'9' * 50} is not a number below 1000000"),
        ({"LOCAL_WORLD_SIZE": str(1 << 64)}, "LOCAL_WORLD_SIZE=18446744073709551616 is not a number below 1000000"),
        ({"RANK": "4"}, "RANK=4 must be less than WORLD_SIZE=4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be less than LOCAL_WORLD_SIZE=2"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"RANK": None}, "RANK is not set"),
    ],
)
def test_a_wrong_variable_is_named(change: dict[str, str | None], text: str) -> None:
    environment = {name: value for name, value in (LAUNCHED | change).items() if value is not None}
    rank = 4 if change.get("RANK") == "4" else 0
    assert list(check_launch(environment)) == [Finding("error", "launch", text, BY_TORCHRUN, (rank,))]


@pytest.mark.parametrize(
    ("name", "severity"), [("torch", "error"), ("composable_fsdp", "error"), ("python", "warning")]
)
def test_ranks_with_different_versions_are_named(name: str, severity: str) -> None:
    same = list(check_versions({0: VERSIONS, 1: VERSIONS}))
    assert [each.text for each in same] == [f"{each} {version}" for each, version in VERSIONS.items()]
    found = check_versions({0: VERSIONS, 1: VERSIONS | {name: "9.9"}})
    text = f"{name} differs: {VERSIONS[name]} on rank 0, 9.9 on rank 1"
    assert [each for each in found if each.severity != "ok"] == [
        Finding(severity, "versions", text, "install the same everywhere")
    ]


def notes(*problems: str) -> list[dict[str, Any]]:
    hosts = ("here 5a17", "there 1b2c", "here 5a17")
    return [
        {"rank": rank, "host": hosts[rank], "problem": problem, "seconds": 2e-3 / (rank + 1)}
        for rank, problem in enumerate(problems)
    ]


def test_ranks_are_named_by_host_and_the_slowest_gives_the_bandwidth() -> None:
    assert list(check_ranks(notes("", "", ""))) == [
        Finding("ok", "hosts", "here: ranks 0, 2; there: rank 1"),
        Finding("ok", "all-reduce", "3 ranks over gloo, 4 MiB in 2.0 ms, 2.10 GB/s"),
    ]


def test_a_failed_all_reduce_names_its_ranks() -> None:
    _, found = check_ranks(notes("connection refused", "", "connection refused"))
    assert (found.severity, found.check, found.ranks) == ("error", "all-reduce", (0, 2))
    assert found.text == "failed over gloo on ranks 0, 2: connection refused"
    assert found.remedy.startswith("GLOO_SOCKET_IFNAME")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> Done:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    return run_command("doctor", *arguments, environment=environment)


def test_findings_are_shown_and_errors_set_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    good = run(monkeypatch)
    assert (good.exit_code, "0 errors" in good.stdout) == (0, True), good
    environment = {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}
    bad = run(monkeypatch, **environment)
    assert bad.exit_code == 1
    line = next(line for line in bad.stdout.splitlines() if "RANK=2" in line)
    assert re.split("  +", line) == ["error", "launch", "2", "RANK=2 must be less than WORLD_SIZE=2"]
    assert f"→ {BY_TORCHRUN}" in bad.stdout
    (error,) = (each for each in json.loads(run(monkeypatch, "--json", **environment).stdout) if each["remedy"])
    assert error == {
        "severity": "error",
        "check": "launch",
        "text": "RANK=2 must be less than WORLD_SIZE=2",
        "remedy": BY_TORCHRUN,
        "ranks": [2],
    }


def test_a_store_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    found = run(
        monkeypatch, "--json", "--timeout", "1", RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port
    )
    assert found.exit_code == 1
    (error,) = (each for each in json.loads(found.stdout) if each["severity"] == "error")
    assert error["text"].startswith(f"rank 1 does not reach the store at localhost:{port}: ")


def test_a_wait_of_less_than_a_second_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, "--timeout", "0.5")
    assert (found.exit_code, found.stderr) == (2, "error: --timeout must be at least 1 second, not 0.5.\n")
