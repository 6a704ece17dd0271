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

from composable_fsdp._first_use import FirstUse

if TYPE_CHECKING:
    from composable_fsdp._api.fsdp_module import (
        FSDPModule,
        GradientReductionHandle,
        UnshardHandle,
        no_sync,
        share_comm_ctx,
        step_schedule,
    )
    from composable_fsdp._api.fully_shard import fully_shard, register_fsdp_forward_method
    from composable_fsdp._api.strategy import ShardingStrategy
    from composable_fsdp._consistency.rank_report import set_wait_warning
    from composable_fsdp._consistency.shutdown import shutdown
    from composable_fsdp._core.full_mesh import ShardPlacementResult
    from composable_fsdp.codecs.blockwise import Int4, Int8
    from composable_fsdp.codecs.cast import Cast
    from composable_fsdp.codecs.communication_policy import CommunicationPolicy
    from composable_fsdp.codecs.error_feedback import ErrorFeedback
    from composable_fsdp.codecs.float8 import Float8
    from composable_fsdp.diagnostics.describe import describe
    from composable_fsdp.diagnostics.nonfinite import find_nonfinite
    from composable_fsdp.errors import DivergenceError, FSDPError, PeerError
    from composable_fsdp.init.materialize import initialize, to_empty
    from composable_fsdp.init.random_shards import sharded_rng
    from composable_fsdp.optim.clip_grad import clip_grad_norm_, get_total_norm
    from composable_fsdp.optim.local_optimizer import local_optimizer, set_local_steps
    from composable_fsdp.optim.muon import Muon
    from composable_fsdp.optim.offload_optimizer import offload_optimizer
    from composable_fsdp.optim.owner_step import owner_step
    from composable_fsdp.plugins.full_params import unsharded_params
    from composable_fsdp.plugins.weight_stream.changed_params import stream_changed_params
    from composable_fsdp.plugins.weight_stream.copies import copy_params
    from composable_fsdp.plugins.weight_stream.stream import stream_full_params
    from composable_fsdp.policies import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
        cpu_offload_by_budget,
    )

__all__ = [
    "CPUOffloadPolicy",
    "Cast",
    "CommunicationPolicy",
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
    "clip_grad_norm_",
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
    "set_local_steps",
    "set_wait_warning",
    "sharded_rng",
    "share_comm_ctx",
    "shutdown",
    "step_schedule",
    "stream_changed_params",
    "stream_full_params",
    "to_empty",
    "unsharded_params",
]

__version__ = "0.2.0"

_ON_FIRST_USE = FirstUse(
    __name__,
    {
        "_api.fsdp_module": "FSDPModule GradientReductionHandle UnshardHandle no_sync share_comm_ctx step_schedule",
        "_api.fully_shard": "fully_shard register_fsdp_forward_method",
        "_api.strategy": "ShardingStrategy",
        "_consistency.rank_report": "set_wait_warning",
        "_consistency.shutdown": "shutdown",
        "_core.full_mesh": "ShardPlacementResult",
        "codecs.blockwise": "Int4 Int8",
        "codecs.cast": "Cast",
        "codecs.communication_policy": "CommunicationPolicy",
        "codecs.error_feedback": "ErrorFeedback",
        "codecs.float8": "Float8",
        "diagnostics.describe": "describe",
        "diagnostics.nonfinite": "find_nonfinite",
        "errors": "DivergenceError FSDPError PeerError",
        "init.materialize": "initialize to_empty",
        "init.random_shards": "sharded_rng",
        "optim.clip_grad": "clip_grad_norm_ get_total_norm",
        "optim.local_optimizer": "local_optimizer set_local_steps",
        "optim.muon": "Muon",
        "optim.offload_optimizer": "offload_optimizer",
        "optim.owner_step": "owner_step",
        "plugins.full_params": "unsharded_params",
        "plugins.weight_stream.changed_params": "stream_changed_params",
        "plugins.weight_stream.copies": "copy_params",
        "plugins.weight_stream.stream": "stream_full_params",
        "policies": "CPUOffloadPolicy DataParallelMeshDims MixedPrecisionPolicy OffloadPolicy cpu_offload_by_budget",
    },
)
_SUBMODULES = (
    *("checkpoint", "codecs", "diagnostics", "errors", "interop", "optim", "plan", "plugins", "policies"),
    *("trace", "wrap"),
)
_IN_CHECKPOINT = "is in composable_fsdp.checkpoint: from composable_fsdp.checkpoint import {0}"
_IN_PLACE = "is FSDP1's wrapper: fully_shard(module) shards a module in place: from composable_fsdp import fully_shard"
_OTHER_NAMES = {
    **dict.fromkeys(("save", "load", "latest"), _IN_CHECKPOINT),
    **dict.fromkeys(("FSDP", "FullyShardedDataParallel"), _IN_PLACE),
    "communication_report": "is gone: events of composable_fsdp.trace.Recorder have the bytes of each group, with and "
    "without codecs",
    "CommunicationState": "is gone: leave it out, only the error of one step is lost",
    "tie_groups": "is gone: name the owner of the parameters, fully_shard(head, shared_from=[embedding])",
    "reload_optimizer": "is gone: load the state dict of the offloaded optimizer into a new one",
    "apply_to_full_params": "is gone: for each sharded module, change its parameters inside of "
    "unsharded_params(module, recurse=False)",
    "testing": "is gone: start ranks with torchrun or torch.multiprocessing.spawn",
    "summon_full_params": "is unsharded_params here: from composable_fsdp import unsharded_params",
}
"""The replacements of names that programs for other libraries, or earlier versions, import."""


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        import_module("composable_fsdp._attached")
        return _ON_FIRST_USE[name]
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    # An AttributeError would lose its text in ``from composable_fsdp import``.
    if name in _OTHER_NAMES:
        raise ImportError(f"{name} {_OTHER_NAMES[name].format(name)}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, "__version__"])
