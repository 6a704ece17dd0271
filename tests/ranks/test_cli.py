"""The console command on several ranks: ``doctor``, ``calibrate`` and ``run``."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from composable_fsdp.testing import run_ranks
from tests.helpers.torchrun import finished, torchrun

pytest.importorskip("typer", reason="needs typer: pip install '.[cli]'")

from composable_fsdp.cli.doctor_checks import Interface, Severity
from composable_fsdp.cli.doctor_ranks import Examined, examine_ranks
from composable_fsdp.cli.doctor_values import read_machine

COMMAND = ("-m", "composable_fsdp")
SECONDS = 3.0
LOOPBACK = Interface("lo", ("127.0.0.1",), is_loopback=True)


def examine(name: str, *interfaces: Interface) -> Examined:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    machine = replace(read_machine(), interfaces=interfaces)
    return examine_ranks(store, dist.get_rank(), dist.get_world_size(), machine, SECONDS)


def problems(examined: Examined) -> list[tuple[str, str]]:
    return [(each.check, each.text) for each in examined.findings if each.severity is not Severity.OK]


def all_ranks_come() -> None:
    found = examine("all", LOOPBACK)
    assert problems(found) == []
    assert (sorted(found.machines), found.speaker) == ([0, 1, 2], 0)
    routes, exchange, clocks = found.findings
    assert routes.text == "lo: 0→1, 1→2, 2→0 reached"
    assert exchange.text.startswith("3 ranks over gloo, ")
    assert clocks.check == "clocks"
    texts: list[object] = [None] * 3
    dist.all_gather_object(texts, [each.text for each in found.findings])
    assert texts == texts[:1] * 3, "all ranks have the same findings"


def test_ranks_reach_each_other() -> None:
    run_ranks(all_ranks_come, 3)


def one_rank_stays_away() -> None:
    if dist.get_rank() != 0:
        found = examine("missing", LOOPBACK)
        text = f"rank 0 did not come to the rendezvous over the store within {SECONDS:g} s"
        assert problems(found) == [("ranks", text)]
        assert found.speaker == 1
    dist.barrier()


def test_a_rank_that_does_not_come_is_named() -> None:
    run_ranks(one_rank_stays_away, 3)


def one_rank_tells_a_wrong_address() -> None:
    own = (LOOPBACK, Interface("docker0", ("127.0.0.1",))) if dist.get_rank() == 1 else (LOOPBACK,)
    with _answering(dist.get_rank() == 1):
        found = examine("wrong", *own)
    ((check, text),) = [each for each in problems(found) if "any interface" in each[1]]
    assert check == "network"
    assert text.startswith("rank 0 does not reach rank 1 on any interface (lo 127.0.0.1: another process answers")


@contextmanager
def _answering(wrongly: bool) -> Iterator[None]:
    """Answer connections to this rank as another process would."""
    real = socket.socket.sendall
    changed = mock.patch("socket.socket.sendall", lambda self, data: real(self, b"other" + data))
    with changed if wrongly else nullcontext():
        yield


def test_a_rank_for_which_another_process_answers_is_not_reached() -> None:
    run_ranks(one_rank_tells_a_wrong_address, 2)


def one_rank_has_no_gloo() -> None:
    refuses = mock.patch("torch.distributed.ProcessGroupGloo", side_effect=RuntimeError("refused here\nat line 3"))
    with refuses if dist.get_rank() == 1 else nullcontext():
        found = examine("gloo", LOOPBACK)
    first, second = problems(found)
    assert first[1].startswith("failed over gloo on rank 0: ")
    assert second == ("all-reduce", "failed over gloo on rank 1: refused here")


def test_a_failed_all_reduce_is_shown_with_its_reason_on_each_rank() -> None:
    run_ranks(one_rank_has_no_gloo, 2)


def test_doctor_runs_under_torchrun() -> None:
    done = finished(*COMMAND, "doctor", "--json", "--timeout", "20")
    found = json.loads(done.stdout[done.stdout.index("[\n") : done.stdout.rindex("]") + 1])
    checks = {each["check"]: each for each in found}
    assert {"launch", "all-reduce", "clocks"} <= checks.keys()
    assert checks["all-reduce"]["text"].startswith("2 ranks over gloo, ")
    assert done.returncode == int(any(each["severity"] == "error" for each in found))


def test_a_program_runs_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "import torch\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "torch.distributed.init_process_group('gloo')\n"
        "torch.manual_seed(0)\n"
        "model = fully_shard(torch.nn.Linear(2, 2))\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "rank = torch.distributed.get_rank()\n"
        "sys.stdout.write(f'{sys.argv[1:]} {type(model).__mro__[1].__module__} {rank}\\n')\n"
        "torch.distributed.destroy_process_group()\n"
    )
    output = torchrun(*COMMAND, "run", str(tmp_path / "program.py"), "--lr", "1")
    for rank in range(2):
        assert f"['--lr', '1'] composable_fsdp._api.fsdp_module {rank}" in output
