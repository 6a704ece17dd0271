"""Fully sharded data parallel training for PyTorch, with the interface of torch's FSDP2.

Shard every block, then the whole::

    from composable_fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from composable_fsdp.api import fully_shard, register_fsdp_forward_method
from composable_fsdp.clip import clip_grad_norm_, get_total_norm
from composable_fsdp.codec.blockwise import Int4, Int8
from composable_fsdp.codec.cast import Cast
from composable_fsdp.codec.choice import CommunicationPolicy
from composable_fsdp.codec.feedback import ErrorFeedback
from composable_fsdp.codec.float8 import Float8
from composable_fsdp.communication import CommunicationReport, CommunicationRow, communication_report
from composable_fsdp.communication_state import CommunicationState
from composable_fsdp.describe import GroupDescription, ModelDescription, describe
from composable_fsdp.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    ConflictError,
    DeviceError,
    DivergenceError,
    ExtensionError,
    FSDPError,
    GradientError,
    LifecycleError,
    MeshError,
    ParameterError,
    PeerError,
    UnsupportedError,
)
from composable_fsdp.full_params import apply_to_full_params, unsharded_params
from composable_fsdp.initialize import initialize, to_empty
from composable_fsdp.mesh import OffloadBackendWarning
from composable_fsdp.module import FSDPModule, UnshardHandle, no_sync, share_comm_ctx
from composable_fsdp.nonfinite import find_nonfinite
from composable_fsdp.optim import local_optimizer
from composable_fsdp.policy import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from composable_fsdp.runtime.assemble import LowPrecisionWarning
from composable_fsdp.runtime.strangers import PlainParameterWarning
from composable_fsdp.runtime.tensor_classes import LostExtensionWarning
from composable_fsdp.sharded_rng import sharded_rng
from composable_fsdp.sharding import ShardPlacementResult
from composable_fsdp.strategy import ShardingStrategy
from composable_fsdp.tied import tie_groups

if TYPE_CHECKING:
    from composable_fsdp.checkpoint.ema import ShardedEMA, sharded_ema
    from composable_fsdp.checkpoint.rekey import rekey_optimizer
    from composable_fsdp.from_rank0 import shard_from_rank0

__all__ = [
    "ArgumentTypeError",
    "CPUOffloadPolicy",
    "Cast",
    "CheckpointError",
    "CommunicationPolicy",
    "CommunicationReport",
    "CommunicationRow",
    "CommunicationState",
    "ConfigurationError",
    "ConflictError",
    "DataParallelMeshDims",
    "DeviceError",
    "DivergenceError",
    "ErrorFeedback",
    "ExtensionError",
    "FSDPError",
    "FSDPModule",
    "Float8",
    "GradientError",
    "GroupDescription",
    "Int4",
    "Int8",
    "LifecycleError",
    "LostExtensionWarning",
    "LowPrecisionWarning",
    "MeshError",
    "MixedPrecisionPolicy",
    "ModelDescription",
    "OffloadBackendWarning",
    "OffloadPolicy",
    "ParameterError",
    "PeerError",
    "PlainParameterWarning",
    "ShardPlacementResult",
    "ShardedEMA",
    "ShardingStrategy",
    "UnshardHandle",
    "UnsupportedError",
    "apply_to_full_params",
    "clip_grad_norm_",
    "communication_report",
    "describe",
    "find_nonfinite",
    "fully_shard",
    "get_total_norm",
    "initialize",
    "local_optimizer",
    "no_sync",
    "register_fsdp_forward_method",
    "rekey_optimizer",
    "shard_from_rank0",
    "sharded_ema",
    "sharded_rng",
    "share_comm_ctx",
    "tie_groups",
    "to_empty",
    "unsharded_params",
]

__version__ = "0.1.0"

# With these comes torch.distributed.checkpoint, which takes long to import and is of no use to who needs none of them.
_WITH_CHECKPOINTS = {
    "ShardedEMA": "checkpoint.ema",
    "rekey_optimizer": "checkpoint.rekey",
    "shard_from_rank0": "from_rank0",
    "sharded_ema": "checkpoint.ema",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_CHECKPOINTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_CHECKPOINTS[name]}"), name)
