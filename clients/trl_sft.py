"""``SFTTrainer`` of trl with LoRA, on accelerate's FSDP plugin."""

import os

from datasets import Dataset
from models import VOCABULARY, llama, tokens
from outcome import STEPS, tell
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from composable_fsdp.interop import allow_fsdp_on_cpu


def main() -> None:
    allow_fsdp_on_cpu()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    arguments = SFTConfig(
        output_dir=os.environ["CLIENT_OUT"],
        use_cpu=True,
        bf16=False,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        model=llama(),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": [row.tolist() for step in range(50) for row in tokens(step, 0)]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
    )
    trainer.train()
    tell([trainer.model_wrapped], [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


if __name__ == "__main__":
    main()
