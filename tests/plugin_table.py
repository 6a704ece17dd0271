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

PROJECT = Path(__file__).parents[1]
LISTED = Path("composable_fsdp/plugins/__init__.py")


def _tests(names: str) -> tuple[str, ...]:
    """Return tests as pytest names them, of words such as ``unit/layering`` or ``unit/layering::begins_so|or_so``."""
    found = []
    for word in names.split():
        file, _, beginnings = word.partition("::")
        folder, _, topic = file.partition("/")
        path = f"tests/{folder}/test_{topic}.py" if topic else f"tests/{folder}"
        found += [f"{path}::test_{beginning}" for beginning in beginnings.split("|")] if beginnings else [path]
    return tuple(found)


_WITH_CODECS = _tests(
    """
    gpu ranks/callers_context::settings_of_the ranks/checkpoint_store::a_save_on|training_resumes_bitwise
    ranks/extensions ranks/mixed_precision::a_subclass_of|parameters_in_their_original|ranks_whose_functions
    ranks/shared_unsharded_buffer ranks/tensor_parallel ranks/freed_models ranks/streams ranks/recovery
    ranks/dp_mesh_dims ranks/quantized_example::the_example_trains ranks/nonfinite::parameters_and_ranks
    parity/fuzz::programs_that_failed|programs_train_like
    parity/races::backwards_that_leave|drawn_programs_have|training_has_no
    parity/nccl_training::drawn_programs_break parity/comparison::this_library_behaves
    unit/dropped_models::a_dropped_model unit/codec_fused::codecs_are_compiled
    unit/captured_passes::the_first_forward|what_cannot_be
    unit/docs::documented_extensions_train_on_two_ranks|docs_examples_pass[docs/extensions.md]
    """
)
"""Tests with a ``comm_policy``, which is refused without the plugin."""

_OF_ERRORS_INSTEAD_OF_HANGS = _tests(
    """
    ranks/faults ranks/device_faults ranks/soak ranks/root_cause
    ranks/recovery ranks/schedule::a_forward_that_failed ranks/evaluation ranks/end_of_program
    ranks/launch::two_hosts ranks/fused_groups::ranks_may_use
    ranks/checkpoint_store::a_save_on|training_resumes_bitwise parity/comparison::this_library_behaves
    parity/error_types::errors_are_of ranks/elastic_example
    """
)
"""Tests of ranks that fail, or do other things than others, which the other ranks notice."""

_OF_TRACED_COLLECTIVES = _tests(
    """
    ranks/fused_groups ranks/large_groups ranks/memory::reading_a_kept|the_ledger_of ranks/timeline_of_steps
    ranks/prefetch_in_backward::ranks_with_different ranks/nonfinite::parameters_and_ranks ranks/streams
    ranks/mixed_precision::a_subclass_of|parameters_in_their_original|ranks_whose_functions ranks/unused_modules
    ranks/quantized_example::the_example_trains
    parity/comparison::this_library_behaves parity/profiler_labels unit/timeline::an_environment_variable
    ranks/gradient_hooks::wide ranks/unused_parameters::flags
    """
)
"""Tests that count collectives or their bytes in the trace."""

OWN: Mapping[str, Sequence[str]] = {
    "in_shared_memory": _tests(
        """
        contract/communicator::shared_memory ranks/shared_memory_transport ranks/shared_shards
        ranks/shared_unsharded_buffer
        """
    ),
    "SharedParameters": _tests("ranks/shared_shards ranks/shared_unsharded_buffer"),
    "Epochs": _tests("ranks/shared_shards ranks/shared_unsharded_buffer"),
    "over_gloo": _tests(
        """
        ranks/gloo_reductions ranks/large_groups ranks/unused_parameters::flags ranks/gradient_hooks::wide
        ranks/mixed_precision::a_subclass_of|parameters_in_their_original|ranks_whose_functions
        """
    ),
    "Extensions": _tests(
        """
        ranks/extensions ranks/extension_results
        parity/torchao::checkpoints_of_nf4|float8_with_torchaos|torchao_parameters_are|torchao_safetensors_have
        parity/torchao::torchao_trains_bitwise|torchao_trains_on|torchao_trains_with|torchaos_8_bit
        ranks/checkpoint_classes::an_inner_tensor|inner_tensors_are|unsupported_operations_of unit/interop_state
        unit/fully_shard_errors::a_tensor_that_only_brings_a_view
        unit/single_rank::a_view_can_be_declined|frozen_tensors_choose_their_view
        unit/docs::documented_extensions_train_on_two_ranks|docs_examples_pass[docs/extensions.md]
        """
    ),
    "EncodedParameters": (*_tests("ranks/parameter_codecs ranks/codec_combinations"), *_WITH_CODECS),
    "watched": (
        *_tests("ranks/watchdog_faults ranks/wait_warning unit/testing_ranks::every_end ranks/forward_order"),
        *_OF_ERRORS_INSTEAD_OF_HANGS,
    ),
    "Visible": _OF_TRACED_COLLECTIVES,
    "TorchViews": _tests(
        """
        unit/interop_state parity/pipelining parity/mem_tracker ranks/pending_gradients::gradients_are_pending
        parity/comparison::this_library_behaves unit/plan::the_peak_is_what_torchs|torchs_tracker
        """
    ),
    "OrderCheckLevel": _tests("unit/root_settings::the_first_forward ranks/device_faults"),
    "DynamoDisabled": _tests("ranks/compiled"),
    "ManagedModules": _tests("ranks/compiled"),
    "OwnHooks": _tests("unit/module_calls::a_module_without_other_hooks"),
    "direct_calls": _tests("unit/module_calls::a_module_without_other_hooks"),
    "FullParameters": _tests(
        "unit/usage_errors::operations_that_run_modules_inside|the_first_forward_of_a_root_is_refused"
    ),
    "LateTies": _tests("unit/dropped_models::a_dropped_model ranks/shared_parameters"),
    "Recovery": _tests("ranks/recovery ranks/schedule::a_forward_that_failed ranks/soak"),
    "PlainParameters": _tests("ranks/module_kinds::parameters_added_after"),
    "ReportedPasses": _OF_ERRORS_INSTEAD_OF_HANGS,
    "TracedPasses": _OF_TRACED_COLLECTIVES,
    "ForwardOrder": _tests("ranks/forward_order"),
    "VersionCheck": _tests(
        """
        unit/usage_errors::an_in_place_change_between|an_optimizer_step_between ranks/deepcopy::a_copy_keeps
        unit/global_effects::global_hooks_live_as_long_as_sharded_models ranks/memory::reading_a_kept_reference
        """
    ),
    "OptimizerChecks": _tests(
        """
        unit/usage_errors::a_step_after_backwards|an_optimizer_made_before|one_warning_tells_of_an_optimizer|parameters_that_an_optimizer_gets|an_optimizer_step_between
        unit/elementwise_optimizers::an_optimizer_made
        unit/global_effects::global_hooks_live_as_long_as_sharded_models|a_sharded_module_on_one_rank
        ranks/threads ranks/gradient_hooks::an_optimizer_built_before
        """
    ),
    "ModelCheck": _tests(
        """
        ranks/different_models ranks/starting_values ranks/initial_values::initialisation_names
        ranks/mixed_precision::a_subclass_of|parameters_in_their_original|ranks_whose_functions
        unit/root_settings::the_first_forward ranks/unused_modules
        """
    ),
    "CapturedPasses": _tests("unit/captured_passes::the_first_forward|what_cannot_be"),
    "CompiledCodecs": _tests("unit/codec_fused::codecs_are_compiled"),
    "SpmdTypes": _tests("ranks/spmd_types"),
    "read_types": _tests("ranks/spmd_types"),
    "without_type_checks": _tests("ranks/spmd_types"),
    "explained_methods": _tests(
        """
        unit/usage_errors::a_method_that_bypasses|wrapped_methods_keep ranks/direct_calls
        ranks/memory::reading_a_kept_reference
        """
    ),
    "ExplainedErrors": _tests(
        """
        unit/usage_errors::an_error_in_the_forward|an_uncaught_error ranks/functional_call unit/global_effects
        ranks/module_inputs_outputs::an_output_in_an_object ranks/memory::reading_a_kept_reference
        """
    ),
    "RequestedGradients": _tests(
        "ranks/requested_gradients unit/global_effects parity/comparison::this_library_behaves"
    ),
    "UnshardedWrites": _tests("ranks/unsharded_writes parity/comparison::this_library_behaves"),
    "ProfilerLabels": _tests("parity/profiler_labels"),
    "EncodedGradients": (*_tests("ranks/gradient_codecs ranks/codec_combinations"), *_WITH_CODECS),
    "Residuals": (*_tests("ranks/gradient_codecs ranks/codec_combinations"), *_WITH_CODECS),
    "SkippedModules": _tests("ranks/unused_modules"),
    "FunctionalCalls": _tests("ranks/functional_call unit/seams_together::functional_call_does_not"),
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
