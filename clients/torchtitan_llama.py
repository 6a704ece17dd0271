"""Train torchtitan's debug model with its ``parallelize_llama``.

The model starts on meta, and uses bf16 with fp32 reduction, selective checkpointing, and torchtitan's own gradient
clipping. Gradients are summed, not averaged, as in its trainer.
"""

import torch
import torch.distributed as dist
from outcome import STEPS, tell
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs, parallelize_llama

SEQ, BATCH = 32, 2
parallel_dims.device_type = "cpu"  # torchtitan uses "cuda" if there is no accelerator


def build():
    config = llama3_configs["debugmodel"](attn_backend="flex")
    for layer in config.layers:  # flex_attention has no backward on CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    with torch.device("meta"):
        model = config.build()
    parallelism = ParallelismConfig(data_parallel_shard_degree=dist.get_world_size(), spmd_backend="partial_dtensor")
    parallelize_llama(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, dist.get_world_size()),
        training=TrainingConfig(seq_len=SEQ, local_batch_size=BATCH),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=SelectiveAC.Config(),
        dump_folder="",
    )
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())  # with one seed, all ranks would draw equal shards on CPU
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model.train()


def main() -> None:
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), build()
    disable_fsdp_gradient_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # otherwise torch's FSDP2 would use gloo with PREMUL_SUM
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    losses, norms = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(64, (BATCH, 1), generator=generator) + torch.arange(SEQ + 1)
        logits = model(tokens[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / dist.get_world_size()).backward()
        norms.append(float(clip_grad_norm_(list(model.parameters()), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tell([model], losses, norms=norms)


if __name__ == "__main__":
    main()
