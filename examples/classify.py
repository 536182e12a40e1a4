"""Classify texts with a BERT, choose the best checkpoint by accuracy.

    python examples/classify.py                                    # generated reviews, a tiny model
    python examples/classify.py --data reviews.jsonl --model distilbert-base-uncased

`--data` is a JSONL file whose rows have `text` and `label`; a tenth of it is kept for evaluation.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from generated import reviews, word_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from loopwright import Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="a JSONL file")
parser.add_argument("--model", help="a folder or a name of the Hub")
parser.add_argument("--output", default="runs/classify")
options = parser.parse_args()

set_seed(0)
rows = [json.loads(line) for line in open(options.data, encoding="utf-8")] if options.data else reviews(1200)
classes = sorted({row["label"] for row in rows})

if options.model:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=len(classes))
else:
    tokenizer = word_tokenizer(row["text"] for row in rows)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), num_labels=len(classes), pad_token_id=tokenizer.pad_token_id, **size)
    model = BertForSequenceClassification(config)

samples = [{**tokenizer(row["text"], truncation=True), "labels": classes.index(row["label"])} for row in rows]
split = len(samples) // 10


def accuracy(evaluation):
    return {"accuracy": float((np.argmax(evaluation.predictions, axis=-1) == evaluation.label_ids).mean())}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=options.output,
        num_train_epochs=2,
        per_device_train_batch_size=16,
        learning_rate=5e-5 if options.model else 3e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
    ),
    train_dataset=samples[split:],
    eval_dataset=samples[:split],
    processing_class=tokenizer,
    compute_metrics=accuracy,
)
trainer.train()
print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}")
trainer.save_model(f"{options.output}/final")
