"""Compilation of codecs before the first collective, rather than inside a hook while other ranks wait in one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist

from composable_fsdp._core.gather import AnyBucket
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp.codecs._compiled import is_compiled
from composable_fsdp.codecs._encoder import CodecCall
from composable_fsdp.plugins.codecs.encoded_gather import EncodedBucket
from composable_fsdp.plugins.codecs.encoded_reduce import encoders_of

logger = logging.getLogger(__name__)


class CompiledCodecs(Observer):
    """Calls each codec that is compiled once with the sizes of each message, in the first forward of a root."""

    @torch.no_grad()  # as in hooks: the compiler makes other code where gradients are recorded
    def before_first_collective(self, root: ObservedRoot) -> None:
        buckets = [bucket for state in root.states.values() for bucket in state.group.buckets]
        found = dict.fromkeys((call, bucket.reducer.device) for bucket in buckets for call in _calls(bucket))
        calls = [(call, device) for call, device in found if call.numel and is_compiled(call.codec, device)]
        if calls and dist.get_rank() == 0:
            codecs = ", ".join(dict.fromkeys(repr(call.codec) for call, _ in calls))
            text = "%s: compiling %s before the first all-gather, which may take minutes"
            logger.warning(text, root.root_state.name, codecs)
        for call, device in calls:
            call.make(device)


def _calls(bucket: AnyBucket) -> Iterator[CodecCall]:
    """Yield the calls of codecs in an all-gather and a reduction of ``bucket``. Some may be equal."""
    if isinstance(bucket, EncodedBucket):
        yield from bucket.codec_calls()
    for stage, encoder in encoders_of(bucket).items():
        yield from encoder.calls(bucket.pgs.replicate.size if stage == "sums" else encoder.num_rows)
