"""Fully sharded data parallel training for PyTorch, with the interface of torch's FSDP2.

Shard every block, then the model itself::

    from composable_fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from composable_fsdp._api.fsdp_module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    no_sync,
    share_comm_ctx,
)
from composable_fsdp._api.fully_shard import fully_shard, register_fsdp_forward_method
from composable_fsdp._api.strategy import ShardingStrategy
from composable_fsdp._consistency.rank_report import set_wait_warning
from composable_fsdp._consistency.shutdown import shutdown
from composable_fsdp._core.full_mesh import ShardPlacementResult
from composable_fsdp._core.seams import OBSERVERS
from composable_fsdp._torch_version import warn_of_newer_torch
from composable_fsdp.codecs.blockwise import Int4, Int8
from composable_fsdp.codecs.cast import Cast
from composable_fsdp.codecs.communication_policy import CommunicationPolicy
from composable_fsdp.codecs.error_feedback import ErrorFeedback
from composable_fsdp.codecs.float8 import Float8
from composable_fsdp.diagnostics.communication_report import communication_report
from composable_fsdp.diagnostics.describe import describe
from composable_fsdp.diagnostics.nonfinite import find_nonfinite
from composable_fsdp.diagnostics.recorded_events import TimelineRecorder
from composable_fsdp.errors import DivergenceError, FSDPError, PeerError
from composable_fsdp.init.materialize import initialize, to_empty
from composable_fsdp.init.random_shards import sharded_rng
from composable_fsdp.optim.clip_grad import clip_grad_norm_, get_total_norm
from composable_fsdp.optim.local_optimizer import LocalSteps, local_optimizer, set_local_steps
from composable_fsdp.optim.muon import Muon
from composable_fsdp.optim.offload_optimizer import offload_optimizer, reload_optimizer
from composable_fsdp.optim.owner_step import owner_step
from composable_fsdp.plugins.codecs.communication_state import CommunicationState
from composable_fsdp.plugins.full_params import apply_to_full_params, unsharded_params
from composable_fsdp.plugins.torch_views import client_state
from composable_fsdp.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    cpu_offload_by_budget,
)
from composable_fsdp.wrap.tied_weights import tie_groups

if TYPE_CHECKING:
    from composable_fsdp.plugins.weight_stream.stream import copy_params, stream_full_params

__all__ = [
    "CPUOffloadPolicy",
    "Cast",
    "CommunicationPolicy",
    "CommunicationState",
    "DataParallelMeshDims",
    "DivergenceError",
    "ErrorFeedback",
    "FSDPError",
    "FSDPModule",
    "Float8",
    "GradientReductionHandle",
    "Int4",
    "Int8",
    "MixedPrecisionPolicy",
    "Muon",
    "OffloadPolicy",
    "PeerError",
    "ShardPlacementResult",
    "ShardingStrategy",
    "UnshardHandle",
    "apply_to_full_params",
    "clip_grad_norm_",
    "communication_report",
    "copy_params",
    "cpu_offload_by_budget",
    "describe",
    "find_nonfinite",
    "fully_shard",
    "get_total_norm",
    "initialize",
    "local_optimizer",
    "no_sync",
    "offload_optimizer",
    "owner_step",
    "register_fsdp_forward_method",
    "reload_optimizer",
    "set_local_steps",
    "set_wait_warning",
    "sharded_rng",
    "share_comm_ctx",
    "shutdown",
    "stream_full_params",
    "tie_groups",
    "to_empty",
    "unsharded_params",
]

__version__ = "0.1.0"

warn_of_newer_torch()

OBSERVERS += TimelineRecorder(), LocalSteps()  # diagnostics and optimizers stand above plugins

_attributes: Any = fully_shard
_attributes.state = client_state  # as torch's has
_attributes.groups = lambda model: list(describe(model).groups)

# Imported on first use, because they take time: torch.distributed.checkpoint is slow.
_ON_FIRST_USE = {
    "copy_params": "plugins.weight_stream.stream",
    "stream_full_params": "plugins.weight_stream.stream",
}
_SUBMODULES = (
    *("checkpoint", "codecs", "diagnostics", "errors", "interop", "optim", "plan", "plugins", "policies"),
    *("testing", "trace", "wrap"),
)
_HOMES = ("errors", "diagnostics", "plugins.weight_stream")
"""The modules of classes that few programs name."""
_IN_CHECKPOINT = "is in composable_fsdp.checkpoint: from composable_fsdp.checkpoint import {0}"
_IN_PLACE = "is FSDP1's wrapper: fully_shard(module) shards a module in place: from composable_fsdp import fully_shard"
_OTHER_NAMES = {
    **dict.fromkeys(("save", "load", "latest"), _IN_CHECKPOINT),
    **dict.fromkeys(("FSDP", "FullyShardedDataParallel"), _IN_PLACE),
    "summon_full_params": "is unsharded_params here: from composable_fsdp import unsharded_params",
}
"""The replacements of names that programs for other libraries import."""


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    # An AttributeError would lose its text in ``from composable_fsdp import``.
    if name in _OTHER_NAMES:
        raise ImportError(f"{name} {_OTHER_NAMES[name].format(name)}")
    if name[0].isupper():
        for home in (import_module(f"{__name__}.{home}") for home in _HOMES):
            if name in home.__all__:
                raise ImportError(f"{name} is in {home.__name__}: from {home.__name__} import {name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, "__version__"])
