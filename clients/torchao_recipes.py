"""Train with torchao: 8-bit AdamW, float8 all-gathers, int8 training, and a frozen NF4 base with adapters."""

import argparse

import torch
import torch.distributed as dist
from models import blocks, vectors
from outcome import STEPS, tell
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.optim import AdamW8bit
from torchao.prototype.quantized_training import int8_mixed_precision_training, int8_weight_only_quantized_training
from torchao.quantization import quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

WIDTH = 256  # NF4 needs 64 * 256 values in every shard


class Adapted(nn.Module):
    """A frozen NF4 matrix with a low-rank adapter."""

    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(to_nf4(linear.weight.detach()), requires_grad=False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x):
        return linear_nf4(x, self.weight) + self.up(self.down(x))


def convert(model, recipe):
    match recipe:
        case "float8":
            config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
            return convert_to_float8_training(model, config=config)
        case "int8":
            quantize_(model, int8_weight_only_quantized_training())
        case "int8-mixed":
            quantize_(model, int8_mixed_precision_training())
        case "nf4":
            torch.manual_seed(1)
            for block in model:
                block[0], block[2] = Adapted(block[0]), Adapted(block[2])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", choices=["adamw8bit", "float8", "int8", "int8-mixed", "nf4"])
    recipe = parser.parse_args().recipe
    dist.init_process_group("gloo")
    model = convert(blocks(WIDTH, depth=2), recipe)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Int8 weights do not support the in-place product of AdamW's weight decay.
    optimizer = AdamW8bit(trained, lr=1e-3) if recipe == "adamw8bit" else torch.optim.Adam(trained, lr=1e-3)
    losses = []
    for step in range(STEPS):
        x = vectors(step, dist.get_rank(), width=WIDTH)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if recipe == "float8":
            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.item())
    tell([model], losses)


if __name__ == "__main__":
    # torchao compiles the 8-bit step. On CPU, torch 2.13 then runs a graph compiled for matrices on vectors.
    with torch.compiler.set_stance("force_eager"):
        main()
