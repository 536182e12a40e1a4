"""Pretrain a language model: a text is split into pieces of the same length, so there is no padding.

    python examples/pretrain.py                                    # generated sentences, a tiny GPT-2
    python examples/pretrain.py --data book.txt --model openai-community/gpt2

`--data` is a text file, of which the last tenth is kept for evaluation; `--model` starts from trained weights.
"""

from __future__ import annotations

import argparse

import torch
from generated import reviews, word_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from loopwright import Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="a text file")
parser.add_argument("--model", help="a folder or a name of the Hub")
parser.add_argument("--output", default="runs/pretrain")
options = parser.parse_args()

set_seed(0)
if options.data:
    lines = open(options.data, encoding="utf-8").read().splitlines()
else:
    lines = [row["text"] for row in reviews(3000)]

length = 512 if options.model else 32
if options.model:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
else:
    tokenizer = word_tokenizer(lines)
    size = {"n_positions": length, "n_embd": 48, "n_layer": 2, "n_head": 4}
    end = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size, **end))

tokens = torch.tensor([token for line in lines for token in tokenizer(line)["input_ids"]])
pieces = tokens[: len(tokens) // length * length].view(-1, length)
samples = [{"input_ids": piece, "labels": piece} for piece in pieces]
split = len(samples) * 9 // 10


def accuracy(evaluation):
    """The share of tokens that are predicted from those before them."""
    return {"accuracy": float((evaluation.predictions[:, :-1] == evaluation.label_ids[:, 1:]).mean())}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=options.output,
        num_train_epochs=1 if options.model else 2,
        per_device_train_batch_size=16,
        learning_rate=5e-5 if options.model else 5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        weight_decay=0.1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=samples[:split],
    eval_dataset=samples[split:],
    processing_class=tokenizer,
    compute_metrics=accuracy,
    preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
)
trainer.train()
print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}")
