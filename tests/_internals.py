"""The only module of the tests that imports private names of the package. A test that needs a private name imports it
from here. The imports below are for type checkers and people; ``__getattr__`` does each of them when its name is first
used, so that no worker process imports all of the package."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Wrapped lists take half of the lines: ``ruff check`` and ``ruff format`` leave this table alone.
# fmt: off
if TYPE_CHECKING:
    from composable_fsdp import _files
    from composable_fsdp._api.param_discovery import on_other_accelerators
    from composable_fsdp._api.strategy import StrategyName, resolve_strategy
    from composable_fsdp._api.torch_types import as_strategy
    from composable_fsdp._consistency import process_groups, watchdog
    from composable_fsdp._consistency.main_thread import has_ended, main_thread_line
    from composable_fsdp._consistency.order_check import CONTEXT, OrderCheck, OrderChecker, order_check_from
    from composable_fsdp._consistency.process_groups import part_of
    from composable_fsdp._consistency.process_groups import timeout_of as timeout_of_group
    from composable_fsdp._consistency.process_identity import has_died, process_identity
    from composable_fsdp._consistency.rank_report import (ABANDONED, RESET, OperationId, RankReport, WarningTimes,
        diagnose, error_summary, format_ranks, wait_text)
    from composable_fsdp._consistency.rendezvous import StoreRendezvous, Verdict, world_store
    from composable_fsdp._consistency.verify_ranks import difference_text, library_version, verify_same
    from composable_fsdp._consistency.watchdog import PATIENCE, EndOfRun, RunningPass, Watchdog
    from composable_fsdp._core import backward, full_mesh, group_plan, layout, memory, mesh, schedule
    from composable_fsdp._core import gather as core_gather
    from composable_fsdp._core import group as core_group
    from composable_fsdp._core import reduce as core_reduce
    from composable_fsdp._core.backward import GroupReduction, ReductionQueue, reduce_together
    from composable_fsdp._core.comm import (DONE, Around, Collective, Communicator, LoopbackCommunicator,
        ProcessGroupCommunicator, Traits, Transfer, communicator_over, communicators, find, is_over_group, reopen)
    from composable_fsdp._core.full_mesh import (ShardPlacementResult, default_mesh, named_data_parallel_axes,
        warn_without_cpu_backend)
    from composable_fsdp._core.gather import (AllGather, AllGatherBuffers, Bucket, CachedMessage, CachedPart,
        InPlaceBucket, cached_message, pack_messages)
    from composable_fsdp._core.group import ParamGroup
    from composable_fsdp._core.group_plan import (GRADIENT_TRANSITIONS, LOCAL_GRADIENTS, PARAMETER_TRANSITIONS, Event,
        GatherClaim, GradientOperation, GradientState, GroupPlan, Hook, ParameterOperation, ParameterSpec,
        ParameterState, Pass, PlanOptions, advance, plan_group, traits_of)
    from composable_fsdp._core.hooks import root_of
    from composable_fsdp._core.layout import (ALIGNMENT_BYTES, GatherLayout, ReduceLayout, ReduceOp, Reduction,
        ShardLayout, TensorShards, cut_pinned, divide, pack_gradient, pinned_bytes, plan_division, plan_gather,
        plan_reduce, split_at, take_shard, unpack_parameter)
    from composable_fsdp._core.memory import (BackendCapabilities, CommStream, CommStreams, DeviceCapabilities,
        OwnedBuffer, Work, backend_capabilities, cast_and_move, device_capabilities, group_by_key, is_host,
        without_grad)
    from composable_fsdp._core.mesh import (DataParallelAxes, ModelParallel, data_parallel_axes,
        data_parallel_placements, shard_over_axes, shard_within)
    from composable_fsdp._core.params import (OptimizerSteps, ParameterSource, ShardedParameter, local_part,
        take_gradients)
    from composable_fsdp._core.reduce import BucketReducer, ReduceScatterBuffers
    from composable_fsdp._core.root import _MOST_FORWARDS, Root, StreamLauncher
    from composable_fsdp._core.schedule import Planner
    from composable_fsdp._core.seams import outside_callers_context
    from composable_fsdp._core.state import (Accumulation, ForwardRecord, FSDPState, connections, find_state, state_of,
        states_below)
    from composable_fsdp._extents import DTYPES, Cut, ShardExtent, extent_of, gather, like, plain_name, shardings_of
    from composable_fsdp._text import text_table
    from composable_fsdp._torch_version import NEWEST, OLDEST
    from composable_fsdp.checkpoint import _coordination as rank_group
    from composable_fsdp.checkpoint import _safetensors as safetensors_files
    from composable_fsdp.checkpoint._archive import check_archive
    from composable_fsdp.checkpoint._convert import convert
    from composable_fsdp.checkpoint._coordination import (Mismatch, PendingSave, join_rank_texts,
        leave_common_unexpected, mismatch_text, refuse, said)
    from composable_fsdp.checkpoint._dcp import directory
    from composable_fsdp.checkpoint._dcp import save as checkpoint_save
    from composable_fsdp.checkpoint._dcp.directory import MANIFEST, PartialCheckpoint
    from composable_fsdp.checkpoint._dcp.metadata import read_metadata
    from composable_fsdp.checkpoint._safetensors import Replacement, TensorSpec, dtype_code, main_file, read_headers
    from composable_fsdp.checkpoint._state_dict import model
    from composable_fsdp.checkpoint._state_dict.model import Form, OwnerRanks, to_form
    from composable_fsdp.checkpoint._state_dict.optimizer import lacking, restored
    from composable_fsdp.checkpoint._state_dict.tensors import LocalShard, entries_of, parameter_names
    from composable_fsdp.codecs import _compiled, _encoder
    from composable_fsdp.codecs._encoder import Encoder, GradientCodec
    from composable_fsdp.diagnostics.recorded_events import write
    from composable_fsdp.diagnostics.timeline import merged, write_chrome_trace, write_rank
    from composable_fsdp.init.materialize import reset_parameters
    from composable_fsdp.optim._owner_exchange import Exchange, OwnerPlans, make_exchanges
    from composable_fsdp.optim._owner_plan import assign_owners, cut_buckets, message_limit, newton_schulz_cost
    from composable_fsdp.optim._owner_units import Slot, Tiling, Unit, axis_cuts, tiling_of
    from composable_fsdp.optim.owner_step import _Form as StateForm
    from composable_fsdp.plan import dry_run
    from composable_fsdp.plan.simulate import GroupSpec, simulate
    from composable_fsdp.plan.simulated_job import simulated_job
    from composable_fsdp.plugins.captured_passes import CapturedPasses
    from composable_fsdp.plugins.checks.model_check import Values, differing_starts, equal_shards
    from composable_fsdp.plugins.checks.writes import unchecked
    from composable_fsdp.plugins.custom_comm import Pooled
    from composable_fsdp.plugins.explain_errors import explanation_of
    from composable_fsdp.plugins.extensions.extension_bucket import ExtendedBucket
    from composable_fsdp.plugins.extensions.gather_hooks import shard_mesh_of
    from composable_fsdp.plugins.gloo.gloo_communicator import GlooCommunicator, GlooWork
    from composable_fsdp.plugins.shared_memory import connect
    from composable_fsdp.plugins.shared_memory.collective import StagedRange, plan_rounds
    from composable_fsdp.plugins.shared_memory.connect import SWITCH, RankInfo, meet_peers
    from composable_fsdp.plugins.shared_memory.segment import NUM_SLOTS, SLOT_BYTES, Segment
    from composable_fsdp.plugins.shared_memory.shared_parameters import SharedBucket
    from composable_fsdp.plugins.shared_memory.shm_communicator import SharedMemoryCommunicator
    from composable_fsdp.plugins.shared_memory.shm_socket import ShmSocket
    from composable_fsdp.plugins.skipped_modules import UnusedGroups, newly_reached
    from composable_fsdp.plugins.smaller_mesh import plan_slices, smaller_shard_axis
    from composable_fsdp.plugins.torch_views import ClientState
    from composable_fsdp.plugins.watched_waits import Watched, _WatchedWork, compare
    from composable_fsdp.plugins.weight_stream.bucket_gather import BucketGather
    from composable_fsdp.plugins.weight_stream.changed_params import _Bucket as ChangedBucket
    from composable_fsdp.wrap._plan import Scope, plan_groups
    from composable_fsdp.wrap.torch_policies import as_wrap_policy
# fmt: on


def _imports() -> dict[str, tuple[str, str]]:
    """The names of this file, each with its module and its name there."""
    nodes = ast.walk(ast.parse(Path(__file__).read_text()))
    found = (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None)
    return {a.asname or a.name: (str(node.module), a.name) for node in found for a in node.names}


_IMPORTS = _imports()


def __getattr__(name: str) -> Any:
    if name not in _IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: import it here from where it is")
    module, original = _IMPORTS[name]
    found = import_module(module)
    return getattr(found, original) if hasattr(found, original) else import_module(f"{module}.{original}")
