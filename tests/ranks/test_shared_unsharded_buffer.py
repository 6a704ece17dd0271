"""Test one unsharded buffer per host, and shared shards that need none: same bits, no data race."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from composable_fsdp import CommunicationPolicy, MixedPrecisionPolicy, fully_shard, no_sync, to_empty
from composable_fsdp.codecs.blockwise import Int8
from composable_fsdp.errors import ParameterError
from tests._internals import SharedBucket, state_of
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.models import TASKS, Routed, Task, shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import buckets_of, expected_shard, local, sharded
from tests.helpers.transports import COPIES, IN_COMMON, SOCKETS

BF16, FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32), MixedPrecisionPolicy()
SHARED, OWNED, ALIASED = {"shared"}, {"owned"}, {"aliased"}
POLICIES = pytest.mark.parametrize("policy", [BF16, FP32], ids=["cast", "shards"])

Play = Callable[[nn.Module, Task, int], list[torch.Tensor]]


def storages(model: nn.Module) -> set[str]:
    """Return where full parameters are: in memory that ranks share, where shards or only casts are, or of this rank."""
    kinds = {True: "aliased", False: "shared"}
    found = set()
    for bucket in buckets_of(model):
        plan = bucket.plan
        found.add(kinds[plan.dtype == plan.compute_dtype] if isinstance(bucket, SharedBucket) else "owned")
    return found


def own_loss(model: nn.Module, task: Task, step: int) -> torch.Tensor:
    return task.loss(model, task.batch_of(step, dist.get_rank()))


@POLICIES
@on_ranks(2)
def test_an_all_gather_in_shared_memory_copies_nothing(policy: MixedPrecisionPolicy) -> None:
    task = TASKS["wide"]
    model = shard_layers(task.build(), fully_shard, mp_policy=policy)
    assert storages(model) == (SHARED if policy == BF16 else ALIASED)
    with counted_collectives() as counts:
        for step in range(2):
            own_loss(model, task, step).backward()
    assert counts["all_gather"] == 0
    assert counts["barrier"] > 0
    assert sum(bucket.unsharded_bytes for bucket in buckets_of(model)) == 0
    if policy == FP32:
        return
    (bucket,) = buckets_of(model.get_submodule("layers.0"))
    if dist.get_rank() == 0:
        bucket.parameter_data(0).view(-1)[:8].fill_(3)
    dist.barrier()
    assert bucket.parameter_data(0).view(-1)[:8].tolist() == [3] * 8, "all ranks must see one buffer"


def train_with_evaluations(model: nn.Module, task: Task, step: int) -> list[torch.Tensor]:
    loss = own_loss(model, task, step)
    loss.backward()
    with torch.no_grad():
        return [loss, own_loss(model, task, step + 50)]


def accumulate(model: nn.Module, task: Task, step: int) -> list[torch.Tensor]:
    with no_sync(model):
        first = own_loss(model, task, step)
        first.backward()
    losses = [own_loss(model, task, step + 50), own_loss(model, task, step + 70)]  # two forwards before a backward
    for loss in losses:
        loss.backward()
    return [first, *losses]


def change_before_backward(model: nn.Module, task: Task, step: int) -> list[torch.Tensor]:
    """Change shards after forward without a version check: backward gathers the changed values."""
    sharded(model).set_in_place_check("off")
    loss = own_loss(model, task, step)
    with torch.no_grad():
        for parameter in state_of(model.get_submodule("layers.1")).group.parameters:
            local(parameter.sharded).mul_(1.25)
    loss.backward()
    return [loss]


PLAYS: tuple[Play, ...] = (train_with_evaluations, accumulate, change_before_backward)


def losses_and_shards(
    name: str, reshard: bool | int | None, policy: MixedPrecisionPolicy = BF16
) -> dict[str, list[torch.Tensor]]:
    task, found = TASKS[name], dict[str, list[torch.Tensor]]()
    for play in PLAYS if policy == BF16 else PLAYS[:2]:  # other ranks may still read shards that are not cast
        model = task.build()
        if isinstance(model, Routed):
            model.route = [0, 1, 1, 3, 0, 2]  # some modules run twice in a forward
        shard_layers(model, fully_shard, mp_policy=policy, reshard_after_forward=reshard)
        parameters = list(model.parameters())  # parameters that are kept unsharded are other objects between steps
        optimizer = torch.optim.AdamW(parameters, lr=0.05, fused=play is accumulate)
        losses = []
        for step in range(2 if name == "wide" else 3):
            losses += [value.detach() for value in play(model, task, step)]
            optimizer.step()
            optimizer.zero_grad()
        shards = [local(parameter.detach()).clone() for parameter in parameters]
        found[play.__name__] = [*losses, *shards]
    return found


@pytest.mark.behaviour("C-01", "D-01")
@pytest.mark.parametrize(
    ("name", "world_size", "reshard", "policy"),
    [
        *(("transformer", 2, True, BF16), ("mlp", 4, False, BF16), ("routed", 4, 2, BF16)),
        *(("wide", 3, True, BF16), ("transformer", 2, True, FP32), ("transformer", 4, None, FP32)),
    ],
)
def test_training_over_shared_memory_is_bitwise_that_over_sockets_and_repeats(
    name: str, world_size: int, reshard: bool | int | None, policy: MixedPrecisionPolicy
) -> None:
    sockets, *others = (
        run_ranks(losses_and_shards, world_size, name, reshard, policy, environment=e)
        for e in (SOCKETS, COPIES, IN_COMMON, IN_COMMON)
    )
    for rank in range(world_size):
        for play, expected in sockets[rank].items():
            for other in others:
                for value, wanted in zip(other[rank][play], expected, strict=True):
                    torch.testing.assert_close(value, wanted, rtol=0, atol=0, msg=f"{play}, rank {rank}")


@on_ranks(2)
def test_no_rank_casts_while_another_still_reads() -> None:
    """Delay one rank, which still reads its cast parameters while the others gather changed shards."""
    task, rank = TASKS["chain"], dist.get_rank()
    reference = task.build()
    for index in (0, 1, 2):
        reference.get_submodule(f"layers.{index}").requires_grad_(False)
    model = shard_layers(copy.deepcopy(reference), fully_shard, mp_policy=BF16)

    def dawdle(*_: object) -> None:
        if rank == 1:
            time.sleep(0.1)

    def dawdle_in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(dawdle)

    model.get_submodule("layers.3").register_forward_pre_hook(dawdle)
    model.get_submodule("layers.2").register_forward_hook(dawdle_in_backward)
    inputs, target = task.batch_of(0, rank)
    inputs.requires_grad_()
    for step in range(6):
        with torch.set_grad_enabled(step % 3 > 0):
            loss = task.loss(model, (inputs, target))
            expected = task.loss(copy.deepcopy(reference).bfloat16(), (inputs.bfloat16(), target))
        torch.testing.assert_close(loss, expected, rtol=0, atol=0, msg=f"step {step}")
        if loss.requires_grad:
            (of_inputs,), (wanted,) = (torch.autograd.grad(each, inputs) for each in (loss, expected))
            torch.testing.assert_close(of_inputs, wanted, rtol=0, atol=0, msg=f"step {step}")
        with torch.no_grad():
            for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                local(parameter).mul_(-1.5)
                wanted.mul_(-1.5)


@POLICIES
@on_ranks(2)
def test_writing_to_unsharded_parameters_is_an_error(policy: MixedPrecisionPolicy) -> None:
    task = TASKS["chain"]
    model = shard_layers(task.build(), fully_shard, mp_policy=policy)
    before = own_loss(model, task, 0)
    before.backward()

    def clamp(module: nn.Module, *_: object) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.01, 0.01)  # type: ignore[operator]

    hook = model.get_submodule("layers.1").register_forward_pre_hook(clamp)
    message = (
        r"parameters \['.*weight'\] were changed in place while they were unsharded.*once for each rank that made it.*"
        r"unsharded_params\(writeback=True\).*COMPOSABLE_FSDP_SHARED_MEMORY=copy"
    )
    with pytest.raises(ParameterError, match=message):
        own_loss(model, task, 0)
    hook.remove()
    model.reset_iter_state()
    after = own_loss(model, task, 0)
    if policy == BF16:
        torch.testing.assert_close(after, before, rtol=0, atol=0, msg="the next forward casts anew")
    after.backward()


@pytest.mark.behaviour("A-12")
@POLICIES
@on_ranks(2)
def test_conversions_loads_and_copies_are_followed(policy: MixedPrecisionPolicy) -> None:
    task, rank, kind = TASKS["transformer"], dist.get_rank(), SHARED if policy == BF16 else ALIASED
    batch = task.batch_of(0, rank)

    def loss_of(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return task.loss(model, batch)

    expected = loss_of(shard_layers(task.build(), fully_shard, mp_policy=policy))
    with torch.device("meta"):
        model = task.build()
    shard_layers(model, fully_shard, mp_policy=policy)
    for _ in range(2):  # from the meta device, and a conversion to the same dtype, which keeps the memory
        to_empty(model, device="cpu")
        for parameter, value in zip(model.parameters(), task.build().parameters(), strict=True):
            local(parameter.detach()).copy_(expected_shard(value.detach(), rank, 2))
        torch.testing.assert_close(loss_of(model), expected, rtol=0, atol=0)
        assert storages(model) == kind
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    torch.testing.assert_close(loss_of(model), expected, rtol=0, atol=0)
    assert storages(model) == kind
    clone = copy.deepcopy(model)
    assert storages(clone) == OWNED, "a copy may exist on some ranks only, so it shares no memory"
    torch.testing.assert_close(loss_of(clone), expected, rtol=0, atol=0)
    model.to(torch.bfloat16 if policy == BF16 else torch.float64)
    torch.testing.assert_close(loss_of(model), expected)
    assert storages(model) == OWNED, "other ranks may still read the shared memory of the old dtype"
    own_loss(model, task, 0).backward()


@on_ranks(4)
def test_only_cast_parameters_have_a_shared_unsharded_buffer() -> None:
    task = TASKS["mlp"]
    columns, coded, plain = task.build(), task.build(), task.build()
    fully_shard(columns, shard_placement_fn=lambda p: Shard(p.ndim - 1), mp_policy=BF16)
    assert storages(columns) == OWNED, "columns of different ranks are not contiguous"
    fully_shard(coded, mp_policy=BF16, comm_policy=CommunicationPolicy(all_gather=Int8(), min_numel=0))
    assert storages(coded) == OWNED
    fully_shard(plain, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    assert storages(plain) == ALIASED, "parameters that are not cast need no copy"
    plain_columns = fully_shard(task.build(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    assert storages(plain_columns) == OWNED
    hybrid, plain_hybrid = task.build(), task.build()
    mesh = init_device_mesh("cpu", (2, 2))
    fully_shard(hybrid, mesh=mesh, mp_policy=BF16)
    assert storages(hybrid) == SHARED
    fully_shard(plain_hybrid, mesh=mesh)
    assert storages(plain_hybrid) == ALIASED
    alone = task.build()
    fully_shard(alone, mesh=init_device_mesh("cpu", (4, 1)), mp_policy=BF16)
    assert storages(alone) == OWNED, "the buffer of a single rank is freed between uses"
    for model in (columns, coded, plain, plain_columns, hybrid, plain_hybrid, alone):
        own_loss(model, task, 0).backward()


@pytest.mark.parametrize("transport", [COPIES, SOCKETS], ids=["copies", "sockets"])
@on_ranks(2, environment="transport")
def test_the_switch_keeps_a_buffer_on_every_rank() -> None:
    assert storages(shard_layers(TASKS["mlp"].build(), fully_shard, mp_policy=BF16)) == OWNED
