"""Test parameters used by modules of several groups: shared by their owner, or an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import fully_shard
from composable_fsdp.errors import LifecycleError, ParameterError
from composable_fsdp.trace import Operation, Recorder
from tests._internals import state_of
from tests.helpers.assert_trace import assert_trace, ledger
from tests.helpers.models import TASKS, Transformer, seeded
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.training import OPTIMIZERS, check_parity, play_task
from tests.helpers.transports import SOCKETS

SHOWN = (Operation.UNSHARD, Operation.WAIT, Operation.RESHARD, Operation.REDUCE)


def tied_transformer() -> Transformer:
    model = TASKS["tied"].build()
    assert isinstance(model, Transformer)
    return model


def shard_with_embedding_as_owner(model: Any, **options: Any) -> nn.Module:
    """Shard the head in a group whose only own parameters are the norm's and a bias, if the head has one."""
    fully_shard(model.embedding, **options)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard([model.norm, model.head], shared_from=[model.embedding], **options)
    return fully_shard(model, **options)


def shard_with_head_as_owner(model: Any, **options: Any) -> nn.Module:
    """Make the head, which runs last, the owner of the weight. The embedding runs first and uses it."""
    fully_shard(model.head, **options)
    fully_shard(model.embedding, shared_from=[model.head], **options)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def tie_when_sharded(model: Any, *, head: bool, **options: Any) -> nn.Module:
    """Tie the weights after sharding, as transformers does after loading a checkpoint.

    With ``head``, the head has a group of its own, which is then empty.
    """
    model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))
    for module in (model.embedding, *model.layers, *([model.head] if head else [])):
        fully_shard(module, **options)
    fully_shard(model, **options)
    model.head.weight = model.embedding.weight
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], str, Callable[..., nn.Module]]] = {
    "embedding to head": (tied_transformer, "tied", shard_with_embedding_as_owner),
    "head to embedding": (tied_transformer, "tied", shard_with_head_as_owner),
    "tied when sharded": (tied_transformer, "tied", partial(tie_when_sharded, head=True)),
    "tied when sharded, in the root": (tied_transformer, "tied", partial(tie_when_sharded, head=False)),
}


@pytest.mark.behaviour("A-10")
@pytest.mark.parametrize(("world_size", "reshard"), [(2, True), (2, False), (2, None), (4, 2)])
@on_ranks("world_size")
def test_a_parameter_used_by_other_groups_trains_like_a_tied_one(reshard: bool | int | None) -> None:
    for what, (build, task, shard) in CASES.items():
        for optimizer in ("sgd", "adamw-fused"):
            with Recorder() as recorder:
                model = check_parity(
                    build,
                    play_task(task),
                    OPTIMIZERS[optimizer],
                    shard=partial(shard, reshard_after_forward=reshard),
                    what=f"{what}, {optimizer}",
                )
            assert ledger(recorder) == {}, what
            assert len(list(model.parameters())) == len(list(build().parameters())), "shared parameters stay shared"


def trace_a_shared_parameter() -> None:
    """Check that the owner is unsharded with the user and that its gradient is reduced once, after both backwards."""
    task, rank = TASKS["tied"], dist.get_rank()
    model = shard_with_embedding_as_owner(tied_transformer())
    model.set_schedule(max_fused_bytes=0)  # type: ignore[operator]
    forward, backward = Recorder(), Recorder()
    for step in range(2):
        with forward if step else Recorder():
            loss = task.loss(model, task.batch_of(0, rank))
        with backward if step else Recorder():
            loss.backward()
    shown = [str(e) for e in forward if e.group == "embedding" and e.operation in SHOWN]
    assert shown == [f"{what} embedding" for what in ("unshard", "wait", "reshard")] * 2
    assert_trace(
        (e for e in backward if e.operation is Operation.REDUCE),
        "reduce norm, head; reduce layers.1; reduce layers.0; reduce embedding",
    )


def check_identity_of_a_shared_parameter() -> None:
    model: Any = shard_with_embedding_as_owner(tied_transformer())
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.head.weight, DTensor)
    assert state_of(model.head).group.parameters  # the parameters of the norm
    assert [p.name for p in state_of(model.embedding).group.parameters] == ["weight"]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.testing.assert_close(state["head.weight"].to_local(), state["embedding.weight"].to_local())
    state["head.weight"].to_local().fill_(2.0)
    state["embedding.weight"].to_local().fill_(2.0)
    model.load_state_dict(state)
    assert model.head.weight is model.embedding.weight
    model.to(torch.float64)
    assert model.head.weight is model.embedding.weight
    task = TASKS["tied"]
    tokens, targets = task.batch_of(0, dist.get_rank())
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert loss.dtype is torch.float64
    loss.backward()
    assert isinstance(model.head.weight.grad, DTensor)
    assert state_of(model.embedding).is_in_use is False


@pytest.mark.behaviour("A-10")
def test_a_shared_parameter_is_unsharded_with_every_group_that_uses_it() -> None:
    run_ranks(trace_a_shared_parameter, 2, environment=SOCKETS)
    run_ranks(check_identity_of_a_shared_parameter, 2)


def share_without_shared_from() -> None:
    model = tied_transformer()
    fully_shard(model.embedding)
    remedies = r"leave out fully_shard on the inner module.*as one list.*shared_from=\[owner\]"
    with pytest.raises(ParameterError, match=r"'weight' of Linear is the same tensor as 'weight' of Embedding.*"):
        fully_shard(model.head)
    assert type(model.head) is nn.Linear
    with pytest.raises(ParameterError, match=f"'head.weight' of Transformer is the same tensor as.*{remedies}"):
        fully_shard(model)
    with pytest.raises(LifecycleError, match="Linear has not been sharded"):
        fully_shard(model.norm, shared_from=[model.head])
    fully_shard(model.norm)
    with pytest.raises(ParameterError, match="'weight' of Embedding"):  # this module is not the owner
        fully_shard(model.head, shared_from=[model.norm])


def tie_after_sharding() -> None:
    model = TASKS["transformer"].build()
    fully_shard(model.embedding)
    fully_shard(model.head)
    fully_shard(model)
    tokens, _ = TASKS["transformer"].batch_of(0, dist.get_rank())
    with torch.no_grad():
        model(tokens)
    model.head.weight = model.embedding.weight
    with pytest.raises(ParameterError, match=r"'weight' and parameter 'weight' of another group.*shared_from"):
        model(tokens)

    model = TASKS["transformer"].build()
    fully_shard(model.embedding)
    model.head.weight = model.embedding.weight  # already sharded, so the call below finds a parameter of another group
    with pytest.raises(ParameterError, match=r"'head.weight' of Transformer is the same tensor as 'weight' of"):
        fully_shard(model)


@pytest.mark.behaviour("A-10")
@pytest.mark.parametrize("world_size", [1, 2])
def test_sharing_across_groups_is_an_error_with_both_names_and_the_remedies(world_size: int) -> None:
    run_ranks(share_without_shared_from, world_size)
    run_ranks(tie_after_sharding, world_size)


class SharedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(8, 8)
        self.user = nn.Linear(8, 8)
        self.user.weight = self.owner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.user(x))
        return torch.tanh(self.owner(x)) + torch.tanh(self.user(x))


def shard_owner_and_user(model: Any) -> None:
    fully_shard(model.owner)
    fully_shard(model.user, shared_from=[model.owner])
    fully_shard(model)


@pytest.mark.behaviour("A-10", "C-05", "C-10")
@on_ranks(2)
def test_shared_parameters_can_be_frozen_and_their_user_can_run_alone() -> None:
    def play(model: Any, step: int, rank: int) -> torch.Tensor:
        x, _ = TASKS["chain"].batch_of(step, rank)
        model.owner.weight.requires_grad_(step % 3 != 1)
        with torch.inference_mode(step == 2), torch.no_grad():
            value = model.user(x).sum()  # the user runs separately, outside of the parent's forward
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return torch.stack([loss.detach(), value])

    with Recorder() as recorder:
        check_parity(seeded(SharedTwice), play, shard=shard_owner_and_user, steps=6)
    assert ledger(recorder) == {}


@pytest.mark.behaviour("A-10")
@on_ranks(2)
def test_a_user_trains_parameters_of_an_owner_that_has_not_run() -> None:
    def play(model: Any, step: int, rank: int) -> torch.Tensor:
        x, _ = TASKS["chain"].batch_of(step, rank)
        loss: torch.Tensor = (model if step > 1 else model.user)(x).square().mean()
        loss.backward()
        return loss.detach()

    with Recorder() as recorder:
        check_parity(seeded(SharedTwice), play, shard=shard_owner_and_user, steps=4)
    assert ledger(recorder) == {}
