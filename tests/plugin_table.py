"""Run the tests without each plugin in turn, and print a table: ``python -m tests.plugin_table [PLUGIN ...]``.

For each plugin, the project is copied, the plugin's line is removed from the lists in ``plugins/__init__.py`` of the
copy, and the tests of the copy run, except those that :data:`OWN` has for the plugin. No other test may fail. With
``--together``, the tests run once, without all these plugins: a test that fails then belongs to one of them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from pathlib import Path

__all__ = ["LISTED", "OWN", "PROJECT", "listed", "main", "without"]

PROJECT = Path(__file__).parents[1]
LISTED = Path("composable_fsdp/plugins/__init__.py")

_OF_GLOBAL_HOOKS = "tests/unit/test_global_effects.py::test_global_hooks_live_as_long_as_sharded_models"
_OF_SHARED_MEMORY = (
    *("tests/unit/test_shared_memory.py", "tests/ranks/test_shared_memory_transport.py"),
    *("tests/ranks/test_shared_shards.py", "tests/ranks/test_shared_unsharded_buffer.py"),
)

_OF_CODECS = ("tests/ranks/test_gradient_codecs.py", "tests/ranks/test_codec_combinations.py")

_WITH_CODECS = (
    *("tests/gpu", "tests/ranks/test_callers_context.py", "tests/ranks/test_checkpoint_store.py"),
    *("tests/ranks/test_extensions.py", "tests/ranks/test_mixed_precision.py", "tests/ranks/test_schedule_costs.py"),
    *("tests/ranks/test_shared_unsharded_buffer.py", "tests/ranks/test_tensor_parallel.py"),
    *("tests/ranks/test_dropped_models.py", "tests/ranks/test_streams.py", "tests/ranks/test_races.py"),
    *("tests/ranks/test_checkpoint_earlier_versions.py", "tests/ranks/test_recovery.py", "tests/goldens"),
    *("tests/parity", "tests/unit/test_dropped_models.py", "tests/unit/test_nccl.py"),
    *("tests/unit/test_codec_fused.py", "tests/unit/test_captured_passes.py", "tests/unit/test_upstream.py"),
)
"""Tests with a ``comm_policy``, which is refused without the plugin."""

OWN: Mapping[str, Sequence[str]] = {
    "in_shared_memory": ("tests/contract/test_communicator.py::test_shared_memory", *_OF_SHARED_MEMORY),
    "SharedParameters": ("tests/ranks/test_shared_shards.py", "tests/ranks/test_shared_unsharded_buffer.py"),
    "Epochs": ("tests/ranks/test_shared_shards.py", "tests/ranks/test_shared_unsharded_buffer.py"),
    "over_gloo": ("tests/ranks/test_gloo_reductions.py",),
    "Extensions": (
        *("tests/ranks/test_extensions.py", "tests/ranks/test_extension_results.py", "tests/parity/test_torchao.py"),
        *("tests/ranks/test_checkpoint_classes.py", "tests/unit/test_interop_state.py"),
    ),
    "EncodedParameters": (
        *("tests/ranks/test_parameter_codecs.py", "tests/ranks/test_codec_combinations.py"),
        *("tests/unit/test_codec_fused.py", *_WITH_CODECS),
    ),
    "watched": ("tests/ranks/test_watchdog.py", "tests/ranks/test_wait_warning.py"),
    "FullParameters": ("tests/unit/test_usage_errors.py",),
    "LateTies": ("tests/unit/test_dropped_models.py", "tests/ranks/test_shared_parameters.py"),
    "Recovery": ("tests/ranks/test_recovery.py",),
    "PlainParameters": ("tests/ranks/test_module_kinds.py",),
    "ForwardOrder": ("tests/ranks/test_forward_order.py",),
    "VersionCheck": ("tests/unit/test_usage_errors.py", "tests/ranks/test_deepcopy.py", _OF_GLOBAL_HOOKS),
    "OptimizerChecks": (
        *("tests/unit/test_usage_errors.py", "tests/unit/test_local_optimizer.py"),
        _OF_GLOBAL_HOOKS,
    ),
    "ModelCheck": ("tests/ranks/test_model_comparison.py", "tests/ranks/test_starting_values.py"),
    "CapturedPasses": ("tests/unit/test_captured_passes.py",),
    "CompiledCodecs": ("tests/unit/test_codec_fused.py",),
    "SpmdTypes": ("tests/ranks/test_spmd_types.py",),
    "read_types": ("tests/ranks/test_spmd_types.py",),
    "without_type_checks": ("tests/ranks/test_spmd_types.py",),
    "explained_methods": ("tests/unit/test_usage_errors.py", "tests/ranks/test_direct_calls.py"),
    "ExplainedErrors": ("tests/unit/test_usage_errors.py", "tests/ranks/test_functional_call.py"),
    "ProfilerLabels": ("tests/parity/test_profiler_labels.py",),
    "EncodedGradients": (*_OF_CODECS, "tests/ranks/test_gradient_extensions.py", *_WITH_CODECS),
    "GradientHooks": ("tests/ranks/test_gradient_extensions.py", "tests/ranks/test_extensions.py"),
    "Residuals": _OF_CODECS,
    "SkippedModules": ("tests/ranks/test_unused_modules.py",),
    "FunctionalCalls": ("tests/ranks/test_functional_call.py",),
    "Tuning": (
        *("tests/unit/test_schedule_learned.py", "tests/ranks/test_calibration.py"),
        *("tests/ranks/test_schedule_costs.py", "tests/ranks/test_races.py"),
        "tests/unit/test_benchmark_sim.py::test_the_predicted_peak_of_memory_is_the_counted_one",
    ),
}
"""The tests of each plugin: prefixes of the names of tests, as pytest's ``--deselect`` takes them."""

_OF_THE_LISTS = "tests/unit/test_observers.py::test_the_table_of_plugins_leaves_out_one_line_of_the_lists"
_COPIED = ("composable_fsdp", "tests", "examples", "benchmarks", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
_LISTS = "DEFAULT_TRANSPORTS = "
"""The beginning of the lists in the source."""
_LINE = re.compile(r"^    (\w+),(?:  #.*)?\n", re.MULTILINE)


def listed(text: str) -> list[str]:
    """Return the names in the lists of the source ``text``."""
    return _LINE.findall(text[text.index(_LISTS) :])


def without(text: str, plugin: str) -> str:
    """Return the source ``text`` of the lists without the line of ``plugin``."""
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
        tests = (_OF_THE_LISTS, *chain.from_iterable(OWN.get(plugin, ()) for plugin in plugins))
        own = chain.from_iterable(("--deselect", test) for test in tests)
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", *own, *arguments]
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
