"""Test encoded parameters: the values that every rank computes with, and the number of bytes sent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from composable_fsdp import Cast, CommunicationPolicy, Float8, Int4, Int8, MixedPrecisionPolicy, fully_shard
from composable_fsdp.errors import ConfigurationError
from tests._internals import state_of
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import SOCKETS

CODECS = (Int8(), Int8(block=7), Int4(), Float8(), Float8(block=64), Cast(), Cast(torch.float16))


def build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 5))


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def decode_by_rank(codec: Any, weight: torch.Tensor, num_shards: int, dim: int) -> torch.Tensor:
    """Encode and decode each rank's rows separately in fp32, padded to the size of the first rank's rows."""
    pieces = torch.chunk(weight, num_shards, dim)
    length = pieces[0].numel()
    rows = torch.zeros(num_shards, -(-length // 4) * 4)
    for rank, piece in enumerate(pieces):
        rows[rank, : piece.numel()] = piece.reshape(-1)
    out = codec.decode(codec.encode(rows), rows.size(1))
    return torch.cat([out[r, : p.numel()].view(p.shape) for r, p in enumerate(pieces)], dim)


def compare(codec: Any, dim: int, param_dtype: torch.dtype | None, reshard: bool | int | None) -> None:
    rank, num_shards = dist.get_rank(), dist.get_world_size()
    reference = build()
    model: Any = copy.deepcopy(reference)
    options: dict[str, Any] = {
        "comm_policy": CommunicationPolicy(all_gather=codec, min_numel=100),
        "shard_placement_fn": lambda p: Shard(dim if p.ndim == 2 else 0),
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype),
        "reshard_after_forward": reshard,
    }
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for layer in (0, 2):
        weight = reference.get_parameter(f"{layer}.weight").data
        sent = weight if param_dtype is None else weight.to(param_dtype).float()
        weight.copy_(decode_by_rank(codec, sent, num_shards, dim))
    if param_dtype is not None:
        reference.to(param_dtype)
    x = batch_of(rank)
    torch.testing.assert_close(model(x), reference(x.to(param_dtype or x.dtype)), rtol=0, atol=0)
    model(x).float().square().mean().backward()
    for step in range(2):  # all-gathers from the smaller mesh, twice
        loss = model(batch_of(rank + step)).float().square().mean()
        loss.backward()
        assert loss.isfinite()


@pytest.mark.behaviour("E-08")
@on_ranks(4)
def test_every_rank_computes_with_decoded_values() -> None:
    for codec in CODECS:
        compare(codec, 0, None, None)
    compare(Int8(), 1, None, True)
    compare(Int4(), -1, torch.bfloat16, False)


@pytest.mark.behaviour("E-08", "E-07")
@on_ranks(2, 4, environment=SOCKETS)
def test_the_codec_determines_the_bytes_sent_and_small_parameters_are_not_encoded() -> None:
    model: Any = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 3))
    fully_shard(model, comm_policy=CommunicationPolicy(all_gather=Int8(block=256), min_numel=1000))
    group = state_of(model).group
    sent: list[int] = []
    original = group.process_groups[0].gather.launch

    def counting(kind: Any, transfers: Any, label: str = "", *op: Any) -> Any:
        if not label.startswith("comparison of"):
            sent.extend(transfer.input.nbytes for transfer in transfers)
        return original(kind, transfers, label, *op)

    group.process_groups[0].gather.launch = counting  # type: ignore[assignment,method-assign]
    model.unshard()
    world_size = dist.get_world_size()
    encoded = Int8(block=256).payload_bytes(64 * 96 // world_size)
    rows_of_head = -(-3 // world_size)
    plain = 4 * (96 // world_size + 96 * rows_of_head + rows_of_head)  # the two biases and the weight of the head
    if world_size == 2:
        plain += 8  # to a boundary of 16 bytes, which adds less than 1/64
    assert sent == [-(-encoded // 16) * 16 + -(-plain // 16) * 16]
    encoded_bucket = next(b for b in group.plan.buckets if b.gather_claim is not None)
    assert encoded_bucket.wire_bytes == world_size * 4 * encoded_bucket.gather.packed_numel, (
        "wire_bytes is the size without codecs"
    )
    assert [b.sent_bytes() for b in group.buckets] == [([(encoded, 1)], 0), ([(plain, 4)], 0)]


@pytest.mark.behaviour("E-08")
@on_ranks(2)
def test_small_parameters_are_not_encoded_and_nonsense_is_refused() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, comm_policy=CommunicationPolicy(all_gather=Int8(), min_numel=9))
    claims = [bucket.gather_claim for bucket in state_of(model).group.plan.buckets]
    assert [claim and claim.key for claim in claims] == [(Int8(), ""), None]
    for nonsense in (Int8(), "int8", lambda p: None):
        with pytest.raises(ConfigurationError, match=r"^comm_policy must be a CommunicationPolicy, not "):
            fully_shard(nn.Linear(2, 2), comm_policy=nonsense)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError, match=r"all_gather=\.\.\.\) takes a codec, with methods payload_bytes, encode"
    ):
        CommunicationPolicy(all_gather="int8")  # type: ignore[arg-type]
