"""The list of programs of other libraries, with their options and notes."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CLIENTS", "Client"]

ON_CPU = "its FSDP plugin is allowed on CPU (`interop.allow_fsdp_on_cpu`): accelerate drops it there"


@dataclass(frozen=True)
class Client:
    """A program below ``clients/``.

    Attributes:
        command: the file and its options.
        package: the package whose version is shown.
        launcher: additional options for torchrun.
        torch: the oldest torch whose FSDP2 runs it.
        note: differences from normal use, with reasons.
    """

    name: str
    command: str
    package: str
    ranks: int = 2
    minutes: float = 3
    launcher: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    torch: tuple[int, int] = (2, 11)
    note: str = ""

    def is_admitted(self) -> bool:
        """Return whether the installed torch is not too old."""
        return tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) >= self.torch

    def version(self) -> str:
        return f"{self.package} {importlib.metadata.version(self.package)}"


CLIENTS = (
    Client("accelerate", "accelerate_loop.py", "accelerate", note=ON_CPU),
    Client("accelerate, bf16, checkpointing", "accelerate_loop.py --bf16", "accelerate", note=ON_CPU),
    Client("accelerate, values on rank 0", "accelerate_loop.py --ram-efficient --tied", "accelerate", note=ON_CPU),
    Client("transformers Trainer", "transformers_trainer.py", "transformers", note=ON_CPU),
    Client("transformers from_pretrained", "transformers_from_pretrained.py", "transformers"),
    Client("transformers from_pretrained, tied", "transformers_from_pretrained.py --tied", "transformers"),
    *(
        Client(
            f"transformers experts, tp {tp}, ep {ep}", f"transformers_experts.py --tp {tp} --ep {ep}", "transformers", 4
        )
        for tp, ep in ((1, 2), (2, 2), (2, 4))
    ),
    Client("Lightning Fabric", "fabric_loop.py", "lightning"),
    Client("Lightning Trainer", "lightning_trainer.py", "lightning"),
    Client("peft, then sharded", "peft_lora.py", "peft"),
    Client("peft on a sharded model", "peft_lora.py --after", "peft"),
    Client("trl SFTTrainer with LoRA", "trl_sft.py", "trl", note=ON_CPU),
    *(
        Client(f"torchao {recipe}", f"torchao_recipes.py {recipe}", "torchao")
        for recipe in ("float8", "int8", "int8-mixed", "nf4")
    ),
    Client("torchao adamw8bit", "torchao_recipes.py adamw8bit", "torchao", note="its step runs eagerly, not compiled"),
    Client(
        "torchtitan parallelize_llama",
        "torchtitan_llama.py",
        "torchtitan",
        note="sums forced, for gloo on fsdp2; scaled dot product attention, as flex attention has no backward on CPU",
    ),
    *(
        Client(
            f"torchtitan Trainer, {backend}",
            f"torchtitan_trainer.py --backend {backend}",
            "torchtitan",
            torch=(2, 14) if backend == "spmd_types" else (2, 13),
            note=f"sums forced; functions of CUDA, flex attention and equal seeds replaced{note}",
        )
        for backend, note in (
            ("partial_dtensor", ""),
            ("full_dtensor", ""),
            ("spmd_types", "; its default, run under torch 2.14.1: FSDP2 of 2.13 raises `ValueError`"),
        )
    ),
    Client("verl's calls", "verl_actor.py", "transformers", note="`verl/utils/fsdp_utils.py` without verl"),
    Client("weights by pass", "weights_by_pass.py", "torch", note="what Transformer Engine reads of FSDP2's state"),
    Client("8-bit primary weights", "fp8_primary_weights.py", "torch", note="as Transformer Engine's, without kernels"),
    Client("torch pipelining, 1F1B", "pipelining.py", "torch", ranks=4),
    Client("torch pipelining, interleaved", "pipelining.py --interleaved", "torch", ranks=4),
    Client("torch profiler", "profiler.py", "torch"),
    Client("torch FSDPMemTracker", "mem_tracker.py", "torch"),
    Client(
        "torchrun elastic",
        "elastic.py",
        "torch",
        launcher="--max-restarts 2 --monitor-interval 0.2",
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        note="a store of its own for each attempt: gloo finds addresses of killed ranks in a shared one",
    ),
)
