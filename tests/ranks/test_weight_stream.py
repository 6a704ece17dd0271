"""Streams of full parameters: values on all kinds of meshes, memory, collectives, and ranks that leave."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable_fsdp import (
    DivergenceError,
    MixedPrecisionPolicy,
    PeerError,
    copy_params,
    fully_shard,
    stream_changed_params,
    stream_full_params,
)
from composable_fsdp.errors import ConfigurationError, LifecycleError, ParameterError
from composable_fsdp.plugins.weight_stream import JoinPart, SentParams
from tests._internals import BucketGather
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.experts import MIXTURE, sharded_mixture
from tests.helpers.extension_tensors import Pair
from tests.helpers.model_parallel import named_mesh
from tests.helpers.models import TASKS, Chain, UnevenMLP, seeded, shard_layers
from tests.helpers.peak_memory import peak_of
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, full_value, train_and_compare, values_of
from tests.helpers.tensor_classes import Closed, inner_of, model_of

ROOT = Path(__file__).parents[2]


def streamed(model: nn.Module, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Return copies of all tensors of a stream. Check each bucket against its layout."""
    found: dict[str, torch.Tensor] = {}
    for bucket in stream_full_params(model, *args, **options):
        own = dict(bucket.items())
        assert bucket.packed is not None
        assert [name for name, _ in bucket.items()] == list(own), "a bucket may be read twice"
        for name, tensor in bucket.layout.unpack(bucket.packed).items():
            attribute = name.removeprefix("pair.weight.")  # an inner tensor
            assert_exact(getattr(own["pair.weight"], attribute) if attribute != name else own[name], tensor, name)
        assert not own.keys() & found.keys()
        found |= {name: tensor.clone() for name, tensor in own.items()}
    return found


def assert_streams(model: nn.Module, values: dict[str, torch.Tensor], **options: Any) -> None:
    for bucket_bytes in (1, 500, 1 << 20):
        found = streamed(model, bucket_bytes, **options)
        assert found.keys() == values.keys()
        for name, value in values.items():
            assert_exact(found[name], value, name)


def last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


@pytest.mark.behaviour("C-14")
@pytest.mark.parametrize(
    ("task", "shape", "options"),
    [
        ("mlp", (4,), {}),
        ("mlp", (1,), {}),
        ("mlp", (2, 2), {}),
        ("tied", (2,), {}),
        ("mlp", (2,), {"shard_placement_fn": last_dim}),
        ("adapters", (2,), {}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
@on_ranks("shape")
def test_a_stream_has_the_values_of_the_unsharded_model(
    task: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    reference = TASKS[task].build()
    model = shard_layers(TASKS[task].build(), fully_shard, mesh=init_device_mesh("cpu", shape), **options)
    values = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    assert_streams(model, values)
    other = TASKS[task].build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    shard_layers(other, fully_shard, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    copy_params(model, other, bucket_bytes=300)
    for name, value in values_of(other).items():
        assert_exact(value, dict(reference.named_parameters(remove_duplicate=False))[name].detach(), name)
    train_and_compare(model, reference, TASKS[task], steps=1)  # goes on as before


class Pairs(nn.Module):
    """Layers to parallelize, with sizes that 2 does not divide, between plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.randn(3))


def stream_tensor_parallel() -> None:
    mesh = named_mesh(dp=2, tp=2)
    model = nn.Module()
    for placement in (None, last_dim):
        model, reference = (seeded(Pairs)() for _ in range(2))
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=placement)
        values = {name: parameter.detach() for name, parameter in reference.named_parameters()}
        assert_streams(model, values)
        target = seeded(Pairs)().requires_grad_(False)
        for parameter in target.parameters():
            parameter.zero_()
        fully_shard(target, mesh=init_device_mesh("cpu", (4,)))
        copy_params(model, target)
        for name, value in values_of(target).items():
            assert_exact(value, values[name], name)
        for parameter in model.parameters():
            parameter.detach().to_local().zero_()
        copy_params(target, model)
        assert_streams(model, values)
    with counted_collectives() as counts:
        streamed(model)
    assert counts["all_gather"] == 2 * 2, "two axes, for the agreement and for one bucket"


def stream_experts() -> None:
    """Experts have a mesh of their own, which is cut on two axes."""
    model = sharded_mixture(named_mesh(edp=2, ep=2), Shard(1))
    assert_streams(model, {name: parameter.detach() for name, parameter in MIXTURE.build().named_parameters()})
    leave_on_one_rank(model, 300)


@pytest.mark.behaviour("C-14")
@pytest.mark.parametrize("case", [stream_tensor_parallel, stream_experts])
def test_tensor_parallel_parameters_and_experts_are_gathered_over_all_their_axes(case: Callable[[], None]) -> None:
    run_ranks(case, 4)


def cast_and_ignore() -> None:
    """Check casts, parameters that are not sharded, DTensors of the user, and dtypes that are never cast."""
    model: Any = seeded(UnevenMLP)()
    model.register_parameter("table", nn.Parameter(torch.arange(5), requires_grad=False))
    model.register_parameter("scalar", nn.Parameter(torch.tensor(3.0)))
    mesh = init_device_mesh("cpu", (2,))
    placed = nn.Parameter(distribute_tensor(torch.arange(15.0).view(3, 5), mesh, [Shard(1)]))
    model.register_parameter("placed", placed)
    values = {name: full_value(parameter) for name, parameter in model.named_parameters()}
    ignored = {model.get_parameter(name) for name in ("scalar", "placed", "layers.1.bias")}
    shard_layers(model, fully_shard, mesh=mesh, ignored_params=ignored)
    assert_streams(model, values)
    cast = {name: value.bfloat16() if value.is_floating_point() else value for name, value in values.items()}
    assert_streams(model, cast, dtype=torch.bfloat16)


def tied_names() -> None:
    model = shard_layers(TASKS["tied"].build(), fully_shard, mesh=init_device_mesh("cpu", (2,)))
    (bucket,) = (bucket.layout for bucket in stream_full_params(model))
    assert bucket.aliases == {"head.weight": "embedding.weight"}
    assert "embedding.weight" in {tensor.name for tensor in bucket.tensors}
    without = {"embedding.weight": None, "head.weight": "lm_head"}
    (bucket,) = (bucket.layout for bucket in stream_full_params(model, key_map=lambda name: without.get(name, name)))
    assert bucket.aliases == {}
    assert {"lm_head"} == {tensor.name for tensor in bucket.tensors} & {"lm_head", *without}
    with pytest.raises(ConfigurationError, match=r"names \['embedding.weight', 'head.weight'\] of a tied param.* Map"):
        stream_full_params(model, key_map=lambda name: JoinPart("both", name.startswith("head"), 2))


def empty_afterwards() -> None:
    """Check that tensors of a bucket are empty when the next one has come, and that the caller's views are not."""
    model = shard_layers(seeded(Chain)(), fully_shard, mesh=init_device_mesh("cpu", (2,)))
    values, flats = values_of(model), []
    kept: dict[str, torch.Tensor] = {}
    parts: dict[str, torch.Tensor] = {}
    with stream_full_params(model, 300) as stream:
        assert len(stream) == 4
        for bucket in stream:
            kept |= dict(bucket.items())
            parts |= {name: tensor[1:] for name, tensor in bucket.items()}
            flats.append(bucket.packed)
    assert {tensor.shape for tensor in (*kept.values(), *flats) if tensor is not None} == {(0,)}
    for name, part in parts.items():
        assert_exact(part, values[name][1:], name)
    assert list(bucket.items()) == []


def in_a_step() -> None:
    model = shard_layers(seeded(Chain)(), fully_shard, mesh=init_device_mesh("cpu", (2,)))
    model.layers[1].register_forward_hook(lambda *_: stream_full_params(model))
    with pytest.raises(LifecycleError, match=r"^stream_full_params was called during a forward that .*Call it before"):
        model(torch.ones(1, 8))


@pytest.mark.behaviour("C-14")
@pytest.mark.parametrize("case", [cast_and_ignore, tied_names, empty_afterwards, in_a_step])
def test_casts_ties_and_the_life_of_a_bucket(case: Callable[[], None]) -> None:
    run_ranks(case, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        self.up_gate = nn.Linear(6, 10, bias=False)


@pytest.mark.behaviour("C-14")
@on_ranks(2, 4)
def test_a_key_map_renames_joins_and_splits() -> None:
    model, plain = seeded(Attention)(), Attention()
    plain.load_state_dict(model.state_dict())
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def key_map(name: str) -> Any:
        layer, _, kind = name.partition(".")
        if layer == "up_gate":
            return {"up": 4, "gate": 6}
        return JoinPart(f"qkv.{kind}", "qkv".index(layer), 3) if layer in "qkv" else f"new.{name}"

    values = {
        f"qkv.{kind}": torch.cat([plain.get_parameter(f"{part}.{kind}").detach() for part in "qkv"])
        for kind in ("weight", "bias")
    }
    values |= dict(zip(("up", "gate"), plain.up_gate.weight.detach().split([4, 6]), strict=True))
    assert_streams(model, values, key_map=key_map)
    assert_streams(model, {"k": plain.k.bias.detach()}, key_map=lambda name: "k" if name == "k.bias" else None)
    pieces = dict(zip("abc", plain.k.bias.detach().split([1, 0, 1]), strict=True))
    assert_streams(model, pieces, key_map={"k.bias": {"a": 1, "b": 0, "c": 1}}.get)


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_errors_are_the_same_on_all_ranks_and_nothing_is_sent() -> None:
    model = fully_shard(seeded(Attention)(), mesh=init_device_mesh("cpu", (2,)))
    for options, match in (
        ({"bucket_bytes": 0}, r"^bucket_bytes is a number of bytes of at least 1, not 0\.$"),
        ({"dtype": torch.int8}, r"^dtype is a dtype of floating point or None, not torch\.int8\.$"),
        ({"key_map": {"a": "b"}}, r"^key_map must be a function of a name, such as names.get, not dict\.$"),
        ({"key_map": lambda name: 3}, r"^key_map\('q\.weight'\) is of type int\. Return a name, None"),
        (
            {"key_map": lambda name: "same"},
            r"^the stream would have two tensors called 'same', or one that lacks",
        ),
        (
            {"key_map": {"q.weight": {"a": 1, "b": 2}}.get},
            r"^key_map splits 'q\.weight' of shape \(6, 6\) into \{'a': 1, 'b': 2\}: these are not its rows\.$",
        ),
        (
            {"key_map": {"k.weight": {"a": 1, "b": 1}, "q.bias": "b"}.get},
            r"^the stream would have two tensors called 'b'",
        ),
        (
            {"key_map": {"q.weight": JoinPart("x", 0, 2)}.get},
            r"two tensors called 'x', or .* gives it \[\('q\.weight', 0, 2\)\]: names, indices, counts\.$",
        ),
        ({"key_map": {"q.weight": JoinPart("x", 2, 2), "q.bias": JoinPart("x", 0, 2)}.get}, r"\('q\.weight', 2, 2\)"),
        (
            {"key_map": {"q.weight": JoinPart("x", 0, 2), "q.bias": JoinPart("x", 1, 2)}.get},
            r"^parts of 'x' differ in dtype or in dims after the first: .*\(6, 6\)",
        ),
    ):
        with pytest.raises(ConfigurationError, match=match):
            stream_full_params(model, **options)
    rank = dist.get_rank()
    kind, match = (
        (PeerError, r"^rank 1 cannot stream the parameters of the model: look at its output")
        if rank == 0
        else (ConfigurationError, r"^key_map must be")
    )
    with pytest.raises(kind, match=match):  # on one rank only
        stream_full_params(model, key_map=3 if rank else None)  # type: ignore[arg-type]
    for options, wrong in ({"bucket_bytes": 0}, "bucket_bytes is"), ({"dtype": torch.int8}, "dtype is"):
        kind, match = (ConfigurationError, f"^{wrong}") if rank else (PeerError, "^rank 1 cannot stream")
        with pytest.raises(kind, match=match):  # on one rank only
            stream_full_params(model, **(options if rank else {}))
    same_sizes: list[dict[str, Any]] = [
        {"dtype": (torch.bfloat16, torch.float16)[rank]},
        {"key_map": lambda name: None if name == ("k.weight", "v.weight")[rank] else name},
        {"bucket_bytes": (100, 1000)[rank]},
    ]
    for options in same_sizes:
        with pytest.raises(DivergenceError, match=r"^ranks call stream_full_params for different models or with diff"):
            stream_full_params(model, **options)
    with torch.device("meta"):
        on_meta = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ParameterError, match=r"^these parameters are on the meta device .*: \['weight', 'bias'\]"):
        stream_full_params(on_meta)
    with pytest.raises(ParameterError, match=r"^copy_params needs models with the same parameters: .* only in the sou"):
        copy_params(model, on_meta)
    plain = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ParameterError, match=r": bias of the target is on the meta device; weight of the target"):
        copy_params(plain, on_meta)
    two, tied = (nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)}) for _ in "ab")
    tied["b"].weight = tied["a"].weight
    with pytest.raises(ParameterError, match=r": a.weight and b.weight are one parameter in the target and two in the"):
        copy_params(two, tied)
    closed = nn.Module()
    closed.weight = nn.Parameter(Closed(torch.ones(2)), requires_grad=False)
    with pytest.raises(ParameterError, match=r"^parameter 'weight' is a Closed, a class .* needs __tensor_flatten__, "):
        stream_full_params(closed)
    pair = model_of(["pair"], 0)
    with pytest.raises(
        ParameterError, match=r"^parameter 'pair.weight' is a Pair, .*: it can be neither joined nor spl"
    ):
        stream_full_params(pair, key_map=lambda name: {"a": 2, "b": 4} if "weight" in name else None)
    with pytest.raises(
        ParameterError, match=r"^parameter 'pair.weight' is of a class that wraps other tensors, of whi"
    ):
        stream_changed_params(pair, SentParams())
    assert len(streamed(model)) == 7


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_tensor_subclasses_are_gathered_by_their_class_and_packed_as_inner_tensors() -> None:
    kinds = ["pair", "tagged"]
    model, reference = model_of(kinds, 0), model_of(kinds, 0)
    for module in model.children():
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    names, found, kept = [], {}, list[torch.Tensor]()
    for bucket in stream_full_params(model, 1, dtype=torch.bfloat16):
        names += [tensor.name for tensor in bucket.layout.tensors]
        for name, tensor in bucket.items():
            found[name] = {inner: value.clone() for inner, value in inner_of(tensor).items()}
            assert type(tensor) is (Pair if name == "pair.weight" else torch.Tensor)
            kept += [tensor.left, tensor.right] if isinstance(tensor, Pair) else [tensor]
    assert names == ["pair.bias", "tagged.weight", "tagged.bias", "pair.weight.left", "pair.weight.right"]
    assert {tensor.shape for tensor in kept} == {(0,)}
    for inner, value in inner_of(reference.get_parameter("pair.weight")).items():
        assert_exact(found["pair.weight"][inner], value, inner)
    tagged = inner_of(reference.get_parameter("tagged.weight"))["values"]
    assert_exact(found["tagged.weight"]["values"], tagged.bfloat16(), "tagged")
    leave_on_one_rank(model, 1)


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_tensor_subclasses_with_values_of_their_own_are_streamed_as_plain_tensors() -> None:
    model, reference = model_of(["tagged"], 0), model_of(["tagged"], 0)
    fully_shard(model.get_submodule("tagged"), mesh=init_device_mesh("cpu", (2,)))
    found = streamed(model, dtype=torch.bfloat16)
    for name, value in reference.named_parameters():
        assert_exact(found[name], inner_of(value).get("values", value).detach().bfloat16(), name)


class Stop(Exception):
    pass


def consume(model: nn.Module, bucket_bytes: int, stop: int) -> int:
    count = 0
    for _ in stream_full_params(model, bucket_bytes):
        count += 1
        if count == stop:
            raise Stop
    return count


def leave_on_one_rank(model: nn.Module, bucket_bytes: int, replica: int = 4) -> None:
    """Check that all ranks go on after one has raised in any bucket, or after all have in different ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = streamed(model)
    total = consume(model, bucket_bytes, 0)
    assert total >= 4
    for stop in range(1, total + 1):
        leaver = stop % size
        if rank == leaver:
            with pytest.raises(Stop):
                consume(model, bucket_bytes, stop)
        elif stop + 1 < total and rank // replica == leaver // replica:
            match = rf"^rank {leaver} has left the loop over stream_full_params before the end: bucket "
            with pytest.raises(PeerError, match=match) as caught:
                consume(model, bucket_bytes, 0)
            assert caught.value.ranks == (leaver,)
        else:
            assert consume(model, bucket_bytes, 0) == total, "it left too late to be noticed"
        for name, value in streamed(model).items():
            for inner, each in inner_of(value).items():
                assert_exact(each, inner_of(expected[name])[inner], name)
    with pytest.raises((Stop, PeerError)):
        consume(model, bucket_bytes, 1 + rank)
    buckets = []
    for bucket in stream_full_params(model, bucket_bytes):
        buckets.append(bucket)
        break
    assert list(buckets[0].items()) == []
    dist.barrier()


@pytest.mark.behaviour("C-14")
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@on_ranks("shape", timeout=120)
def test_all_ranks_go_on_after_a_consumer_has_raised_on_one(shape: tuple[int, ...]) -> None:
    task = TASKS["mlp"]
    model = shard_layers(task.build(), fully_shard, mesh=init_device_mesh("cpu", shape))
    leave_on_one_rank(model, 100, shape[-1])
    train_and_compare(model, task.build(), task, steps=2)


def read_inside_of_an_unsharded_parent() -> None:
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    build = seeded(Chain, width=6, depth=2)
    parent = fully_shard(build(), mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    child = parent.get_submodule("layers.0")
    parent(torch.ones(2, 6))  # leaves the parameters unsharded, in bf16
    values = {name: value.detach() for name, value in build().get_submodule("layers.0").named_parameters()}
    assert_streams(child, values)
    parent(torch.ones(2, 6))
    source = build()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(2)
    copy_params(fully_shard(source.get_submodule("layers.0"), mesh=mesh), child)
    parent.reshard()
    for name, value in values.items():
        assert_exact(full_value(child.get_parameter(name)), value * 2, name)


def read_in_inference_mode() -> None:
    model = shard_layers(seeded(UnevenMLP)(), fully_shard, mesh=init_device_mesh("cpu", (2,)))
    values = {name: value.detach() for name, value in seeded(UnevenMLP)().named_parameters()}
    read = torch.inference_mode()(lambda bucket: {name: tensor.clone() for name, tensor in bucket.items()})
    found: dict[str, torch.Tensor] = {}
    for bucket in stream_full_params(model, 100):
        found |= read(bucket)
    for name, value in values.items():
        assert_exact(found[name], value, name)

    def leave_in_inference_mode() -> None:
        with stream_full_params(model, 100) as stream, torch.inference_mode():
            for bucket in stream:
                read(bucket)
                if dist.get_rank() == 0:
                    raise Stop

    with pytest.raises((Stop, PeerError)):
        leave_in_inference_mode()
    assert_streams(model, values)


def run_out_of_memory() -> None:
    model = shard_layers(seeded(UnevenMLP)(), fully_shard, mesh=init_device_mesh("cpu", (2,)))
    rank, unpack, calls = dist.get_rank(), BucketGather.unpack, iter(range(9))

    def failing(gather: Any) -> torch.Tensor:
        if rank == 1 and next(calls) == 1:
            raise torch.OutOfMemoryError("no memory for the second bucket")
        return unpack(gather)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketGather, "unpack", failing)
        kind, match = (torch.OutOfMemoryError, "second bucket") if rank else (PeerError, "^rank 1")
        with pytest.raises(kind, match=match):
            streamed(model, 100)
    assert_streams(model, {name: value.detach() for name, value in seeded(UnevenMLP)().named_parameters()})


@pytest.mark.behaviour("C-14")
@pytest.mark.parametrize("case", [read_inside_of_an_unsharded_parent, read_in_inference_mode, run_out_of_memory])
def test_parents_inference_mode_and_a_rank_without_memory(case: Callable[[], None]) -> None:
    run_ranks(case, 2, timeout=120)


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_a_bucket_is_one_collective_and_memory_is_that_of_the_buckets() -> None:
    width, layers = 256, 12
    model = shard_layers(seeded(Chain, width=width, depth=layers)(), fully_shard, mesh=init_device_mesh("cpu", (2,)))
    layer_bytes = (width * width + width) * 4
    for bucket_bytes, buckets in ((2 * layer_bytes, 6), (layer_bytes * layers, 1)):
        streamed(model, bucket_bytes)
        with counted_collectives() as counts:
            assert sum(1 for _ in stream_full_params(model, bucket_bytes)) == buckets
        assert counts["all_gather"] == buckets + 1
        assert counts.total() == buckets + 1 + counts["comparison"]

    def read() -> None:
        for bucket in stream_full_params(model, 2 * layer_bytes):
            for tensor in dict(bucket.items()).values():
                tensor.view(-1)[0].item()

    read()  # The transport maps its segments at the first use, and keeps them.
    peak = peak_of(read)
    assert 2 * 2 * layer_bytes <= peak <= 2 * 2 * layer_bytes + (16 << 10), peak / (2 * layer_bytes)
    model = shard_layers(
        seeded(Chain, width=width, depth=layers)(),
        fully_shard,
        mesh=init_device_mesh("cpu", (2,)),
        shard_placement_fn=last_dim,
    )

    def read_weights() -> None:
        for bucket in stream_full_params(model, layer_bytes):
            for tensor in dict(bucket.items()).values():
                tensor.view(-1)[0].item()

    assert peak_of(read_weights) <= 2 * layer_bytes + (16 << 10)


RECEIVER = """
import pickle, sys, torch
total = {}
while (header := sys.stdin.buffer.read(8)):
    layout = pickle.loads(sys.stdin.buffer.read(int.from_bytes(header, "little")))
    packed = torch.frombuffer(bytearray(sys.stdin.buffer.read(layout.nbytes)), dtype=torch.uint8)
    total |= {name: [tensor.dtype, tensor.double().sum().item()] for name, tensor in layout.unpack(packed).items()}
    total |= {alias: total[name] for alias, name in layout.aliases.items()}
sys.stdout.buffer.write(pickle.dumps(total))
"""


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_another_process_reads_packed_buckets_by_their_layouts() -> None:
    task = TASKS["tied"]
    model = shard_layers(task.build(), fully_shard, mesh=init_device_mesh("cpu", (2,)))
    sent = io.BytesIO()
    for bucket in stream_full_params(model, 1000, dtype=torch.bfloat16, rank0_only=True):
        if bucket.packed is not None:
            layout = pickle.dumps(bucket.layout)
            sent.write(len(layout).to_bytes(8, "little") + layout + bucket.packed.numpy().tobytes())
    if dist.get_rank() == 0:
        done = subprocess.run(
            [sys.executable, "-c", RECEIVER],
            input=sent.getvalue(),
            stdout=subprocess.PIPE,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        found = pickle.loads(done.stdout)
        expected = dict(task.build().named_parameters(remove_duplicate=False))
        assert found.keys() == expected.keys()
        for name, (dtype, total) in found.items():
            assert dtype == torch.bfloat16
            assert total == pytest.approx(expected[name].bfloat16().double().sum().item()), name
