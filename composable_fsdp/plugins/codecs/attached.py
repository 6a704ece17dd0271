"""Check that what ``comm_policy=`` asks for is attached: without its plugin, a codec would have no effect."""

from __future__ import annotations

from torch import nn

from composable_fsdp._core.group import GATHER_KINDS
from composable_fsdp._core.reduce import REDUCE_KINDS
from composable_fsdp.codecs.communication_policy import CommunicationFunction, CommunicationPolicy, communication_of
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.plugins.codecs.encoded_gather import EncodedParameters
from composable_fsdp.plugins.codecs.encoded_reduce import EncodedGradients


def attached_codecs_of(given: CommunicationPolicy | CommunicationFunction) -> CommunicationFunction:
    """Return the function from a parameter to its codecs that ``comm_policy=`` means; ``None`` for no codecs.

    It raises a ``ConfigurationError`` for a codec whose plugin is not attached.
    """
    chosen = communication_of(given)

    def of_parameter(parameter: nn.Parameter) -> CommunicationPolicy | None:
        policy = chosen(parameter)
        is_attached = any(issubclass(kind, EncodedParameters) for kind in GATHER_KINDS)
        if policy is not None and policy.all_gather is not None and not is_attached:
            raise _not_attached("all_gather", "EncodedParameters", "GATHER_KINDS")
        for name in ("reduce_scatter", "all_reduce"):
            is_attached = any(isinstance(kind, EncodedGradients) for kind in REDUCE_KINDS)
            if policy is not None and getattr(policy, name) is not None and not is_attached:
                raise _not_attached(name, "EncodedGradients()", "REDUCE_KINDS")
        return policy

    return of_parameter


def _not_attached(name: str, kind: str, seam: str) -> ConfigurationError:
    return ConfigurationError(
        f"comm_policy has a codec for {name}, but {kind} is not in composable_fsdp.plugins.{seam}, so that it would "
        f"have no effect. Put it there before fully_shard, or give CommunicationPolicy({name}=None)."
    )
