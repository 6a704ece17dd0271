"""Streams of changed values: equal to full streams on all kinds of meshes, and ranks that leave or fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable_fsdp import (
    PeerError,
    ShardPlacementResult,
    copy_params,
    fully_shard,
    stream_changed_params,
    stream_full_params,
)
from composable_fsdp.errors import ConfigurationError, DivergenceError, FlushError, ParameterError
from composable_fsdp.plugins.weight_stream import (
    Flush,
    JoinPart,
    Patch,
    Position,
    SentParams,
    WeightStream,
    apply_changes,
)
from tests._internals import BucketGather, ChangedBucket
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.experts import sharded_mixture
from tests.helpers.model_parallel import named_mesh
from tests.helpers.models import Chain, UnevenMLP, seeded, shard_layers
from tests.helpers.peak_memory import peak_of
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import full_value
from tests.helpers.transports import SOCKETS
from tests.simulation import BACKEND, simulated_accelerator


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class Receiver:
    """Plain tensors that get the flushes of a model as bytes, and are compared with full streams."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model, self.options, self.sent = model, options, SentParams()
        self.state: dict[str, torch.Tensor] = {}
        self.position: Position | None = None

    def full(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        options = {name: value for name, value in self.options.items() if name != "whole_above"}
        for bucket in stream_full_params(self.model, **options):
            found |= {name: tensor.clone() for name, tensor in bucket.items()}
            found |= {alias: found[name].clone() for alias, name in bucket.aliases.items()}
        return found

    def update(self) -> list[Flush]:
        """Apply a stream, check it, and return copies of its flushes."""
        full, flushes = self.full(), []
        if not self.state:
            self.state = {name: torch.full_like(tensor, 3) for name, tensor in full.items()}
        for flush in stream_changed_params(self.model, self.sent, **self.options):
            flushes.append(Flush.from_bytes(flush.to_bytes()))
            self.position = apply_changes(self.state, flushes[-1], self.position)
        assert self.position is not None
        assert self.position.is_complete
        for name, tensor in full.items():
            assert torch.equal(bits(self.state[name]), bits(tensor)), name
        for indices in (patch.indices for flush in flushes for patch in flush.patches()):
            assert indices is None or bool((indices.diff() > 0).all()), "indices ascend, so that each is sent once"
        return flushes


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate_up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.o(torch.sigmoid(self.q(h)) * self.k(h) + self.v(h))
        return x + self.down(nn.functional.silu(self.gate_up(x)))


class Llama(nn.Module):
    def __init__(self, width: int = 24, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(layers))
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[0].v.weight.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def llama_names(name: str) -> Any:
    """Join queries, keys and values, split gates, and rename the rest."""
    for index, part in enumerate("qkv"):
        if f".{part}." in name:
            return JoinPart(name.replace(f".{part}.", ".qkv."), index, 3)
    if "gate_up" in name:
        return {name.replace("gate_up", "gate"): 20, name.replace("gate_up", "none"): 0, name.replace("gate_", ""): 28}
    return f"model.{name}"


def sharded_model(kind: str) -> nn.Module:
    if kind == "experts":
        return sharded_mixture(named_mesh(edp=2, ep=2), Shard(1), torch.bfloat16)
    model = seeded(Llama)().bfloat16()
    if kind == "tensor parallel":
        mesh = named_mesh(dp=2, tp=2)
        plan = {name: ColwiseParallel() for name in ("q", "k", "v", "gate_up")}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {**plan, "o": RowwiseParallel(), "down": RowwiseParallel()})
        return shard_layers(model, fully_shard, mesh=mesh["dp"])
    shape = (2, 2) if kind == "hybrid" else (dist.get_world_size(),)
    return shard_layers(model, fully_shard, mesh=init_device_mesh("cpu", shape))


@pytest.mark.behaviour("C-14")
@pytest.mark.parametrize(("kind", "ranks"), [("plain", 4), ("hybrid", 4), ("tensor parallel", 4), ("experts", 4)])
@on_ranks("ranks", timeout=240)
def test_a_receiver_of_changes_has_the_bytes_of_a_full_stream(kind: str) -> None:
    model = sharded_model(kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    receiver = Receiver(model, bucket_bytes=3000, key_map=None if kind == "experts" else llama_names)
    torch.manual_seed(dist.get_rank())
    sparse = 0
    for step in range(40):
        if kind == "experts":
            loss = model(torch.randn(4, 5).bfloat16()).square().mean()
        else:
            loss = model(torch.randint(40, (2, 6))).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 8 == 7:
            sparse += sum(not flush.is_whole for flush in receiver.update())
    assert sparse >= 4
    if kind == "tensor parallel":
        mixed = {"embedding.weight": JoinPart("x", 0, 2), "layers.0.q.weight": JoinPart("x", 1, 2)}
        with pytest.raises(
            ParameterError, match=r"'x' is joined of parameters that are sharded over different axes, of"
        ):
            stream_changed_params(model, SentParams(), key_map=mixed.get)


class Stop(Exception):
    pass


def consume(receiver: Receiver, stop: int) -> int:
    """Apply flushes, and raise in flush ``stop``. Return their number."""
    count = 0
    for flush in stream_changed_params(receiver.model, receiver.sent, **receiver.options):
        count += 1
        if count == stop:
            raise Stop
        receiver.position = apply_changes(receiver.state, flush, receiver.position)
    return count


def change(model: nn.Module, dense: tuple[str, ...] = ()) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local: Any = parameter.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            local.view(-1)[:: 1 if name in dense else 40].add_(1)


@pytest.mark.behaviour("C-14")
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@on_ranks("shape", timeout=120)
def test_all_ranks_go_on_after_one_has_left_and_the_next_stream_is_whole(shape: tuple[int, ...]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = shard_layers(seeded(Chain)(), fully_shard, mesh=init_device_mesh("cpu", shape))
    receiver = Receiver(model, bucket_bytes=150, dtype=torch.bfloat16)
    total = len(receiver.update())
    assert total >= 4
    for stop in range(1, total + 1):
        change(model, ("layers.1.weight",))
        leaver = stop % size
        same = rank // shape[-1] == leaver // shape[-1]
        if rank == leaver:
            with pytest.raises(Stop):
                consume(receiver, stop)
        elif stop + 1 < total and same:
            match = rf"^rank {leaver} has left the loop over stream_changed_params before the end: bucket "
            with pytest.raises(PeerError, match=match):
                consume(receiver, 0)
        else:
            assert consume(receiver, 0) == total
        everything = receiver.update()
        assert {flush.is_whole for flush in everything} == {same}, "other replicas have lost nothing"
        change(model, ("layers.2.weight",))
        assert [flush.is_whole for flush in receiver.update()].count(True) == 1


def run_out_of_memory() -> None:
    """Fail on one rank in each of its comparisons, and in each copy of what is sent."""
    model = shard_layers(seeded(UnevenMLP)(), fully_shard, mesh=init_device_mesh("cpu", (2,)))
    receiver = Receiver(model, bucket_bytes=100)
    total = len(receiver.update())
    blocks, rank = ChangedBucket._new_blocks, dist.get_rank()
    for forgets in (False, True):
        for call in range(total):
            change(model)
            if forgets:
                receiver.sent.forget()
            calls = iter(range(99))

            def failing(*arguments: Any, calls: Any = calls, call: int = call) -> Iterator[torch.Tensor]:
                if rank == 1 and next(calls) == call:
                    raise torch.OutOfMemoryError("no memory")
                return blocks(*arguments)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ChangedBucket, "_new_blocks", failing)
                kind, match = (torch.OutOfMemoryError, "no memory") if rank else (PeerError, "^rank 1 ")
                with pytest.raises(kind, match=match):
                    consume(receiver, 0)
            receiver.update()
            change(model)
            receiver.update()


def fail_to_pack() -> None:
    """Fail on one rank where it writes its message, in each bucket of both streams. All can go on."""
    model = shard_layers(seeded(UnevenMLP)(), fully_shard, mesh=init_device_mesh("cpu", (2,)))
    plan, rank = WeightStream._gather, dist.get_rank()
    total = len(stream_full_params(model, 100))
    for changed in (False, True):
        receiver = Receiver(model, bucket_bytes=100)
        for call in range(total):
            calls = iter(range(99))

            def failing(stream: Any, number: int, calls: Any = calls, call: int = call) -> BucketGather:
                def pack(*arguments: Any) -> None:
                    if rank == 1 and next(calls) == call:
                        raise torch.OutOfMemoryError("no memory")
                    made(*arguments)

                gather = plan(stream, number)
                made = gather._plan.pack
                gather._plan = gather._plan._replace(pack=pack)
                return gather

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(WeightStream, "_gather", failing)
                # The other rank has ended before, if this one fails in what it makes of the last bucket.
                with pytest.raises(torch.OutOfMemoryError, match="no memory") if rank else suppress(PeerError):
                    consume(receiver, 0) if changed else list(stream_full_params(model, 100))
            receiver.update()
            receiver.sent.forget()


def ask_for_everything() -> None:
    """Check forgetting on one rank, a new sender, other arguments, a wrong one on one rank, and other models."""
    rank = dist.get_rank()
    model = shard_layers(seeded(UnevenMLP)(), fully_shard, mesh=init_device_mesh("cpu", (2,)))
    receiver = Receiver(model, bucket_bytes=100, whole_above=1)

    def sends_all() -> bool:
        change(model)
        (found,) = {flush.is_whole for flush in receiver.update()}
        return found

    assert sends_all()
    assert not sends_all()
    if rank == 1:
        receiver.sent.forget()
    assert sends_all()
    receiver.options["key_map"] = lambda name: name
    assert not sends_all()
    receiver.options["key_map"] = lambda name: "gain" if name == "scale" else name
    receiver.state["gain"] = receiver.state["scale"]
    assert sends_all()
    if rank == 0:
        receiver.sent = SentParams()  # a rank that has restarted
    assert sends_all()
    assert not sends_all()
    model.to(torch.bfloat16)
    receiver.state.clear()
    assert sends_all()
    kind, match = (
        (PeerError, "^rank 1 cannot stream") if rank == 0 else (ConfigurationError, "^stream_changed_params n")
    )
    with pytest.raises(kind, match=match):
        stream_changed_params(model, SentParams() if rank == 0 else None)  # type: ignore[arg-type]
    with pytest.raises(DivergenceError, match=r"^ranks call stream_changed_params for different models or with differ"):
        stream_changed_params(model, SentParams(), whole_above=(0.1, 0.2)[rank])
    change(model)  # ranks have noted values when they see that their arguments differ
    with pytest.raises(DivergenceError):
        stream_changed_params(model, receiver.sent, **{**receiver.options, "whole_above": (0.1, 0.2)[rank]})
    receiver.update()
    receiver.options["bucket_bytes"] = 200
    assert sends_all()
    assert not sends_all()


def first_rank_only() -> None:
    model = shard_layers(seeded(UnevenMLP)(), fully_shard, mesh=init_device_mesh("cpu", (2,)))
    sent, state, position = SentParams(), dict[str, torch.Tensor](), None
    for _ in range(3):
        change(model)
        full = Receiver(model, dtype=torch.float16).full()
        state = state or {name: torch.empty_like(value) for name, value in full.items()}
        for flush in stream_changed_params(model, sent, 100, torch.float16, rank0_only=True):
            if dist.get_rank() == 0:
                position = apply_changes(state, flush, position)
            else:
                with pytest.raises(FlushError, match=r"or this rank gets none \(rank0_only\)"):
                    flush.to_bytes()
        if dist.get_rank() == 0:
            assert all(torch.equal(state[name], value) for name, value in full.items())


@pytest.mark.behaviour("C-14")
@pytest.mark.parametrize("case", [run_out_of_memory, fail_to_pack, ask_for_everything, first_rank_only])
def test_failures_on_one_rank_and_reasons_to_send_everything(case: Callable[[], None]) -> None:
    run_ranks(case, 2, timeout=120)


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_a_flush_is_one_collective_and_memory_is_that_of_two_buckets_beside_the_copy() -> None:
    width, layers = 256, 12
    model = shard_layers(seeded(Chain, width=width, depth=layers)(), fully_shard, mesh=init_device_mesh("cpu", (2,)))
    layer_bytes, sent = (width * width + width) * 2, SentParams()

    def send() -> None:
        for _ in stream_changed_params(model, sent, 2 * layer_bytes, torch.bfloat16):
            pass

    send()
    assert sent.nbytes <= layers * (layer_bytes / 2 + 16)
    for dense, most in (
        ((), 1.2),
        (("layers.5.weight", "layers.6.weight"), 2.6),
        (tuple(dict(model.named_parameters())), 2.6),
    ):
        change(model, dense)
        with counted_collectives() as counts:
            send()
        assert counts["all_gather"] == layers // 2 + 1
        assert counts.total() == layers // 2 + 1 + counts["comparison"]
        change(model, dense)
        peak = peak_of(send)
        assert peak <= most * 2 * layer_bytes + (16 << 10), peak / (2 * layer_bytes)
    sent.forget()
    peak = peak_of(send)
    assert peak <= (2.6 * 2 + layers / 2) * layer_bytes + (16 << 10), peak / (2 * layer_bytes)


@pytest.mark.behaviour("C-14")
@on_ranks(2, environment=SOCKETS, timeout=120)
def test_a_stream_of_changes_has_no_races_on_a_device() -> None:
    mesh = DeviceMesh.from_group(dist.new_group(backend=BACKEND), "cpu")
    with simulated_accelerator() as device:
        model = seeded(UnevenMLP)()
        shard_layers(model, fully_shard, mesh=mesh)
        receiver = Receiver(model, bucket_bytes=100, dtype=torch.bfloat16)
        for dense in (), ("scale",), ("layers.1.weight",):
            receiver.update()
            change(model, dense)
            device.synchronize()
    assert [str(race) for race in device.races] == []


class Odd(nn.Module):
    """Parameters of many kinds: uneven, empty, scalar, of integers, in 1 to 4 dims."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        for k, shape in enumerate(shapes):
            self.register_parameter(f"p{k}", nn.Parameter(torch.randn(shape)))
        self.table = nn.Parameter(torch.arange(7), requires_grad=False)


def flip(tensors: list[torch.Tensor], density: float, generator: torch.Generator) -> None:
    """Set a share of the values to random bits: also NaN, infinities, zeros of both signs."""
    for tensor in tensors:
        value = tensor.detach()
        chosen = torch.rand(value.shape, generator=generator) < density
        if value.dtype == torch.int64:
            value.add_(chosen)
            continue
        new = torch.randint(-(1 << 31), 1 << 31, value.shape, generator=generator).to(torch.int32)
        special = torch.tensor([0.0, -0.0, float("nan"), float("inf")]).view(torch.int32)
        new = torch.where(new % 3 == 0, special[new % 4], new)
        value.view(torch.int32).copy_(torch.where(chosen, new, value.view(torch.int32)))


LAYOUTS = ["plain", "hybrid", "last dim", "column", "row", "same dim", "two meshes"]


def place(model: Odd, layout: str, mesh: DeviceMesh) -> nn.Module:
    ignored = {p for p in model.parameters() if p.ndim == 0}
    dims = {"column": -1, "row": 0, "same dim": 0}
    if layout in dims:
        for name, parameter in list(model.named_parameters()):
            if parameter.ndim > 1:
                placement = Shard(dims[layout] % parameter.ndim)
                model.register_parameter(
                    name, nn.Parameter(distribute_tensor(parameter.detach(), mesh["tp"], [placement]))
                )
    by_layout: dict[str, Any] = {
        "plain": {"mesh": mesh._flatten("all")},
        "hybrid": {"mesh": mesh},
        "last dim": {"mesh": mesh, "shard_placement_fn": lambda p: Shard(p.ndim - 1)},
        "row": {"mesh": mesh["dp"], "shard_placement_fn": lambda p: Shard(p.ndim - 1)},
    }
    if layout == "two meshes":
        by_layout[layout] = {
            "mesh": mesh["dp"],
            "shard_placement_fn": lambda p: ShardPlacementResult(Shard(0), mesh["tp"]) if p.ndim > 1 else None,
        }
    return fully_shard(model, ignored_params=ignored, **by_layout.get(layout, {"mesh": mesh["dp"]}))


SHAPES = st.lists(
    st.lists(st.integers(0, 7), max_size=4).filter(lambda s: prod(s) < 300).map(tuple), min_size=1, max_size=5
)


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_a_copy_of_changes_sends_everything_after_the_target_or_the_source_was_another() -> None:
    mesh, sent = init_device_mesh("cpu", (2,)), list[bool]()
    source, other = (shard_layers(seeded(Chain)(), fully_shard, mesh=mesh) for _ in range(2))
    target = seeded(Chain)()
    patches = Flush.patches

    def noted(flush: Flush) -> Iterator[Patch]:
        sent.append(flush.is_whole)
        return patches(flush)

    def copied(model: nn.Module) -> bool:
        sent.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Flush, "patches", noted)
            copy_params(model, target, changed=True)
        for name, value in model.named_parameters():
            assert torch.equal(full_value(value), target.get_parameter(name).detach()), name
        return all(sent)

    assert copied(source)
    change(source)
    assert not copied(source)
    with torch.no_grad():
        target.get_parameter("layers.0.weight").zero_()
    assert copied(source)
    assert not copied(source)
    old = target.get_parameter("layers.0.weight")
    target.layers[0].weight = new = nn.Parameter(torch.zeros_like(old))
    with torch.no_grad():
        while new._version < old._version:
            new.zero_()
    assert copied(source)
    change(other)
    assert copied(other)


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_copies_of_changes_of_any_dtype() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.bool, torch.complex64):
        source, target = nn.Module(), nn.Module()
        for model in (source, target):
            values = torch.zeros(16, 24, dtype=torch.uint8).view(dtype)
            model.weight = nn.Parameter(values, requires_grad=False)
        fully_shard(source, mesh=init_device_mesh("cpu", (2,)))
        local: Any = source.get_parameter("weight")
        expected = torch.zeros(16, 24, dtype=torch.uint8)
        for step in range(3):
            local.to_local().detach().view(torch.uint8)[step, ::8] = 1
            copy_params(source, target, changed=True)
            expected[[step, 8 + step], ::8] = 1
            assert torch.equal(bits(target.get_parameter("weight")), bits(expected)), (dtype, step)


def on_dim(dim: int) -> Callable[[nn.Parameter], Shard]:
    return lambda _: Shard(dim)


@pytest.mark.behaviour("C-14")
@on_ranks(2)
def test_a_model_of_the_same_names_and_sizes_on_other_dims_is_sent_whole() -> None:
    sent, state, position = SentParams(), {"weight": torch.ones(8, 8)}, None
    for dim in (0, 1, 0):
        model = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            model.weight.zero_()[4 * dim : 4 * dim + 4, :4] = dim
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=on_dim(dim))
        for flush in stream_changed_params(model, sent, whole_above=1):
            assert flush.is_whole
            position = apply_changes(state, flush, position)
        assert torch.equal(state["weight"], full_value(model.weight))


@pytest.mark.behaviour("C-14")
@on_ranks(4, timeout=300)
def test_any_layout_and_density_has_the_bytes_of_a_full_stream() -> None:
    mesh = named_mesh(dp=2, tp=2)

    @settings(
        max_examples=30,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        shapes=SHAPES,
        layout=st.sampled_from(LAYOUTS),
        densities=st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0]), min_size=1, max_size=3),
        bucket_bytes=st.sampled_from([1, 200, 1 << 20]),
        dtype=st.sampled_from([None, torch.bfloat16, torch.float16, torch.float8_e4m3fn]),
        whole_above=st.sampled_from([0.0, 0.25, 1.0]),
    )
    def check(shapes: Any, layout: str, densities: list[float], **options: Any) -> None:
        generator = torch.Generator().manual_seed(len(shapes))
        reference = Odd(shapes)
        flip(list(reference.parameters()), 1.0, generator)
        model = Odd(shapes)
        model.load_state_dict(reference.state_dict())
        place(model, layout, mesh)
        copied = place(Odd(shapes), LAYOUTS[LAYOUTS.index(layout) - 1], mesh)
        receiver = Receiver(model, **options)
        for density in (1.0, *densities):
            flip(list(reference.parameters()), density, generator)
            copy_params(reference, model)
            copy_params(model, copied, changed=True, bucket_bytes=options["bucket_bytes"])
            for name, value in copied.named_parameters():
                assert torch.equal(bits(full_value(value)), bits(reference.get_parameter(name))), name
            flushes = receiver.update()
            if density == 0:
                assert not any(patch.values.numel() for flush in flushes for patch in flush.patches())

    check()
