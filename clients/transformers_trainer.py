"""Train with the ``Trainer`` of transformers and ``fsdp_config={"version": 2}``, save at the end, and resume."""

import os
from pathlib import Path

from models import llama, tokens
from outcome import STEPS, tell
from transformers import Trainer, TrainingArguments

from composable_fsdp.interop import allow_fsdp_on_cpu


def trainer(folder: Path, steps: int) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "reshard_after_forward": True,
        },
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=STEPS // 2,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    data = [{"input_ids": row, "labels": row} for step in range(50) for row in tokens(step, 0)]
    return Trainer(model=llama(), args=arguments, train_dataset=data)


def losses_of(each: Trainer) -> list[float]:
    return [entry["loss"] for entry in each.state.log_history if "loss" in entry]


def main() -> None:
    allow_fsdp_on_cpu()
    shared = Path(os.environ["CLIENT_OUT"])
    first = trainer(shared / "trainer", STEPS)
    first.train()
    resumed = trainer(shared / "trainer", STEPS)
    resumed.train(resume_from_checkpoint=str(shared / "trainer" / f"checkpoint-{STEPS // 2}"))
    tell([first.model_wrapped], losses_of(first), resumed=losses_of(resumed))


if __name__ == "__main__":
    main()
