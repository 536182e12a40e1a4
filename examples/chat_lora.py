"""Fine-tune a chat model with LoRA: only the assistant's words are trained, and evaluation lets the model answer.

    python examples/chat_lora.py                                   # generated conversations, a tiny Llama
    python examples/chat_lora.py --data chats.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct

`--data` is a JSONL file whose rows have `messages`, a list of `role` and `content`; a tenth is kept for evaluation.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from generated import dialogues, word_tokenizer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from loopwright import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed
from loopwright.tasks.chat_mask import masked

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="a JSONL file")
parser.add_argument("--model", help="a folder or a name of the Hub")
parser.add_argument("--output", default="runs/chat_lora")
options = parser.parse_args()

set_seed(0)
rows = [json.loads(line) for line in open(options.data, encoding="utf-8")] if options.data else dialogues(800)

if options.model:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
else:
    tokenizer = word_tokenizer((message["content"] for row in rows for message in row["messages"]), chat=True)
    size = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size, **ids))
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"))


def render(messages, prompt):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


conversations = [masked(row["messages"], render, tokenizer, max_length=1024) for row in rows]
samples = [{"input_ids": each.input_ids, "labels": each.labels} for each in conversations if each.trained]
split = len(samples) // 10


def exact(evaluation):
    """The share of answers that are generated without a mistake."""
    found, wanted = (
        tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
        for ids in (evaluation.predictions, evaluation.label_ids)
    )
    return {"exact": sum(a.strip() == b.strip() for a, b in zip(found, wanted, strict=True)) / len(wanted)}


args = Seq2SeqTrainingArguments(
    output_dir=options.output, num_train_epochs=4, per_device_train_batch_size=16, per_device_eval_batch_size=40,
    learning_rate=2e-4 if options.model else 1e-2, eval_strategy="epoch", save_strategy="epoch", save_total_limit=1,
    predict_with_generate=True, generation_max_length=64 if options.model else 4, report_to="none",
)  # fmt: skip
trainer = Seq2SeqTrainer(
    model=model, args=args, train_dataset=samples[split:], eval_dataset=samples[:split], compute_metrics=exact,
    data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100), processing_class=tokenizer,
)  # fmt: skip
trainer.train()
print(f"without a mistake {trainer.evaluate()['eval_exact']:.3f}")
trainer.save_model(f"{options.output}/adapter")
