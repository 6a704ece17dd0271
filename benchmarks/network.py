"""Measures step time of two ranks over slow networks, against FSDP2: 100 Mbit/s, and 1 Gbit/s with 1 ms of delay.

    python benchmarks/network.py  # as root

Each rank runs ``step_time.py`` in its own network namespace (``sim/lab.py``), with real sockets over a slow network.
Shared memory between ranks is disabled, because ranks on two hosts would have none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import SHARED_MEMORY, parser, publish
from sim.lab import Lab, Link, lacking, open_lab

RANKS = 2
LINKS = {"100 Mbit/s": Link(100), "1 Gbit/s, 1 ms": Link(1000, 1.0)}
PORT = 29500
GRACE = 20.0
"""The seconds in which the other ranks must end after the first."""


def environment(lab: Lab, rank: int) -> dict[str, str]:
    """Return the variables that torchrun would set, and the one that makes gloo use the slow device."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(lab.namespaces)),
        "MASTER_ADDR": lab.address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": lab.devices[rank],
        "OMP_NUM_THREADS": "1",
        SHARED_MEMORY: "0",
    }


def step_times(link: Link, options: list[str], timeout: float) -> list[dict[str, Any]]:
    """Return the rows of ``step_time.py`` over ``link``."""
    script = [sys.executable, str(Path(__file__).with_name("step_time.py")), *options]
    return rows_over(link, RANKS, script, timeout)


def rows_over(link: Link, ranks: int, script: Sequence[str], timeout: float) -> list[dict[str, Any]]:
    """Return the rows that ``script`` writes to its option ``--out`` when it runs on ``ranks`` ranks over ``link``.

    Raises:
        subprocess.CalledProcessError: a rank failed.
        TimeoutError: the ranks did not end within ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder, open_lab(ranks, link) as lab:
        out = Path(folder) / "rows.json"
        command = [*script, "--out", str(out)]
        processes = [
            subprocess.Popen(lab.command(rank, command), env=environment(lab, rank), stdout=subprocess.DEVNULL)
            for rank in range(ranks)
        ]
        try:
            end = time.monotonic() + timeout
            lab.forward_while(lambda: time.monotonic() < end and all(each.poll() is None for each in processes))
            # The first rank that ends does not wait for the others, which may still send to it.
            grace = min(end, time.monotonic() + GRACE)
            lab.forward_while(lambda: time.monotonic() < grace and any(each.poll() is None for each in processes))
            for each in processes:
                if each.returncode:
                    raise subprocess.CalledProcessError(each.returncode, command)
            if any(each.returncode is None for each in processes):
                raise TimeoutError(f"{link}: the ranks have not finished within {timeout:.0f} s.")
        finally:
            for each in processes:
                each.kill()
                each.wait()
        return json.loads(out.read_text())["rows"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", default="tiny-200,experts,gpt-32")
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--timeout", type=float, default=900, help="seconds for each of the networks")
    arguments = options.parse_args()
    missing = lacking()
    if missing:
        print(f"network is left out: it needs {missing}")
        return
    chosen = ["--quick"] if arguments.quick else ["--cases", arguments.cases, "--rounds", str(arguments.rounds)]
    variants = ["--variants", "ours,fsdp2,fsdp2 prefetch"]
    rows = [
        {"network": name, **row}
        for name, link in LINKS.items()
        for row in step_times(link, [*variants, *chosen], arguments.timeout)
    ]
    ratios = ["ours/best fsdp2 wall", "ours/best fsdp2 cpu"]
    columns = ["network", "case", "ours wall", "fsdp2 wall", "fsdp2 prefetch wall", *ratios]
    publish("slow network", {"ranks": RANKS, "dtype": "fp32", "optimizer": "adamw"}, columns, rows, arguments.out)


if __name__ == "__main__":
    main()
