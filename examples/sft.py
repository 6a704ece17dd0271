"""Fine-tune a small Llama with trl's ``SFTTrainer`` on sharded parameters, save, resume, export, and generate.

    torchrun --standalone --nproc-per-node 2 -m composable_fsdp run --allow-cpu examples/sft.py
    torchrun --standalone --nproc-per-node 2 -m composable_fsdp run --allow-cpu examples/sft.py --steps 90 --resume

It needs ``pip install '.[hf]'``. Nothing is downloaded: the model is made from a config, the tokenizer knows the
numbers from 0 to 59, and the task is to count on. The command replaces torch's ``fully_shard``, which accelerate calls,
and makes accelerate shard on CPU; leave out ``--allow-cpu`` on GPUs. With ``--sharded`` the program shards the model
itself, before the trainer gets it.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from composable_fsdp import fully_shard
from composable_fsdp.wrap import transformer_blocks

NUMBERS = 60


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1} | {str(n): n + 2 for n in range(NUMBERS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUMBERS + 2,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def make_data(rows: int = 400) -> Dataset:
    draw = random.Random(0)
    texts = []
    for _ in range(rows):
        start = draw.randrange(NUMBERS - 8)
        count = [str(start + index) for index in range(8)]
        texts.append({"prompt": " ".join(count[:4]) + " ", "completion": " ".join(count[4:])})
    return Dataset.from_list(texts)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("runs/sft"))
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    options.add_argument("--sharded", action="store_true", help="shard the model before the trainer gets it")
    arguments = options.parse_args()

    tokenizer, model = make_tokenizer(), make_model()
    if arguments.sharded:
        fully_shard(model, policy=transformer_blocks())
        groups = {"auto_wrap_policy": "NO_WRAP"}  # accelerate would look for LlamaDecoderLayer, and not find it
    else:
        groups = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    config = SFTConfig(
        output_dir=str(arguments.out),
        fsdp=True,
        fsdp_config={"version": 2, "state_dict_type": "FULL_STATE_DICT", **groups},  # so save_model exports the model
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=10,
        save_steps=30,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model=model, args=config, train_dataset=make_data(), processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=arguments.resume)

    # Export: all ranks take part in the gathers, and one writes.
    exported = arguments.out / "model"
    trainer.save_model(str(exported))
    dist.barrier()

    # Generate on the sharded model, which all ranks do together, and on the exported one.
    model = trainer.model_wrapped
    register_fsdp_forward_method(model, "generate")
    prompt = tokenizer("7 8 9 10", return_tensors="pt").to(trainer.args.device)
    settings = {"max_new_tokens": 5, "do_sample": False}
    model.eval()
    with torch.no_grad():
        tokens = model.generate(**prompt, **settings, synced_gpus=True)
    plain = AutoModelForCausalLM.from_pretrained(exported).to(trainer.args.device).generate(**prompt, **settings)
    if trainer.is_world_process_zero():
        print(f"the sharded model continues: {tokenizer.decode(tokens[0])}")
        print(f"the exported model continues: {tokenizer.decode(plain[0])}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
