"""Sharding of one dim over ranks."""

from __future__ import annotations

import re
from math import prod

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from composable_fsdp.errors import ParameterError
from tests._internals import ShardLayout, TensorShards, resolve_dim
from tests.helpers.layouts import tensor_shards


@given(st.integers(0, 200), st.integers(1, 17))
def test_the_ranges_of_all_ranks_in_order_tile_the_dim(length: int, n: int) -> None:
    assert [i for r in range(n) for i in ShardLayout(length, n).owned_by(r)] == list(range(length))


@given(st.integers(0, 200), st.integers(1, 17))
def test_the_cut_is_the_one_of_torch_chunk(length: int, n: int) -> None:
    chunks = [tuple(chunk.tolist()) for chunk in torch.arange(length).chunk(n)]
    chunks += [()] * (n - len(chunks))  # torch omits empty chunks
    assert [tuple(ShardLayout(length, n).owned_by(r)) for r in range(n)] == chunks


@given(tensor_shards())
def test_the_shards_of_all_ranks_are_the_chunks_of_the_tensor(shards: TensorShards) -> None:
    chunks = torch.empty(shards.shape).chunk(shards.num_shards, shards.dim)
    shapes = [shards.shard_shape(r) for r in range(shards.num_shards)]
    assert shapes[: len(chunks)] == [tuple(chunk.shape) for chunk in chunks]
    assert all(shape[shards.dim] == 0 for shape in shapes[len(chunks) :])
    assert sum(map(prod, shapes)) == shards.numel


@given(tensor_shards())
def test_contiguous_pieces_are_the_memory_of_the_tensor_plus_padding(shards: TensorShards) -> None:
    full = torch.arange(shards.numel).view(shards.shape)
    owned = [full.narrow(shards.dim, r.start, len(r)) for r in map(shards.layout.owned_by, range(shards.num_shards))]
    if shards.concatenates:
        assert torch.cat([piece.reshape(-1) for piece in owned]).tolist() == list(range(shards.numel))
        assert shards.full_numel == shards.num_shards * shards.padded_numel >= shards.numel
    else:
        assert shards.full_numel == shards.numel


@given(tensor_shards())
@example(TensorShards((1, 5), 1, 2))
def test_pieces_concatenate_only_if_all_dims_before_the_sharded_one_have_size_one(shards: TensorShards) -> None:
    assert shards.concatenates == all(length == 1 for length in shards.shape[: shards.dim])


def test_a_scalar_has_no_dim_and_the_error_names_the_remedy() -> None:
    message = (
        "parameter 'scale' is a scalar (0-d) and has no dim to shard. Make it 1-d with one element "
        "(for example nn.Parameter(value.reshape(1))), or pass it in ignored_params."
    )
    with pytest.raises(ParameterError, match=f"^{re.escape(message)}$"):
        resolve_dim(0, (), "scale")


@pytest.mark.parametrize("dim", [2, 5, -3])
def test_a_dim_that_the_parameter_lacks_is_named_with_the_range(dim: int) -> None:
    message = (
        f"parameter 'layers.0.weight' of shape (3, 4) has no dim {dim}: "
        "shard_placement_fn may return Shard(d) with -2 <= d < 2."
    )
    with pytest.raises(ParameterError, match=f"^{re.escape(message)}$"):
        resolve_dim(dim, (3, 4), "layers.0.weight")
