"""Attachments of the core, and which of them are attached by default.

A plugin imports the core, and no plugin of another folder. It attaches itself to a seam of the core. The code of a user
may do so too (docs/plugins.md); the seams are provisional. Remove the line of a plugin from the lists below, and the
library trains without it: ``make plugins`` does so for each, and runs the tests. Among those that are on for
accelerators only ``watched_waits`` has a thread: it uses the store of the job, and never a device.

======================= ================================================ ==================
Plugin                  Does                                             On by default
======================= ================================================ ==================
``shared_memory``       transport between ranks of one host              CPU
``shared_parameters``   full parameters in memory that ranks share       CPU
``epochs``              ends the times when ranks read that memory       CPU
``skipped_modules``     joins collectives of modules that a rank skips   all devices
``extensions``          gathers tensors with FSDP hooks                  all devices
``encoded_gather``      gathers parameters encoded, by their codecs      all devices
``gloo``                own collectives over gloo's point-to-point       CPU
``watched_waits``       reports waits and passes, compares operations    all devices
``visible_collectives`` shows launches in traces and profiles            all devices
``full_params``         registers full parameters, and refuses forwards  all devices
``recovery``            lets ranks meet and reconnect in a reset         all devices
``model_changes``       warns of added parameters and a changed order    all devices
``late_ties``           merges weights that were tied afterwards         all devices
``optimizer_checks``    refuses steps that would change nothing          all devices
``model_check``         compares the models and values of ranks          all devices
``writes``              refuses or keeps writes to parameters            all devices
``state_dicts``         keeps state dicts sharded, and loads full ones   all devices
``dynamo``              keeps torch.compile out of hooks                 all devices
``module_calls``        calls our hooks without torch's loops            CPU
``torch_views``         shows states to clients of torch's own FSDP2     all devices
``encoded_reduce``      sends gradients encoded, by their codecs         all devices
``residuals``           commits and restores those of error feedback     all devices
``functional_call``     computes with the values of torch's function     all devices
``captured_passes``     refuses what CUDA graphs cannot capture          accelerators
``spmd_types``          types of the package, on full meshes             all devices
``explain_errors``      names the sharded parameter in torch's errors    all devices
``requested_gradients`` serves backward(inputs=) at sharded parameters   all devices
``profiler_labels``     labels hooks in profiles and in torch's log      all devices
``smaller_mesh``        gathers slices from fewer ranks in backward      when
                                                                         ``reshard_after_forward``
                                                                         is an ``int``
``weight_stream``       streams full parameters in buckets               when it is called
``deepcopy``            copies sharded modules                           when it is called
``custom_comm``         custom collectives, allocators, process groups   when it is called
======================= ================================================ ==================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from composable_fsdp._core.comm import AROUND, SUM, TRANSPORTS, Around, Collective, Communicator, Traits, Transfer
from composable_fsdp._core.full_mesh import FORMS, FullMesh
from composable_fsdp._core.gather import AllGatherBuffers, Bucket
from composable_fsdp._core.group import GATHER_KINDS, GatherKind
from composable_fsdp._core.group_plan import BucketPlan, GatherClaim, Hook, Pass
from composable_fsdp._core.layout import ReduceOp
from composable_fsdp._core.memory import Work
from composable_fsdp._core.mesh import PlainForm
from composable_fsdp._core.reduce import REDUCE_KINDS, BucketReducer, OwnReduce, ReduceKind
from composable_fsdp._core.schedule import PLAN_CHANGES, Plan, PlannedRun
from composable_fsdp._core.seams import CLASS_MEMBERS, HOOK_WRAPPERS, LEFT_CONTEXTS, OBSERVERS, ObservedRoot, Observer
from composable_fsdp.plugins.captured_passes import CapturedPasses
from composable_fsdp.plugins.checks.model_changes import ForwardOrder, PlainParameters
from composable_fsdp.plugins.checks.model_check import ModelCheck
from composable_fsdp.plugins.checks.optimizer_checks import OptimizerChecks
from composable_fsdp.plugins.checks.requested_gradients import RequestedGradients
from composable_fsdp.plugins.checks.writes import UnshardedWrites, VersionCheck
from composable_fsdp.plugins.codecs.encoded_gather import EncodedParameters
from composable_fsdp.plugins.codecs.encoded_reduce import EncodedGradients, Residuals
from composable_fsdp.plugins.dynamo import DynamoDisabled, ManagedModules
from composable_fsdp.plugins.explain_errors import ExplainedErrors, explained_methods
from composable_fsdp.plugins.extensions.extension_bucket import Extensions
from composable_fsdp.plugins.full_params import FullParameters
from composable_fsdp.plugins.functional_call import FunctionalCalls
from composable_fsdp.plugins.gloo.functional_all_gather import FUNCTIONAL_ALL_GATHER
from composable_fsdp.plugins.gloo.gloo_communicator import over_gloo
from composable_fsdp.plugins.late_ties import LateTies
from composable_fsdp.plugins.module_calls import OwnHooks, direct_calls
from composable_fsdp.plugins.profiler_labels import ProfilerLabels
from composable_fsdp.plugins.recovery import BegunSteps, Recovery
from composable_fsdp.plugins.shared_memory.shared_parameters import Epochs, SharedParameters
from composable_fsdp.plugins.shared_memory.shm_communicator import in_shared_memory
from composable_fsdp.plugins.skipped_modules import SkippedModules
from composable_fsdp.plugins.spmd_types import SpmdTypes, read_types, without_type_checks
from composable_fsdp.plugins.state_dicts import StateDicts
from composable_fsdp.plugins.torch_views import TorchViews
from composable_fsdp.plugins.visible_collectives import Visible
from composable_fsdp.plugins.watched_waits import OrderCheckLevel, ReportedPasses, watched

__all__ = [
    "AROUND",
    "CLASS_MEMBERS",
    "DEFAULT",
    "DEFAULT_AROUND",
    "DEFAULT_CLASS_MEMBERS",
    "DEFAULT_FORMS",
    "DEFAULT_GATHER_KINDS",
    "DEFAULT_HOOK_WRAPPERS",
    "DEFAULT_LEFT_CONTEXTS",
    "DEFAULT_REDUCE_KINDS",
    "DEFAULT_TRANSPORTS",
    "FORMS",
    "FUNCTIONAL_ALL_GATHER",
    "GATHER_KINDS",
    "HOOK_WRAPPERS",
    "LEFT_CONTEXTS",
    "OBSERVERS",
    "PLAN_CHANGES",
    "REDUCE_KINDS",
    "SUM",
    "TRANSPORTS",
    "AllGatherBuffers",
    "Around",
    "Bucket",
    "BucketPlan",
    "BucketReducer",
    "Collective",
    "Communicator",
    "GatherClaim",
    "GatherKind",
    "Hook",
    "ObservedRoot",
    "Observer",
    "OwnReduce",
    "Pass",
    "PlainForm",
    "Plan",
    "PlannedRun",
    "ReduceKind",
    "ReduceOp",
    "Traits",
    "Transfer",
    "Work",
]

DEFAULT_TRANSPORTS = (
    in_shared_memory,
    over_gloo,
)
"""Asked before torch's own collectives, in this order."""

DEFAULT_AROUND = (
    watched,
    Visible,
)
"""The decorators of every communicator. The last is the outermost."""

DEFAULT_GATHER_KINDS: tuple[type[GatherKind], ...] = (
    Extensions,
    EncodedParameters,  # after Extensions, whose tensors encode themselves
    SharedParameters,
)
"""Asked for each parameter in this order."""

DEFAULT_REDUCE_KINDS: tuple[type[ReduceKind], ...] = (
    EncodedGradients,  # a line for each, which tests leave out
)
"""Asked for each group of parameters, in this order."""

DEFAULT: tuple[type[Observer], ...] = (
    FullParameters,  # before those that change the groups of a new root
    OptimizerChecks,
    Recovery,  # before others that are told of the end of a reset, so that it is told last: it may refuse
    ReportedPasses,
    OrderCheckLevel,
    StateDicts,
    TorchViews,
    ManagedModules,
    OwnHooks,
    PlainParameters,
    LateTies,
    CapturedPasses,  # before those that wait
    ModelCheck,
    ForwardOrder,
    VersionCheck,
    UnshardedWrites,  # before Epochs
    Residuals,
    SpmdTypes,
    ExplainedErrors,
    RequestedGradients,
    ProfilerLabels,
    Epochs,
    SkippedModules,
    FunctionalCalls,
    BegunSteps,  # after others: a step that they refuse has not begun
)
"""The observers of every root, in their order."""

DEFAULT_FORMS: tuple[Callable[[str, torch.Tensor, FullMesh], PlainForm | None], ...] = (
    read_types,  # those of the package spmd_types
)
"""Asked for the form of each plain parameter on a mesh of all axes."""

DEFAULT_LEFT_CONTEXTS: tuple[Callable[[], AbstractContextManager[None]], ...] = (
    without_type_checks,  # those of spmd_types
)
"""The contexts of other packages that hooks leave."""

DEFAULT_CLASS_MEMBERS: tuple[Callable[[type[nn.Module]], Mapping[str, Callable[..., Any]]], ...] = (
    explained_methods,  # explain errors about sharded parameters
    direct_calls,  # call our hooks without torch's loops if there are no others
)
"""The further members of sharded classes."""

DEFAULT_HOOK_WRAPPERS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    DynamoDisabled,  # torch.compile traces no hooks
)
"""Around each hook of a module's forward."""

TRANSPORTS[:0] = DEFAULT_TRANSPORTS
AROUND.extend(DEFAULT_AROUND)
GATHER_KINDS.extend(DEFAULT_GATHER_KINDS)
REDUCE_KINDS.extend(kind() for kind in DEFAULT_REDUCE_KINDS)
FORMS.extend(DEFAULT_FORMS)
LEFT_CONTEXTS.extend(DEFAULT_LEFT_CONTEXTS)
CLASS_MEMBERS.extend(DEFAULT_CLASS_MEMBERS)
HOOK_WRAPPERS.extend(DEFAULT_HOOK_WRAPPERS)
OBSERVERS.extend(plugin() for plugin in DEFAULT)


def __getattr__(name: str) -> NoReturn:
    from composable_fsdp._other_names import missing

    missing(__name__, name)
