"""Train an encoder-decoder model and let it generate during evaluation.

    python examples/translate.py                                   # numbers in words to digits, a tiny BART
    python examples/translate.py --data pairs.jsonl --model google-t5/t5-small

`--data` is a JSONL file whose rows have `source` and `target`; a tenth of it is kept for evaluation.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from generated import numbers, word_tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, BartForConditionalGeneration

from loopwright import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="a JSONL file")
parser.add_argument("--model", help="a folder or a name of the Hub")
parser.add_argument("--output", default="runs/translate")
options = parser.parse_args()

set_seed(0)
rows = [json.loads(line) for line in open(options.data, encoding="utf-8")] if options.data else numbers(1500)

if options.model:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model)
else:
    tokenizer = word_tokenizer(text for row in rows for text in row.values())
    size = {"d_model": 48, "max_position_embeddings": 64, "dropout": 0.0}
    for part in ("encoder", "decoder"):
        size |= {f"{part}_layers": 1, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 96}
    end = ("eos_token_id", "bos_token_id", "decoder_start_token_id", "forced_eos_token_id")
    size |= {"pad_token_id": tokenizer.pad_token_id, **dict.fromkeys(end, tokenizer.eos_token_id)}
    model = BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), **size))

samples = [dict(tokenizer(row["source"], text_target=row["target"], truncation=True)) for row in rows]
split = len(samples) // 10


def exact(evaluation):
    """The share of texts that are generated without a mistake."""
    found, wanted = (
        tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
        for ids in (evaluation.predictions, evaluation.label_ids)
    )
    return {"exact": sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)}


trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(
        output_dir=options.output,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=50,
        learning_rate=5e-5 if options.model else 5e-3,
        eval_strategy="epoch",
        save_strategy="no",
        predict_with_generate=True,
        generation_max_length=32,
        report_to="none",
    ),
    train_dataset=samples[split:],
    eval_dataset=samples[:split],
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    processing_class=tokenizer,
    compute_metrics=exact,
)
trainer.train()
print(f"without a mistake {trainer.evaluate()['eval_exact']:.3f}")
