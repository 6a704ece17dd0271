"""Streams of full parameters in buckets, to programs that want whole weights."""

from composable_fsdp.plugins.weight_stream.packed_layout import PackedLayout
from composable_fsdp.plugins.weight_stream.stream import WeightBucket, WeightStream
from composable_fsdp.plugins.weight_stream.weight_names import JoinPart, PackedTensor

__all__ = ["JoinPart", "PackedLayout", "PackedTensor", "WeightBucket", "WeightStream"]
