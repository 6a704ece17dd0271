"""The console command on several ranks: ``doctor`` and ``run``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from composable_fsdp.cli.doctor import Finding, examine_ranks
from tests.helpers.fresh_process import run_script_on_ranks
from tests.helpers.run_ranks import on_ranks

SECONDS = 3.0


def examine(name: str) -> tuple[int, Sequence[Finding]]:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    host = f"node{dist.get_rank() // 2} 5a17"
    return examine_ranks(store, dist.get_rank(), dist.get_world_size(), SECONDS, host)


def problems(found: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(each.check, each.text) for each in found if each.severity != "ok"]


def all_ranks_come() -> None:
    speaker, found = examine("all")
    assert (problems(found), speaker) == ([], 0)
    *_, hosts, exchange = found
    assert hosts.text == "node0: ranks 0-1; node1: rank 2"
    assert exchange.text.startswith("3 ranks over gloo, ")
    texts: list[object] = [None] * 3
    dist.all_gather_object(texts, [each.text for each in found])
    assert texts == texts[:1] * 3, "all ranks have the same findings"


def one_rank_stays_away() -> None:
    if dist.get_rank() != 0:
        speaker, found = examine("missing")
        text = f"rank 0 did not come to the all-reduce within {SECONDS:g} s: not started, ended, stopped or cut off"
        assert (problems(found), speaker) == ([("ranks", text)], 1)
    dist.barrier()


def one_rank_has_no_gloo() -> None:
    refuses = mock.patch("torch.distributed.ProcessGroupGloo", side_effect=RuntimeError("refused here\nat line 3"))
    with refuses if dist.get_rank() == 1 else nullcontext():
        _, found = examine("gloo")
    first, second = problems(found)
    assert first[1].startswith("failed over gloo on ranks 0, 2: ")
    assert second[1].startswith("failed over gloo on rank 1: refused here. Set GLOO_SOCKET_IFNAME")


@on_ranks(3)
def test_doctor_names_hosts_and_the_ranks_that_do_not_come_or_whose_all_reduce_fails() -> None:
    """In one job of three ranks: starting the processes takes most of the time."""
    all_ranks_come()
    one_rank_has_no_gloo()
    one_rank_stays_away()


def run_command(folder: Path, *arguments: str) -> str:
    script = folder / "command.py"
    script.write_text(f"from composable_fsdp.cli import main\nmain(arguments={list(arguments)!r})\n")
    return run_script_on_ranks(script)


def test_doctor_runs_on_the_ranks_of_a_job(tmp_path: Path) -> None:
    said = run_command(tmp_path, "doctor", "--json", "--timeout", "20")
    found = json.loads(said[said.index("[\n") : said.rindex("]") + 1])
    checks = {each["check"]: each for each in found}
    assert {"launch", "hosts", "all-reduce"} <= checks.keys()
    assert checks["all-reduce"]["text"].startswith("2 ranks over gloo, ")
    assert not problems([Finding(**each) for each in found])


def test_a_program_runs_on_the_ranks_of_a_job(tmp_path: Path) -> None:
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
    output = run_command(tmp_path, "run", str(tmp_path / "program.py"), "--lr", "1")
    for rank in range(2):
        assert f"['--lr', '1'] composable_fsdp._api.fsdp_module {rank}" in output
