"""The variants of communication that ``quantized_text.py`` compares, and the bytes that each sends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import Cast, CommunicationPolicy, ErrorFeedback, Int4, Int8
from composable_fsdp.trace import Operation, Recorder

PLAIN = "fp32"  # the variant with which others are compared

# Variants with ``-ef`` encode parameters like the variants without it: parameters are sent again in each step.
VARIANTS = {
    PLAIN: CommunicationPolicy(),
    "bf16": CommunicationPolicy(all_gather=Cast(torch.bfloat16), reduce_scatter=Cast(torch.bfloat16)),
    "int8": CommunicationPolicy(all_gather=Int8(), reduce_scatter=Int8()),
    "int8-ef": CommunicationPolicy(all_gather=Int8(), reduce_scatter=ErrorFeedback(Int8())),
    "int4": CommunicationPolicy(all_gather=Int4(), reduce_scatter=Int4()),
    "int4-ef": CommunicationPolicy(all_gather=Int4(), reduce_scatter=ErrorFeedback(Int4())),
}


@dataclass(frozen=True, slots=True)
class WireBytes:
    """The bytes that one rank sends in one training step, and the bytes without codecs."""

    sent: int
    plain: int


def traffic_of(model: nn.Module, tokens: torch.Tensor) -> WireBytes:
    """Return the bytes that a rank of a sharded model sends in one training step, measured in one on ``tokens``."""
    with Recorder() as recorder:
        model(tokens).sum().backward()
    moved = [event for event in recorder if event.operation in (Operation.UNSHARD, Operation.REDUCE)]
    ranks = dist.get_world_size()
    sent, plain = sum(event.bytes for event in moved), sum(event.plain_bytes for event in moved)
    return WireBytes(sent * (ranks - 1) // ranks, plain * (ranks - 1) // ranks)
