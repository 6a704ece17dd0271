"""The commands of ``python -m tests.goldens``. The docstring of the package describes them."""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.goldens.cases import Found, draw, run_all
from tests.goldens.dry_runs import compare_dry_runs
from tests.goldens.records import UNSTABLE, differences, read, stable, write
from tests.helpers.transports import TRANSPORTS

__all__ = ["main"]

SHOWN = 40
"""The maximum number of cases that a comparison prints."""


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.goldens", description="Compare behaviour with its record.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw", help="draw new programs from the fuzzer and write them")
    recorded = commands.add_parser("record", help="record all cases twice, and write the values that are equal in both")
    recorded.add_argument("--once", action="store_true", help="record once, and write all values")
    recorded.add_argument("--quick", action="store_true", help="only a fixed tenth of the cases")
    compared = commands.add_parser("compare", help="run the cases and compare them with the record")
    compared.add_argument("--quick", action="store_true", help="only a fixed tenth of the cases")
    shown = commands.add_parser("show", help="print all events and results of one case")
    shown.add_argument("case", help="the name in the record: the number of a program, or the id of a test")
    shown.add_argument("--transport", choices=[*TRANSPORTS, "its own"], help="run only on this transport")
    shown.add_argument("--against", metavar="COMMIT", help="print the difference from another commit or folder")
    dry = commands.add_parser("dry", help="compare each pass of the programs with its dry run")
    dry.add_argument("--quick", action="store_true", help="only a fixed tenth of the programs")
    dry.add_argument("--only", nargs="+", default=(), metavar="NUMBER", help="only these programs")
    dry.add_argument("--transport", choices=TRANSPORTS, help="run only on this transport")
    chosen = parser.parse_args()
    if chosen.command == "dry":
        transports = [chosen.transport] if chosen.transport else tuple(TRANSPORTS)
        return compare_dry_runs(quick=chosen.quick, only=chosen.only, transports=transports)
    if chosen.command == "draw":
        draw()
        return 0
    if chosen.command == "record":
        return record(quick=chosen.quick, once=chosen.once)
    if chosen.command == "compare":
        return compare(quick=chosen.quick)
    return show(chosen.case, chosen.transport, chosen.against)


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def record(*, quick: bool, once: bool) -> int:
    found = run_all(quick=quick).records
    if not once:
        found = stable(found, run_all(quick=quick).records)
    commit = git("describe", "--always", "--dirty", "--exclude=*")
    write(found, f"commit {commit}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    unstable = [key for key, each in found.items() if UNSTABLE in (*each.hashes.values(), *each.totals)]
    failed = [key for key, each in found.items() if each.failed]
    for key in [*unstable, *failed]:
        print_line(f"{key.case}, {key.transport}: {found[key]}")
    print_line(f"{len(found)} records; {len(unstable)} differ between two recordings, {len(failed)} failed")
    return 1 if failed else 0


def compare(*, quick: bool) -> int:
    begin = time.monotonic()
    golden, heading = read()
    found = run_all(quick=quick).records
    different, kinds = 0, Counter[str]()
    missing = [] if quick else [key for key in golden if key not in found]
    for key in missing:
        print_line(f"{key.case}, {key.transport}: no longer run")
    for key, now in found.items():
        words = differences(golden[key], now) if key in golden else []
        if words:
            different += 1
            kinds.update({word.partition(" ")[0] for word in words})
            if different <= SHOWN:
                print_line(f"{key.case}, {key.transport}: {'; '.join(words)}")
    if different > SHOWN:
        print_line(f"and {different - SHOWN} more")
    seconds = time.monotonic() - begin
    new = len(found.keys() - golden.keys())
    print_line(f"{len(found) - new} compared in {seconds:.0f} s with the record of {heading}")
    print_line(f"{different} differ, {len(missing)} no longer run, {new} were not recorded")
    if different:
        print_line(f"differences by kind: {', '.join(f'{kind} {n}' for kind, n in kinds.most_common())}")
        print_line("python -m tests.goldens show CASE --transport TRANSPORT --against COMMIT prints how one differs")
    return 1 if different or missing else 0


def show(case: str, transport: str | None, against: str | None) -> int:
    found = run_all(only=[case], transports=[transport] if transport in TRANSPORTS else TRANSPORTS)
    lines = list(shown_lines(found, case, transport))
    if not lines:
        print_line(f"there is no case {case!r} on {transport or 'any transport'}")
        return 1
    if against is None:
        print_line("\n".join(lines))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(against)
        if not tree.is_dir():
            tree = Path(folder) / "tree"
            git("worktree", "add", "--detach", str(tree), against)
        try:
            command = [sys.executable, "-m", "tests.goldens", "show", case]
            command += [] if transport is None else ["--transport", transport]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            other = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            if tree != Path(against):
                git("worktree", "remove", "--force", str(tree))
    before = other.stdout.splitlines()
    difference = list(difflib.unified_diff(before, lines, against, "this tree", lineterm=""))
    print_line("\n".join(difference) or "no difference")
    return 1 if difference else 0


def shown_lines(found: Found, case: str, transport: str | None) -> Iterator[str]:
    for key, observations in found.observations.items():
        is_asked_for = key.case == case or key.case.rpartition(" #")[0] == case
        if is_asked_for and transport in (None, key.transport):
            for rank, seen in enumerate(observations):
                yield f"== {key.case}, {key.transport}, rank {rank}"
                labels = iter(seen.labels)
                for line in seen.events:
                    yield f"{line}: {next(labels)}" if line.startswith("collective:") else line
                yield from seen.results


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
