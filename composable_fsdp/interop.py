"""The one place that knows torch's own FSDP: what of it ours accepts, and what clients test against.

Clients check ``isinstance(module, torch.distributed.fsdp.FSDPModule)`` and silently drop features otherwise, so our
class inherits from that one. It inherits nothing else from it: a test walks the class and fails on any attribute that
resolves to torch's code.
"""

from __future__ import annotations

from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["TorchFSDPModule", "TorchUnshardHandle", "as_mixed_precision_policy", "as_offload_policy"]


def as_mixed_precision_policy(policy: object) -> MixedPrecisionPolicy:
    """Ours, or torch's as ours."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, TorchMixedPrecisionPolicy):
        return MixedPrecisionPolicy(
            policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
        )
    raise ConfigurationError(f"mp_policy must be a MixedPrecisionPolicy, not {type(policy).__name__}.")


def as_offload_policy(policy: object) -> OffloadPolicy:
    """Ours, or torch's as ours."""
    if isinstance(policy, OffloadPolicy):
        return policy
    if isinstance(policy, TorchCPUOffloadPolicy):
        return CPUOffloadPolicy(policy.pin_memory)
    if isinstance(policy, TorchOffloadPolicy):
        return OffloadPolicy()
    raise ConfigurationError(f"offload_policy must be an OffloadPolicy, not {type(policy).__name__}.")
