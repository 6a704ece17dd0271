"""Train a Llama as verl's actor does: values from rank 0, rollouts, microbatches, clipping, offload between phases.

The calls are those of ``verl/utils/fsdp_utils.py`` and of its FSDP, Automodel and VeOmni engines, without verl and its
dependencies. Parameters stay unsharded during rollouts, which verl sets through the states of torch's FSDP2; before the
model is moved to the host, it resets these.
"""

import hashlib
from functools import partial

import torch
import torch.distributed as dist
from models import llama, tokens
from outcome import STEPS, tell
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor
from torch.nn.utils.clip_grad import _clip_grads_with_norm_, _get_total_norm

CPU = torch.device("cpu")
MICROBATCHES = 2


def shard(model: torch.nn.Module, mesh: dist.DeviceMesh) -> None:
    """Shard each decoder layer and the embedding, then the rest."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    shard_one = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in [m for m in model.modules() if type(m).__name__ in ("LlamaDecoderLayer", "Embedding")]:
        shard_one(module)
    shard_one(model)


def load_from_rank_0(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Give the sharded model, which has no values on other ranks, those of rank 0."""
    if dist.get_rank() == 0:
        model.to(CPU)
    else:
        model.to_empty(device=CPU)
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def clip(model: torch.nn.Module, most: float) -> float:
    """Scale the gradients by their norm over all ranks, and return the norm."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = _get_total_norm([p.grad for p in parameters], 2.0, False, None)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    _clip_grads_with_norm_(parameters, most, norm.to(CPU), None)
    return norm.item()


def reshard_after_forward(model: torch.nn.Module, value: bool) -> None:
    """Choose whether parameters are freed after forward, by the states of all sharded modules."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._auto_reshard_after_forward = False
            if group := state._fsdp_param_group:
                group.post_forward_mesh_info = _get_post_forward_mesh_info(value, group.mesh_info)


def offload(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Move the model and the optimizer's state to the host, and back."""
    for module in model.modules():
        state = _get_module_fsdp_state(module)
        if state is not None and state._fsdp_param_group is not None:
            state._fsdp_param_group._training_state = TrainingState.IDLE
    model.reshard()
    model.cpu()
    model.to(CPU)
    for state in optimizer.state.values():
        state |= {key: value.to(CPU) for key, value in state.items() if isinstance(value, torch.Tensor)}


def log_probabilities(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch).logits[:, :-1].float().log_softmax(-1)
    return logits.gather(-1, batch[:, 1:, None]).squeeze(-1)


def digest(model: torch.nn.Module) -> str:
    """Return a hash of the full values, which verl sends to the engine of the rollouts."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(name.encode() + whole.detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    model = llama()
    values = model.state_dict() if dist.get_rank() == 0 else {}
    if dist.get_rank():
        model.to("meta")
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    load_from_rank_0(model, values)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, sent = [], [], []
    for step in range(STEPS):
        batches = [tokens(MICROBATCHES * step + i, dist.get_rank()) for i in range(MICROBATCHES)]
        sent.append(digest(model))
        model.eval()
        reshard_after_forward(model, False)
        with torch.no_grad():
            old = [log_probabilities(model, batch) for batch in batches]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        reshard_after_forward(model, True)
        model.train()
        total = 0.0
        for batch, before in zip(batches, old, strict=True):
            now = log_probabilities(model, batch)
            ratio = (now - before).exp()
            advantage = (batch[:, 1:] % 3 - 1).float()
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = (loss - 0.1 * now.mean()) / MICROBATCHES
            loss.backward()
            total += loss.item()
        norms.append(clip(model, 1.0))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
        offload(model, optimizer)
    tell([model], losses, norms=norms, sent=sent)


if __name__ == "__main__":
    main()
