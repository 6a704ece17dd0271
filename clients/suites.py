"""Runs the same tests of other projects on torch's FSDP2 and on ours, and compares the results of each test.

    make suites                                     # all; makes .venv-clients first
    python clients/suites.py --only torchao,torchft # suites whose names contain one of these

Pip downloads each project's release from PyPI into ``.suites``. Its tests are copied, changed to run on CPU
(`Suite.changes`), and run by pytest. This repository contains none of their code. Every process of a suite first runs
`suites_overlay/sitecustomize.py`, which replaces torch's ``fully_shard`` by ours and records the library that shards.
Results are stored in ``clients/results/suites-DATE.json``, from which ``clients/SUITES.md`` is made. The exit code is 1
if a test that passes on torch's FSDP2 fails on ours, unless ``Suite.differs`` gives a reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from run_all import ENVIRONMENT

HERE = Path(__file__).parent
CACHE = HERE.parent / ".suites"
OVERLAY = HERE / "suites_overlay"
LIBRARIES = ("fsdp2", "ours")
MINUTES = 15
HEAD = """# Suites

Made by `clients/suites.py` (`make suites`) from [{source}](results/{source}); do not edit.
What the columns mean is in [docs/compatibility.md](../docs/compatibility.md#libraries-built-on-fsdp2).

<!-- table -->

"""
COLUMNS = ("suite", "release", "what the tests check", "tests", "pass on fsdp2", "pass on ours", "what fails, and why")


@dataclass(frozen=True)
class Suite:
    """Tests from one release of one project.

    Attributes:
        release: the release for pip: its wheel if that has the tests, else its source distribution.
        path: the path of the test file in the release.
        tests: the argument of ``pytest -k``.
        ranks: the number of ranks that ``torchrun`` starts. With 0, the tests start their own processes.
        changes: regular expressions with replacements of their matches in the test file, applied in order.
        differs: tests that may fail on ours although they pass on torch's FSDP2, with reasons.
        checks: the subject of the tests, for the table.
    """

    name: str
    release: str
    path: str
    checks: str
    tests: str = ""
    source: bool = False
    ranks: int = 0
    changes: Sequence[tuple[str, str]] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)


TO_CPU = (
    # Torch's FSDPTest runs on CPU unchanged, but skips if there are fewer accelerators than ranks.
    (r"import FSDPTest\n", r"\g<0>\ntorch.accelerator.device_count = lambda: 8\n\n"),
    (r"@skip_if_lt_x_gpu\(.*\)\n", "\n"),
    (r"@pytest\.mark\.skipif\(not torch\.cuda.*\)\n", "\n"),
    (r"torch\.cuda\.device_count\(\) < \d", "False"),
    (r" \+ \(\[\"cuda\"\] if torch\.cuda\.is_available\(\) else \[\]\)", ""),
    (r"cuda", "cpu"),
)
TORCHFT = "torchft==0.2.0"
UNSEEDED = "`DivergenceError`: ranks build the model without a common seed, and FSDP2 trains a mixture of their values"

SUITES = (
    Suite(
        "torchao low-bit optimizers",
        "torchao==0.18.0",
        "test/test_low_bit_optim.py",
        "8-bit and 4-bit AdamW step by step with an unsharded model, also with CPU offload; DCP; uneven shards",
        tests="TestFSDP2",
        changes=(
            (r"@pytest\.mark\.skipif\(torch_version_at_least.*\)\n", "\n"),
            (r"torch\.cuda\.get_device_capability\(\)", "(0, 0)"),
            *TO_CPU,
        ),
        environment={"TORCHDYNAMO_DISABLE": "1"},
    ),
    Suite(
        "torchao quantized training",
        "torchao==0.18.0",
        "test/prototype/test_quantized_training.py",
        "int8, int8 mixed precision and BitNet step by step with an unsharded model; BitNet scales",
        tests="TestFSDP2",
        changes=((r"@pytest\.mark\.skipif\(torch_version_at_least.*\)\n", "\n"), *TO_CPU),
        environment={"TORCHDYNAMO_DISABLE": "1"},
    ),
    Suite(
        "torchft",
        TORCHFT,
        "torchft/fsdp_test.py",
        "a user's all-reduce hook, also beside tensor parallelism",
        changes=TO_CPU,
        differs=dict.fromkeys(("test_fsdp", "test_fsdp_tp"), UNSEEDED),
    ),
    Suite(
        "torchft, seeded",
        TORCHFT,
        "torchft/fsdp_test.py",
        "the same, with one seed before the model is made",
        changes=((r"( +)model = nn\.Linear", r"\1torch.manual_seed(0)\n\g<0>"), *TO_CPU),
    ),
    Suite(
        "axolotl",
        "axolotl==0.19.0",
        "tests/e2e/multigpu/test_tiled_mlp_fsdp2.py",
        "gradients of an MLP computed in tiles inside of one autograd function",
        source=True,
        ranks=2,
        changes=((r"cuda:\{torch\.cuda\.current_device\(\)\}", "cpu"), (r'backend="nccl"', 'backend="gloo"'), *TO_CPU),
    ),
)


def release_folder(suite: Suite) -> Path:
    """Return the unpacked release. Pip downloads it if it is missing."""
    folder = CACHE / suite.release
    if not folder.exists():
        with tempfile.TemporaryDirectory() as download:
            # Without build isolation, because a source distribution might require another torch for its metadata.
            form = ["--no-binary", ":all:", "--no-build-isolation"] if suite.source else ["--only-binary", ":all:"]
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *form, "--dest", download]
            subprocess.run([*pip, suite.release], check=True)
            (archive,) = Path(download).iterdir()
            shutil.unpack_archive(archive, download, None if suite.source else "zip")
            archive.unlink()
            (top,) = Path(download).iterdir() if suite.source else [Path(download)]
            shutil.copytree(top, folder)
    return folder


def run(suite: Suite, library: str) -> dict[str, Any]:
    """Run ``suite`` on ``library``, and return the result of each test and the libraries that sharded modules."""
    with tempfile.TemporaryDirectory() as scratch:
        tests, out = Path(scratch, "tests"), Path(scratch, "out")
        out.mkdir()
        original = release_folder(suite) / suite.path
        shutil.copytree(release_folder(suite), tests, ignore=shutil.ignore_patterns("src"))
        text = original.read_text()
        for pattern, replacement in suite.changes:
            text = re.sub(pattern, replacement, text)
        (tests / suite.path).write_text(text)
        # The conftest files of these projects require the rest of their test environments.
        options = [f"--rootdir={tests}", "--noconftest", "--override-ini=addopts=", "-qs", "-pno:cacheprovider"]
        pytest = [sys.executable, "-m", "pytest", str(tests / suite.path), *options, "-k", suite.tests]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(suite.ranks), "--no-python"]
        command = ["sh", "-c", 'exec "$@" --junitxml="$SUITE_OUT/rank-${RANK:-0}.xml"', "sh", *pytest]
        environment = {
            **os.environ,
            **ENVIRONMENT,
            **suite.environment,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(60 * MINUTES),
            "SUITE_LIBRARY": library,
            "SUITE_OUT": str(out),
            "PYTHONPATH": str(OVERLAY),
        }
        with subprocess.Popen(
            [sys.executable, *torchrun, *command] if suite.ranks else command,
            cwd=tests, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=60 * MINUTES)
            finally:
                if process.poll() is None:  # its ranks belong to its session
                    os.killpg(process.pid, signal.SIGKILL)
        reports = sorted(out.glob("rank-*.xml"))
        if len(reports) < max(suite.ranks, 1):
            raise RuntimeError(f"{suite.name} on {library} ended without a report:\n{output}")
        outcomes: dict[str, str] = {}
        for report in reports:
            for test in ElementTree.parse(report).iter("testcase"):
                name, outcome = test.attrib["name"], outcome_of(test)
                if outcomes.get(name, "passed") == "passed":
                    outcomes[name] = outcome
        used = {path.name.removeprefix("used-") for path in out.glob("used-*")}
    if used - {library} or (not used and "passed" in outcomes.values()):
        raise RuntimeError(f"{suite.name} is to run on {library}, and modules were sharded by {used or 'nobody'}")
    return {"outcomes": outcomes, "output": output[-4000:]}


def outcome_of(test: ElementTree.Element) -> str:
    """Return ``passed``, ``skipped: reason`` or ``failed: the last line of the error``."""
    for kind in ("failure", "error", "skipped"):
        found = test.find(kind)
        if found is not None:
            said = found.attrib.get("message", "")
            if kind == "skipped":
                return f"skipped: {said.strip()}"
            errors = re.findall(r"^(?:E +)?((?:\w+\.)*\w+(?:Error|Exception).*)", f"{found.text}\n{said}", re.MULTILINE)
            return f"failed: {(errors or said.splitlines() or ['no message'])[-1]}"
    return "passed"


def compare(suite: Suite) -> dict[str, Any]:
    """Return a row of the results."""
    ran = {library: run(suite, library) for library in LIBRARIES}
    row = {"suite": suite.name, "release": suite.release, "path": suite.path}
    row |= {library: ran[library]["outcomes"] for library in LIBRARIES}
    print(f"{suite.name}: {tally(row)}", flush=True)
    for name, outcome in row["fsdp2"].items():
        if {outcome, row["ours"].get(name)} != {"passed"}:
            print(f"  {name}\n    fsdp2: {outcome}\n    ours: {row['ours'].get(name)}", flush=True)
    for library in LIBRARIES if unexpected(row) else ():
        print(f"--- on {library}:\n{ran[library]['output']}", flush=True)
    return row


def tally(row: Mapping[str, Any]) -> str:
    passed = {library: list(row[library].values()).count("passed") for library in LIBRARIES}
    return f"of {len(row['fsdp2'])} tests pass {passed['fsdp2']} on fsdp2, {passed['ours']} on ours"


def worse(row: Mapping[str, Any]) -> list[str]:
    """Return the tests that pass on torch's FSDP2 but not on ours."""
    peer, ours = (row[library] for library in LIBRARIES)
    return [name for name in peer if peer[name] == "passed" != ours.get(name)]


def unexpected(row: Mapping[str, Any]) -> list[str]:
    (differs,) = (suite.differs for suite in SUITES if suite.name == row["suite"])
    return [name for name in worse(row) if name not in differs]


def store(path: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace the rows of these suites in the file, and return all rows in the order of `SUITES`."""
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    by_name = {row["suite"]: row for row in (*kept, *rows)}
    merged = [by_name[suite.name] for suite in SUITES if suite.name in by_name]
    path.write_text(
        json.dumps({"python": sys.version.split()[0], "torch": version("torch"), "rows": merged}, indent=1) + "\n"
    )
    return merged


def page_of(rows: Sequence[Mapping[str, Any]], source: str) -> str:
    """Return Markdown of ``rows``, which are in the file ``source``."""
    suites = {suite.name: suite for suite in SUITES}
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for row in rows:
        suite, passed = suites[row["suite"]], [list(row[library].values()).count("passed") for library in LIBRARIES]
        notes = [f"`{name}`: {suite.differs.get(name, 'fails on ours')}" for name in worse(row)]
        notes += [f"`{name}` fails on both" for name, outcome in row["fsdp2"].items() if outcome.startswith("failed")]
        cells = (suite.name, row["release"].replace("==", " "), suite.checks, len(row["fsdp2"]), *passed)
        lines.append((*map(str, cells), "; ".join(notes)))
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return HEAD.format(source=source) + table + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="parts of names, with commas: " + ", ".join(s.name for s in SUITES))
    parser.add_argument("--no-results", action="store_true", help="write nothing")
    options = parser.parse_args()
    results, well = HERE / "results" / f"suites-{datetime.date.today()}.json", True
    for suite in SUITES:
        if any(part in suite.name for part in options.only.split(",")):
            row = compare(suite)
            well &= not unexpected(row)
            if not options.no_results:
                (HERE / "SUITES.md").write_text(page_of(store(results, [row]), results.name))
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
