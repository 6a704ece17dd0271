"""Run the tests without each plugin in turn, and print a table: ``python -m tests.plugin_table [PLUGIN ...]``.

For each plugin, the project is copied, the plugin's line is removed from the lists in ``plugins/__init__.py`` of the
copy, and the tests of the copy run. Only tests of what the plugin does may fail. With ``--together``, the tests run
once, without all these plugins.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

PROJECT = Path(__file__).parents[1]
LISTED = Path("composable_fsdp/plugins/__init__.py")

_OF_THE_LISTS = "tests/unit/test_observers.py::test_the_table_of_plugins_leaves_out_one_line_of_the_lists"
_COPIED = ("composable_fsdp", "tests", "examples", "benchmarks", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
_LISTS = "DEFAULT_TRANSPORTS = "
"""The beginning of the lists in the source."""
_LINE = re.compile(r"^    (\w+),(?:  #.*)?\n", re.MULTILINE)


def listed(text: str) -> list[str]:
    return _LINE.findall(text[text.index(_LISTS) :])


def without(text: str, plugin: str) -> str:
    head, tail = text[: text.index(_LISTS)], text[text.index(_LISTS) :]
    shorter = re.sub(rf"^    {plugin},(?:  #.*)?\n", "", tail, flags=re.MULTILINE)
    if shorter == tail:
        raise SystemExit(f"there is no plugin {plugin!r}. The plugins are {', '.join(listed(text))}.")
    return head + shorter


def run(plugins: Sequence[str], arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Run pytest without ``plugins``. Return the last line of its output, and the tests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in _COPIED:
            source = PROJECT / name
            ignored = shutil.ignore_patterns("__pycache__", "_build")
            shutil.copytree(source, copy / name, ignore=ignored) if source.is_dir() else shutil.copy(source, copy)
        changed = copy / LISTED
        changed.write_text(reduce(without, plugins, changed.read_text()))
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--deselect", _OF_THE_LISTS, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines() or [result.stderr.strip().splitlines()[-1]]
    failed = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return lines[-1].strip("= "), failed


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Run the tests without each plugin that is named, or without each of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plugins", nargs="*", help="the plugins to leave out, one at a time; all without any")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="the folders or files of tests to run")
    parser.add_argument("--together", action="store_true", help="run the tests once, without all of the plugins")
    arguments = parser.parse_args()
    names = arguments.plugins or listed((PROJECT / LISTED).read_text())
    _say(f"{'without':<18} result")
    has_failed = False
    for name, plugins in [("all", names)] if arguments.together else [(name, [name]) for name in names]:
        summary, failed = run(plugins, arguments.tests)
        has_failed |= bool(failed)
        _say("\n    ".join([f"{name:<18} {summary}", *failed]))
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
