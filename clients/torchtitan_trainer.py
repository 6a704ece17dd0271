"""Train torchtitan's debug model by its own ``Trainer``: its loop, data, loss, optimizer, schedule and checkpoints.

The configuration is that of ``llama3_debugmodel``. On CPU three things differ, each because torchtitan's needs CUDA:
the functions that report memory of the device, flex attention, which has no backward on CPU, and CUDA graphs.
``--backend`` selects torchtitan's SPMD backend; its own default is ``spmd_types``, which torch's FSDP2 admits from
torch 2.14 on.
"""

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace

import tokenizers
import torch
import torch.distributed as dist
from outcome import STEPS, tell
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

NO_STATS = {"get_device_name": lambda *_: "cpu", "memory_stats": lambda *_: {}, "empty_cache": lambda: None}
DEVICE = SimpleNamespace(
    total_memory=2**30,
    get_device_properties=lambda *_: DEVICE,
    reset_peak_memory_stats=lambda: None,
    current_device=lambda: 0,
    device_count=lambda: 1,
    set_device=lambda *_: None,
    synchronize=lambda *_: None,
    manual_seed_all=torch.manual_seed,
    **NO_STATS,
)
"""The functions of ``torch.cuda`` that torchtitan calls. ``torch.cpu`` lacks most of them."""
utils.device_type, utils.device_module = "cpu", DEVICE  # before other modules of torchtitan import them

from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer, dist_utils  # noqa: E402

SEQ, BATCH, ACCUMULATED = 32, 2, 2


def write_assets(folder: Path) -> None:
    """Write a tokenizer of bytes, and text for torchtitan's data set ``c4_test``, which its package lacks."""
    vocabulary = {chr(256 + i): i for i in range(256)} | {"<s>": 256, "</s>": 257}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    lines = [json.dumps({"text": "".join(chr(256 + (i * n) % 64) for n in range(200))}) for i in range(1, 64)]
    (folder / "c4_test").mkdir()
    (folder / "c4_test" / "data.json").write_text("\n".join(lines))


def configuration(backend: str, folder: Path) -> Trainer.Config:
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path, config.dump_folder = str(folder / "tokenizer"), str(folder)
    config.dataloader.dataset_path = str(folder / "c4_test")
    config.training.disable_cuda_graphs = True
    config.training.seq_len, config.training.local_batch_size = SEQ, BATCH
    config.training.global_batch_size = BATCH * ACCUMULATED * int(os.environ["WORLD_SIZE"])
    config.training.steps = STEPS
    config.parallelism.spmd_backend = backend
    config.checkpoint.enable = True
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="spmd_types")
    folder = Path(os.environ["CLIENT_OUT"], f"titan-{os.environ['RANK']}")
    write_assets(folder)
    # With one seed, DTensor's random functions, which do not know CPU meshes, draw equal shards on all ranks.
    dist_utils.set_determinism = lambda *_, **__: torch.manual_seed(dist.get_rank())
    trainer = Trainer(configuration(parser.parse_args().backend, folder))
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # otherwise torch's FSDP2 would use gloo with PREMUL_SUM
    logged = []
    trainer.metrics_processor.log = lambda step, average, largest, norm, **_: logged.append((average, largest, norm))
    if not hasattr(dist, "set_timeout"):  # of torch's main branch
        dist.set_timeout = lambda *_: None
    trainer.train()
    trainer.close()
    losses, norms = ([entry[position] for entry in logged] for position in (0, 2))
    files = sorted(path.name for path in folder.glob("checkpoint/*"))
    tell(trainer.model_parts, losses, norms=norms, files=files)


if __name__ == "__main__":
    main()
