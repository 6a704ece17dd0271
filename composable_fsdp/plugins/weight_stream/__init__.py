"""Streams of full parameters in buckets, and of those that changed, to programs that want whole weights."""

from typing import NoReturn

from composable_fsdp.plugins.weight_stream.changed_params import SentParams
from composable_fsdp.plugins.weight_stream.flush import Flush, Patch, Position, apply_changes
from composable_fsdp.plugins.weight_stream.packed_layout import PackedLayout
from composable_fsdp.plugins.weight_stream.stream import WeightBucket, WeightStream
from composable_fsdp.plugins.weight_stream.weight_names import JoinPart, PackedTensor

__all__ = [
    "Flush",
    "JoinPart",
    "PackedLayout",
    "PackedTensor",
    "Patch",
    "Position",
    "SentParams",
    "WeightBucket",
    "WeightStream",
    "apply_changes",
]


def __getattr__(name: str) -> NoReturn:
    from composable_fsdp._other_names import missing

    missing(__name__, name)
