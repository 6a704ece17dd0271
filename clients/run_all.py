"""Runs the same programs of other libraries on torch's FSDP2 and on ours, and compares the results.

    make clients                                     # all; makes .venv-clients first
    python clients/run_all.py --only peft,trl        # programs whose names contain one of these

The programs do not depend on the library: ``composable-fsdp run program.py`` replaces torch's
``fully_shard`` by ours. Results are stored in ``clients/results/DATE.json``. A later run on the same day replaces the
results of its programs. ``clients/RESULTS.md`` is made from the file. The exit code is 1 if a program fails or differs
on ours.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from catalogue import CLIENTS, Client
from page import page_of

HERE = Path(__file__).parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
LAST_LINES = 60
"""The number of last output lines of a failed program that are shown and kept."""
ALLOWED = 1e-5
"""The relative difference of two numbers up to which it is attributed to the rounding of sums in another order."""


@dataclass(frozen=True)
class Run:
    """The result of one program on one library.

    Attributes:
        problem: the reason of a failure; empty if the program succeeded.
        losses: the losses of each rank and step.
        sharded: the number of modules that each library sharded on rank 0.
        same: other values of each rank that must be the same on both libraries.
        shown: other values of rank 0 that may differ.
    """

    seconds: float
    problem: str = ""
    losses: list[list[float]] = field(default_factory=list)
    sharded: Mapping[str, int] = field(default_factory=dict)
    same: list[Mapping[str, Any]] = field(default_factory=list)
    shown: Mapping[str, Any] = field(default_factory=dict)


def run(client: Client, library: str) -> Run:
    """Run ``client`` with a timeout. Afterwards none of its processes is left."""
    script, *options = shlex.split(client.command)
    switch = ["-m", "composable_fsdp", "run"] if library == "ours" else []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(client.ranks)]
    command = [*launcher, *shlex.split(client.launcher), *switch, str(HERE / script), *options]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        environment = {**os.environ, **ENVIRONMENT, **client.environment, "CLIENT_OUT": folder}
        begin = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            status = process.wait(client.minutes * 60)
            problem = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {client.minutes:g} minutes"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.perf_counter() - begin
        told = [Path(folder, f"rank-{rank}.json") for rank in range(client.ranks)]
        if not problem and not all(path.exists() for path in told):
            problem = "it ended without telling its losses"
        if problem:
            output.seek(0)
            said = output.read()
            errors = re.findall(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w+(?:Error|Exception): .*)", said, re.MULTILINE)
            reason = f": {errors[0]}" if errors else ""
            return Run(seconds, "\n".join([problem + reason, *said.splitlines()[-LAST_LINES:]]))
        of_ranks = [json.loads(path.read_text()) for path in told]
    losses, same = ([each[key] for each in of_ranks] for key in ("losses", "same"))
    return Run(seconds, "", losses, of_ranks[0]["sharded"], same, of_ranks[0]["shown"])


def verdict(peer: Run, ours: Run) -> str:
    """Return ``same``, ``rounding``, ``differs`` or ``fails``, and an explanation."""
    for name, each in (("fsdp2", peer), ("ours", ours)):
        if each.problem:
            return f"fails on {name}: {each.problem.splitlines()[0]}"
        if set(each.sharded) != {name}:
            return f"fails on {name}: modules are sharded by {', '.join(each.sharded) or 'nobody'}"
    if ours.sharded["ours"] != peer.sharded["fsdp2"]:
        return f"differs: {ours.sharded['ours']} modules are sharded, {peer.sharded['fsdp2']} on fsdp2"
    parts = {"losses": difference(peer.losses, ours.losses)}
    for rank, (one, other) in enumerate(zip(peer.same, ours.same, strict=True)):
        parts |= {f"{key} of rank {rank}": difference(one[key], other.get(key)) for key in one}
    worst = max(parts, key=lambda part: parts[part])
    if parts[worst] > ALLOWED:
        return f"differs: {worst} by {parts[worst]:.1e}"
    return f"rounding: {worst} by {parts[worst]:.1e}" if parts[worst] else "same"


def difference(one: object, other: object) -> float:
    """Return the largest relative difference of numbers in two nested values, or infinity if other values differ."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max((difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) / max(abs(one), abs(other), 1e-30) if one != other else 0.0
    return 0.0 if one == other else float("inf")


def compare(client: Client) -> dict[str, Any]:
    """Return a row of the results."""
    peer, ours = (run(client, library) for library in ("fsdp2", "ours"))
    row = {"client": client.name, "version": client.version(), "verdict": verdict(peer, ours)}
    print(f"{client.name}: {row['verdict']} ({peer.seconds:.0f} s, {ours.seconds:.0f} s)", flush=True)
    for library, each in (("fsdp2", peer), ("ours", ours)):
        if each.problem:
            print(f"--- on {library}:\n{each.problem}", flush=True)
    return {**row, "ranks": client.ranks, "command": client.command, "fsdp2": asdict(peer), "ours": asdict(ours)}


def store(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace the rows of these clients in the file, and return all rows in the order of the catalogue."""
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    by_name = {row["client"]: row for row in (*kept, *rows)}
    merged = [by_name[client.name] for client in CLIENTS if client.name in by_name]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"date": path.stem, "python": sys.version.split()[0], "rows": merged}, indent=1) + "\n")
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="parts of names, with commas: " + ", ".join(c.name for c in CLIENTS))
    parser.add_argument("--no-results", action="store_true", help="write nothing")
    options = parser.parse_args()
    chosen = [client for client in CLIENTS if any(part in client.name for part in options.only.split(","))]
    for client in chosen:
        if not client.is_admitted():
            print(f"{client.name}: not run, FSDP2 runs it from torch {'.'.join(map(str, client.torch))} on")
    rows = [compare(client) for client in chosen if client.is_admitted()]
    if not options.no_results:
        results = HERE / "results" / f"{datetime.date.today()}.json"
        (HERE / "RESULTS.md").write_text(page_of(store(results, rows), results.name))
    return 0 if all(row["verdict"].startswith(("same", "rounding")) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
