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


def _in(file: str, *names: str) -> tuple[str, ...]:
    """Return the beginnings ``names`` of tests of ``file`` as pytest names them."""
    return tuple(f"{file}::{name}" for name in names)


_OF_GLOBAL_HOOKS = "tests/unit/test_global_effects.py::test_global_hooks_live_as_long_as_sharded_models"
_OF_SHARED_MEMORY = (
    "tests/ranks/test_shared_memory_transport.py",
    *("tests/ranks/test_shared_shards.py", "tests/ranks/test_shared_unsharded_buffer.py"),
)

_OF_CODECS = ("tests/ranks/test_gradient_codecs.py", "tests/ranks/test_codec_combinations.py")

_WITH_CODECS = (
    *(
        "tests/gpu",
        "tests/ranks/test_callers_context.py::test_settings_of_the",
        *_in("tests/ranks/test_checkpoint_store.py", "test_a_save_on", "test_training_resumes_bitwise"),
    ),
    *(
        "tests/ranks/test_extensions.py",
        *_in(
            "tests/ranks/test_mixed_precision.py",
            "test_a_subclass_of",
            "test_parameters_with_policies",
            "test_ranks_with_other",
        ),
    ),
    *("tests/ranks/test_shared_unsharded_buffer.py", "tests/ranks/test_tensor_parallel.py"),
    *(
        "tests/ranks/test_freed_models.py",
        "tests/ranks/test_streams.py",
    ),
    *(
        "tests/ranks/test_checkpoint_earlier_versions.py::test_checkpoints_of_earlier_versions_are_read",
        "tests/ranks/test_recovery.py",
    ),
    *(
        "tests/ranks/test_dp_mesh_dims.py",
        "tests/ranks/test_quantized_example.py::test_the_example_trains",
        "tests/ranks/test_nonfinite.py::test_parameters_and_ranks",
    ),
    *(
        *_in("tests/parity/test_fuzz.py", "test_programs_that_failed", "test_programs_train_like"),
        *_in(
            "tests/parity/test_races.py",
            "test_backwards_that_leave",
            "test_drawn_programs_have",
            "test_training_has_no",
        ),
        "tests/parity/test_nccl_training.py::test_drawn_programs_break",
    ),
    *(
        "tests/parity/test_comparison.py::test_this_library_behaves",
        "tests/unit/test_dropped_models.py::test_a_dropped_model",
    ),
    *(
        "tests/unit/test_codec_fused.py::test_codecs_are_compiled",
        *_in("tests/unit/test_captured_passes.py", "test_the_first_forward", "test_what_cannot_be"),
    ),
    *(
        "tests/unit/test_docs.py::test_documented_extensions_train_on_two_ranks",
        "tests/unit/test_docs.py::test_docs_examples_pass[docs/extensions.md]",
    ),
)
"""Tests with a ``comm_policy``, which is refused without the plugin."""

_OF_ERRORS_INSTEAD_OF_HANGS = (
    *(
        "tests/ranks/test_faults.py",
        "tests/ranks/test_device_faults.py",
    ),
    *("tests/ranks/test_soak.py", "tests/ranks/test_root_cause.py", "tests/ranks/test_recovery.py"),
    *(
        "tests/ranks/test_schedule.py::test_a_forward_that_failed",
        "tests/ranks/test_evaluation.py",
        "tests/ranks/test_end_of_program.py",
    ),
    "tests/ranks/test_launch.py::test_two_hosts",
    *(
        "tests/ranks/test_fused_groups.py::test_ranks_may_use",
        *_in("tests/ranks/test_checkpoint_store.py", "test_a_save_on", "test_training_resumes_bitwise"),
    ),
    *(
        "tests/parity/test_comparison.py::test_this_library_behaves",
        "tests/parity/test_error_types.py::test_errors_are_of",
        "tests/ranks/test_elastic_example.py",
    ),
)
"""Tests of ranks that fail, or do other things than others, which the other ranks notice."""

_OF_TRACED_COLLECTIVES = (
    *(
        "tests/ranks/test_fused_groups.py",
        "tests/ranks/test_large_groups.py",
        *_in("tests/ranks/test_memory.py", "test_reading_a_kept", "test_the_ledger_of"),
    ),
    *(
        "tests/ranks/test_repeated_gathers.py::test_backward_gathers_from",
        "tests/ranks/test_timeline_of_steps.py",
        "tests/ranks/test_prefetch_in_backward.py::test_ranks_with_different",
    ),
    *(
        "tests/ranks/test_nonfinite.py::test_parameters_and_ranks",
        "tests/ranks/test_streams.py",
        *_in(
            "tests/ranks/test_mixed_precision.py",
            "test_a_subclass_of",
            "test_parameters_with_policies",
            "test_ranks_with_other",
        ),
    ),
    *(
        "tests/ranks/test_unused_modules.py",
        "tests/ranks/test_quantized_example.py::test_the_example_trains",
    ),
    *(
        "tests/parity/test_comparison.py::test_this_library_behaves",
        "tests/parity/test_profiler_labels.py",
    ),
    "tests/unit/test_timeline.py::test_an_environment_variable",
    *("tests/ranks/test_gradient_hooks.py::test_wide", "tests/ranks/test_unused_parameters.py::test_flags"),
)
"""Tests that count collectives or their bytes in the trace."""

_OF_TORCHS_CLIENTS = (
    *("tests/unit/test_interop_state.py", "tests/parity/test_pipelining.py", "tests/parity/test_mem_tracker.py"),
    *(
        "tests/ranks/test_pending_gradients.py::test_gradients_are_pending",
        "tests/parity/test_comparison.py::test_this_library_behaves",
    ),
    *("tests/unit/test_plan.py::test_the_peak_is_what_torchs", "tests/unit/test_plan.py::test_torchs_tracker"),
)

_OF_VIEWS = (
    "tests/unit/test_fully_shard_errors.py::test_a_tensor_that_only_brings_a_view",
    "tests/unit/test_single_rank.py::test_a_view_can_be_declined",
    "tests/unit/test_single_rank.py::test_frozen_tensors_choose_their_view",
    "tests/unit/test_docs.py::test_documented_extensions_train_on_two_ranks",
    "tests/unit/test_docs.py::test_docs_examples_pass[docs/extensions.md]",
)

OWN: Mapping[str, Sequence[str]] = {
    "in_shared_memory": ("tests/contract/test_communicator.py::test_shared_memory", *_OF_SHARED_MEMORY),
    "SharedParameters": ("tests/ranks/test_shared_shards.py", "tests/ranks/test_shared_unsharded_buffer.py"),
    "Epochs": ("tests/ranks/test_shared_shards.py", "tests/ranks/test_shared_unsharded_buffer.py"),
    "over_gloo": (
        *("tests/ranks/test_gloo_reductions.py", "tests/ranks/test_large_groups.py"),
        *("tests/ranks/test_unused_parameters.py::test_flags", "tests/ranks/test_gradient_hooks.py::test_wide"),
        *(
            *_in(
                "tests/ranks/test_mixed_precision.py",
                "test_a_subclass_of",
                "test_parameters_with_policies",
                "test_ranks_with_other",
            ),
        ),
    ),
    "Extensions": (
        *(
            "tests/ranks/test_extensions.py",
            "tests/ranks/test_extension_results.py",
            *_in(
                "tests/parity/test_torchao.py",
                "test_checkpoints_of_nf4",
                "test_float8_with_torchaos",
                "test_torchao_parameters_are",
                "test_torchao_safetensors_have",
                "test_torchao_trains_bitwise",
                "test_torchao_trains_on",
                "test_torchao_trains_with",
                "test_torchaos_8_bit",
            ),
        ),
        *(
            *_in(
                "tests/ranks/test_checkpoint_classes.py",
                "test_an_inner_tensor",
                "test_inner_tensors_are",
                "test_inner_tensors_that",
                "test_unsupported_operations_of",
            ),
            "tests/unit/test_interop_state.py",
            *_OF_VIEWS,
        ),
    ),
    "EncodedParameters": (
        *("tests/ranks/test_parameter_codecs.py", "tests/ranks/test_codec_combinations.py"),
        *("tests/unit/test_codec_fused.py::test_codecs_are_compiled", *_WITH_CODECS),
    ),
    "watched": (
        *("tests/ranks/test_watchdog_faults.py", "tests/ranks/test_wait_warning.py", *_OF_ERRORS_INSTEAD_OF_HANGS),
        *("tests/unit/test_testing_ranks.py::test_every_end", "tests/ranks/test_forward_order.py"),
    ),
    "Visible": _OF_TRACED_COLLECTIVES,
    "TorchViews": _OF_TORCHS_CLIENTS,
    "OrderCheckLevel": (
        "tests/unit/test_root_settings.py::test_the_first_forward",
        "tests/ranks/test_device_faults.py",
    ),
    "DynamoDisabled": ("tests/ranks/test_compiled.py",),
    "ManagedModules": ("tests/ranks/test_compiled.py",),
    "FullParameters": (
        *_in(
            "tests/unit/test_usage_errors.py",
            "test_operations_that_run_modules_inside",
            "test_the_first_forward_of_a_root_is_refused",
        ),
    ),
    "LateTies": ("tests/unit/test_dropped_models.py::test_a_dropped_model", "tests/ranks/test_shared_parameters.py"),
    "Recovery": (
        "tests/ranks/test_recovery.py",
        "tests/ranks/test_schedule.py::test_a_forward_that_failed",
        "tests/ranks/test_soak.py",
    ),
    "PlainParameters": ("tests/ranks/test_module_kinds.py::test_parameters_added_after",),
    "ReportedPasses": _OF_ERRORS_INSTEAD_OF_HANGS,
    "TracedPasses": _OF_TRACED_COLLECTIVES,
    "ForwardOrder": ("tests/ranks/test_forward_order.py",),
    "VersionCheck": (
        *(
            *_in(
                "tests/unit/test_usage_errors.py", "test_an_in_place_change_between", "test_an_optimizer_step_between"
            ),
            "tests/ranks/test_deepcopy.py::test_a_copy_keeps",
            _OF_GLOBAL_HOOKS,
        ),
        "tests/ranks/test_memory.py::test_reading_a_kept_reference",
    ),
    "OptimizerChecks": (
        *(
            *_in(
                "tests/unit/test_usage_errors.py",
                "test_a_step_after_backwards",
                "test_an_optimizer_made_before",
                "test_one_warning_tells_of_an_optimizer",
                "test_parameters_that_an_optimizer_gets",
                "test_an_optimizer_step_between",
            ),
            "tests/unit/test_elementwise_optimizers.py::test_an_optimizer_made",
            _OF_GLOBAL_HOOKS,
        ),
        *("tests/ranks/test_threads.py", "tests/ranks/test_gradient_hooks.py::test_an_optimizer_built_before"),
        "tests/unit/test_global_effects.py::test_a_sharded_module_on_one_rank",
    ),
    "ModelCheck": (
        *("tests/ranks/test_different_models.py", "tests/ranks/test_starting_values.py"),
        *(
            "tests/ranks/test_initial_values.py::test_initialisation_names",
            *_in(
                "tests/ranks/test_mixed_precision.py",
                "test_a_subclass_of",
                "test_parameters_with_policies",
                "test_ranks_with_other",
            ),
        ),
        *("tests/unit/test_root_settings.py::test_the_first_forward", "tests/ranks/test_unused_modules.py"),
    ),
    "CapturedPasses": (*_in("tests/unit/test_captured_passes.py", "test_the_first_forward", "test_what_cannot_be"),),
    "CompiledCodecs": ("tests/unit/test_codec_fused.py::test_codecs_are_compiled",),
    "SpmdTypes": ("tests/ranks/test_spmd_types.py",),
    "read_types": ("tests/ranks/test_spmd_types.py",),
    "without_type_checks": ("tests/ranks/test_spmd_types.py",),
    "explained_methods": (
        *(
            *_in("tests/unit/test_usage_errors.py", "test_a_method_that_bypasses", "test_wrapped_methods_keep"),
            "tests/ranks/test_direct_calls.py",
        ),
        "tests/ranks/test_memory.py::test_reading_a_kept_reference",
    ),
    "ExplainedErrors": (
        *(
            *_in("tests/unit/test_usage_errors.py", "test_an_error_in_the_forward", "test_an_uncaught_error"),
            "tests/ranks/test_functional_call.py",
        ),
        *(
            "tests/unit/test_global_effects.py",
            "tests/ranks/test_module_inputs_outputs.py::test_an_output_in_an_object",
        ),
        "tests/ranks/test_memory.py::test_reading_a_kept_reference",
    ),
    "RequestedGradients": (
        "tests/ranks/test_requested_gradients.py",
        "tests/unit/test_global_effects.py",
        "tests/parity/test_comparison.py::test_this_library_behaves",
    ),
    "UnshardedWrites": (
        "tests/ranks/test_unsharded_writes.py",
        "tests/parity/test_comparison.py::test_this_library_behaves",
    ),
    "ProfilerLabels": ("tests/parity/test_profiler_labels.py",),
    "EncodedGradients": (*_OF_CODECS, *_WITH_CODECS),
    "Residuals": (*_OF_CODECS, *_WITH_CODECS),
    "SkippedModules": ("tests/ranks/test_unused_modules.py",),
    "FunctionalCalls": (
        "tests/ranks/test_functional_call.py",
        "tests/unit/test_seams_together.py::test_functional_call_does_not",
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
