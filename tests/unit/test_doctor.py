"""The checks of ``composable-fsdp doctor``, given values of systems that are not fit for training."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("typer", reason="needs typer: pip install '.[cli]'")

from typer.testing import CliRunner

from composable_fsdp.cli.app import app
from composable_fsdp.cli.doctor import read_machine
from composable_fsdp.cli.doctor_checks import (
    Finding,
    Machine,
    RankOutcome,
    Severity,
    check_machine,
    check_missing,
    check_ranks,
)

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "head"}
LAUNCHED |= {"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
GOOD = Machine(
    host="here 5a17",
    versions={"python": "3.11.7", "torch": "2.13.0+cu130", "numpy": "2.4.6", "composable_fsdp": "0.1.0"},
    requirement="torch<2.14,>=2.11",
    backends=("gloo", "nccl"),
    accelerator="cuda",
    native_backend="nccl",
    devices=2,
    environment=LAUNCHED,
    master_problem="",
    port_is_taken=True,
)


def problems(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(each.severity.value, each.check, each.text) for each in findings if each.severity is not Severity.OK]


def test_a_system_fit_for_training_has_no_problems() -> None:
    found = check_machine(GOOD)
    assert problems(found) == []
    assert {each.check for each in found} == {"versions", "backends", "launch", "offload"}
    assert not any(each.remedy for each in found)


CASES: list[tuple[dict[str, Any], str, str, str, str]] = [
    *(
        (
            {"versions": {**GOOD.versions, "torch": torch}},
            *("error", "versions", f"torch {torch} is not supported: composable_fsdp needs torch<2.14,>=2.11"),
            'pip install "torch<2.14,>=2.11"',
        )
        for torch in ("2.10.1", "2.14.0a0+git1", "3.0")
    ),
    (
        {"versions": {**GOOD.versions, "numpy": ""}},
        *("error", "versions", "numpy is not installed: torch's object collectives need it"),
        "pip install numpy",
    ),
    ({"backends": ("nccl",)}, "error", "backends", "this torch has no gloo", "install a build of torch with gloo"),
    (
        {"backends": ("gloo",)},
        *("error", "backends", "this torch has no nccl for cuda", "install a build of torch for cuda"),
    ),
    ({"devices": 1}, "error", "backends", "2 ranks share 1 devices", "torchrun --nproc-per-node 1"),
    (
        {"environment": {}, "devices": 8},
        *("warning", "launch", "port 29500, torchrun's default, is taken"),
        "torchrun --standalone, or another --master-port",
    ),
    (
        {"environment": {key: value for key, value in LAUNCHED.items() if key != "MASTER_ADDR"}},
        *("error", "launch", "MASTER_ADDR not set", "torchrun --nproc-per-node N sets all of them"),
    ),
    *(
        ({"environment": LAUNCHED | change}, "error", "launch", text, "torchrun --nproc-per-node N sets all of them")
        for change, text in (
            ({"RANK": "first"}, "RANK=first is not a number"),
            ({"RANK": "4"}, "RANK=4 must be less than WORLD_SIZE=4"),
            ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be less than LOCAL_WORLD_SIZE=2"),
        )
    ),
    (
        {"environment": LAUNCHED | {"LOCAL_WORLD_SIZE": "5"}, "devices": 5},
        *("error", "launch", "LOCAL_WORLD_SIZE=5 must be at most WORLD_SIZE=4"),
        "torchrun --nproc-per-node N sets all of them",
    ),
    (
        {"master_problem": "Name or service not known"},
        *("error", "launch", "MASTER_ADDR=head does not resolve: Name or service not known"),
        "the name or address of the host of rank 0, as the other hosts know it",
    ),
    (
        {"environment": LAUNCHED | {"MASTER_ADDR": "localhost"}},
        *("error", "launch", "MASTER_ADDR=localhost is another host on each host"),
        "the name or address of the host of rank 0: torchrun --rdzv-endpoint HOST:PORT",
    ),
    (
        {"environment": LAUNCHED | {"MASTER_PORT": "65536"}},
        *("error", "launch", "MASTER_PORT=65536 is no port", "a number from 1024 to 65535"),
    ),
    (
        {"environment": LAUNCHED | {"TORCHELASTIC_USE_AGENT_STORE": "False"}},
        *("error", "launch", "MASTER_PORT=29500 is taken on the host of rank 0", "another MASTER_PORT"),
    ),
    (
        {"environment": LAUNCHED | {"COMPOSABLE_FSDP_ORDERCHECK": "off"}},
        *("warning", "variables", "COMPOSABLE_FSDP_ORDERCHECK has no effect"),
        "one of COMPOSABLE_FSDP_ORDER_CHECK, COMPOSABLE_FSDP_SHARED_MEMORY, COMPOSABLE_FSDP_DIAGNOSTICS, "
        "COMPOSABLE_FSDP_TIMELINE, COMPOSABLE_FSDP_TRACEBACK",
    ),
    (
        {"environment": LAUNCHED | {"COMPOSABLE_FSDP_SHARED_MEMORY": "off", "COMPOSABLE_FSDP_DIAGNOSTICS": "runs"}},
        *("error", "variables", "COMPOSABLE_FSDP_SHARED_MEMORY=off is not one of 0, 1, copy"),
        "COMPOSABLE_FSDP_SHARED_MEMORY with one of 0, 1, copy, or unset",
    ),
]


@pytest.mark.parametrize(("change", "severity", "check", "text", "remedy"), CASES)
def test_a_problem_of_one_rank_has_a_severity_and_a_remedy(
    change: dict[str, Any], severity: str, check: str, text: str, remedy: str
) -> None:
    found = check_machine(replace(GOOD, **change))
    assert problems(found) == [(severity, check, text)]
    assert [each.remedy for each in found if each.remedy] == [remedy]


def test_a_backend_without_gloo_does_not_serve_offloaded_parameters() -> None:
    assert problems(check_machine(GOOD, "cpu:gloo,cuda:nccl")) == []
    (found,) = (each for each in check_machine(GOOD, "nccl") if each.severity is Severity.WARNING)
    assert (found.check, found.remedy) == ("offload", 'init_process_group("cpu:gloo,cuda:nccl")')
    assert found.text.startswith("nccl does not serve tensors on CPU: with CPUOffloadPolicy, ")


# -- ranks together

RANKS = {0: GOOD, 1: replace(GOOD, host="there 1b2c"), 2: GOOD}
WELL = {0: RankOutcome(seconds=2e-3), 1: RankOutcome(), 2: RankOutcome()}


def test_ranks_are_named_by_host_and_have_no_problems() -> None:
    found = check_ranks(RANKS, WELL)
    assert [(each.check, each.text) for each in found] == [
        ("hosts", "here: ranks 0, 2; there: rank 1"),
        ("all-reduce", "3 ranks over gloo, 2.0 ms for 4 KiB"),
    ]
    assert problems(found) == []


@pytest.mark.parametrize(
    ("name", "severity"), [("torch", "error"), ("composable_fsdp", "error"), ("python", "warning")]
)
def test_ranks_with_different_versions_are_named(name: str, severity: str) -> None:
    other = replace(RANKS[1], versions={**GOOD.versions, name: "9.9"})
    text = f"{name} differs: {GOOD.versions[name]} on rank 0, 9.9 on rank 1"
    assert problems(check_ranks({0: GOOD, 1: other}, WELL)) == [(severity, "versions", text)]


def test_a_failed_all_reduce_names_its_ranks() -> None:
    found = check_ranks(RANKS, {**WELL, 0: RankOutcome("connection refused")})
    assert problems(found) == [("error", "all-reduce", "failed over gloo on rank 0: connection refused")]


def test_missing_ranks_are_named() -> None:
    text = "ranks 1, 3 did not come to the all-reduce within 60 s"
    assert problems(check_missing([1, 3], "the all-reduce", 60.0)) == [("error", "ranks", text)]


# -- the command


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> Any:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    return CliRunner().invoke(app, ["doctor", *arguments], env=environment)


def test_the_values_of_this_system_are_read() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MASTER_ADDR", "no-such-host.invalid")
            patch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
            found = read_machine()
    assert found.port_is_taken
    assert found.master_problem
    assert "gloo" in found.backends


def test_findings_are_shown_and_errors_set_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    good = run(monkeypatch)
    assert (good.exit_code, "0 errors" in good.stdout) == (0, True), good.output
    bad = run(monkeypatch, RANK="2", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1234")
    assert bad.exit_code == 1
    line = next(line for line in bad.stdout.splitlines() if "RANK=2" in line)
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        *("error", "launch", "2", "RANK=2 must be less than WORLD_SIZE=2"),
    ]
    assert "→ torchrun --nproc-per-node N sets all of them" in bad.stdout
    found = json.loads(run(monkeypatch, "--json", COMPOSABLE_FSDP_SHARED_MEMORY="off").stdout)
    (error,) = (each for each in found if each["severity"] == "error")
    assert error["text"] == "COMPOSABLE_FSDP_SHARED_MEMORY=off is not one of 0, 1, copy"
    assert (error["check"], error["ranks"]) == ("variables", [0])


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
