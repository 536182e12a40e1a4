"""The tasks of transformers' example scripts, small: models from configurations, generated data, metrics."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np

from .recipes import sentences, tokenizer
from .running import Recipes, Rows

RECIPES: Recipes = {}

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
"""No dropout: evaluations of transformers draw from the generator that dropout uses, those of loopwright do not."""

ALL = 16
"""A batch that holds the test data: over several, transformers' loss of tokens is a mean of the batches' means."""


def script(function: Any) -> Any:
    RECIPES[function.__name__] = function
    return function


def arguments(folder: str, **changes: Any) -> dict[str, Any]:
    """What these scripts are started with: train, evaluate and save by steps, keep the best."""
    return {
        "output_dir": os.path.join(folder, "run"), "num_train_epochs": 2, "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4, "learning_rate": 5e-3, "warmup_steps": 2, "weight_decay": 0.01, "seed": 3,
        "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "logging_steps": 2, "load_best_model_at_end": True,
        "save_total_limit": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, **changes,
    }  # fmt: skip


def bert(kind: str, **changes: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, kind)(transformers.BertConfig(**SMALL, **changes))


def rows_of(trainer: Any, test: Any) -> Rows:
    """What a script does with its trainer, and the numbers it has afterwards."""
    result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    rows = [dict(row) for row in trainer.state.log_history]
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    found = trainer.predict(test, metric_key_prefix="predict")
    rows.append({"step": result.global_step, "train_loss": result.training_loss, **result.metrics})
    rows.append(metrics)
    texts = getattr(trainer.args, "predict_with_generate", False)
    shown = _tokens if texts else _listed
    rows.append({**found.metrics, "predictions": shown(found.predictions), "labels": shown(found.label_ids)})
    rows.append({"best": trainer.state.best_metric, "at": os.path.basename(trainer.state.best_model_checkpoint)})
    return rows


def _listed(values: Any) -> Any:
    """Arrays, in tuples or not, as their shapes and values."""
    if isinstance(values, tuple):
        return [_listed(each) for each in values]
    return [list(values.shape), np.asarray(values, dtype=np.float64).ravel().tolist()]


def _tokens(numbers: Any) -> list[list[int]]:
    """Texts without padding: transformers also pads labels to the longest text that could be generated."""
    return [[int(number) for number in row if number not in (0, -100)] for row in numbers]


def split(columns: dict[str, Any], prepare: Any, keep: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Prepared training and test data, without the columns they are made of."""
    from datasets import Dataset

    made = Dataset.from_dict(columns)
    made = made.map(prepare, batched=True, remove_columns=[name for name in made.column_names if name not in keep])
    return made.select(range(24)), made.select(range(24, 34))


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


@script
def sequence_classification(folder: str) -> Rows:
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    tokens = tokenizer()
    said = sentences(68)
    columns = {"one": said[:34], "two": said[34:], "label": [each % 3 for each in range(34)]}
    train, test = split(columns, lambda rows: tokens(rows["one"], rows["two"], truncation=True), ("label",))
    trainer = Trainer(
        model=bert("BertForSequenceClassification", num_labels=3),
        args=TrainingArguments(
            **arguments(folder, metric_for_best_model="accuracy", greater_is_better=True, label_smoothing_factor=0.1)
        ),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokens,
        data_collator=DataCollatorWithPadding(tokens, pad_to_multiple_of=8),
        compute_metrics=accuracy,
    )
    return rows_of(trainer, test)


@script
def regression(folder: str) -> Rows:
    from transformers import Trainer, TrainingArguments

    tokens = tokenizer()
    columns = {"text": sentences(34), "label": [each % 7 / 3 for each in range(34)]}
    train, test = split(columns, lambda rows: tokens(rows["text"], padding="max_length", max_length=20), ("label",))

    def errors(predicted: Any) -> dict[str, float]:
        return {"mse": float(((predicted.predictions[:, 0] - predicted.label_ids) ** 2).mean())}

    trainer = Trainer(
        model=bert("BertForSequenceClassification", num_labels=1, problem_type="regression"),
        args=TrainingArguments(**arguments(folder, metric_for_best_model="mse")),
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=errors,
    )
    return rows_of(trainer, test)


@script
def token_classification(folder: str) -> Rows:
    from transformers import DataCollatorForTokenClassification, Trainer, TrainingArguments

    tokens = tokenizer()
    words = [each.split() for each in sentences(34)]
    tags = [[int(word[1:]) % 5 for word in each] for each in words]

    def prepare(rows: Any) -> Any:
        made = tokens(rows["words"], truncation=True, is_split_into_words=True)
        made["labels"] = [
            [-100 if word is None else tags[word] for word in made.word_ids(number)]
            for number, tags in enumerate(rows["tags"])
        ]
        return made

    def scores(predicted: Any) -> dict[str, float]:
        kept = predicted.label_ids != -100
        right = (predicted.predictions.argmax(-1) == predicted.label_ids)[kept]
        return {"f1": float(right.mean()), "tokens": int(kept.sum())}

    train, test = split({"words": words, "tags": tags}, prepare)
    trainer = Trainer(
        model=bert("BertForTokenClassification", num_labels=5),
        args=TrainingArguments(**arguments(folder, metric_for_best_model="f1", per_device_eval_batch_size=ALL)),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokens,
        data_collator=DataCollatorForTokenClassification(tokens),
        compute_metrics=scores,
    )
    return rows_of(trainer, test)


def _question_trainer() -> Any:
    """A subclass with post-processing between predictions and metrics."""
    from transformers import EvalPrediction, Trainer

    class QuestionTrainer(Trainer):
        def __init__(self, *args: Any, examples: Any = None, post_process: Any = None, **named: Any) -> None:
            super().__init__(*args, **named)
            self.examples = examples
            self.post_process = post_process

        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            loader = self.get_eval_dataloader(eval_dataset or self.eval_dataset)
            compute_metrics, self.compute_metrics = self.compute_metrics, None
            try:
                output = self.evaluation_loop(
                    loader, description="Evaluation", prediction_loss_only=None, ignore_keys=ignore_keys,
                    metric_key_prefix=metric_key_prefix,
                )  # fmt: skip
            finally:
                self.compute_metrics = compute_metrics
            answers = self.post_process(self.examples, output.predictions)
            found = self.compute_metrics(EvalPrediction(predictions=answers, label_ids=self.examples["answer"]))
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
            metrics.update(output.metrics)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    return QuestionTrainer


@script
def question_answering(folder: str) -> Rows:
    from datasets import Dataset
    from transformers import TrainingArguments, default_data_collator

    tokens, drawn = tokenizer(), random.Random(0)
    contexts = [sentence.split() for sentence in sentences(34, 10, 16)]
    starts = [drawn.randrange(8) for _ in contexts]
    columns = {
        "question": sentences(34, 3, 5, seed=1),
        "context": [" ".join(each) for each in contexts],
        "answer": [" ".join(each[start : start + 2]) for each, start in zip(contexts, starts, strict=True)],
        "start": starts,
    }

    def prepare(rows: Any) -> Any:
        made = tokens(rows["question"], rows["context"], padding="max_length", max_length=32)
        offsets = [len(each.split()) for each in rows["question"]]
        made["start_positions"] = [begin + each for begin, each in zip(offsets, rows["start"], strict=True)]
        made["end_positions"] = [each + 1 for each in made["start_positions"]]
        return made

    def post_process(examples: Any, predictions: Any) -> list[str]:
        begins, ends = predictions[0].argmax(-1), predictions[1].argmax(-1)
        spoken = [f"{one} {two}".split() for one, two in zip(examples["question"], examples["context"], strict=True)]
        return [" ".join(words[a : b + 1]) for words, a, b in zip(spoken, begins, ends, strict=True)]

    def exact(found: Any) -> dict[str, float]:
        pairs = list(zip(found.predictions, found.label_ids, strict=True))
        return {"exact_match": 100 * sum(one == two for one, two in pairs) / len(pairs)}

    train, test = split(columns, prepare)
    trainer = _question_trainer()(
        model=bert("BertForQuestionAnswering"),
        args=TrainingArguments(**arguments(folder, metric_for_best_model="exact_match", num_train_epochs=3)),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokens,
        data_collator=default_data_collator,
        compute_metrics=exact,
        examples=Dataset.from_dict(columns).select(range(24, 34)),
        post_process=post_process,
    )
    result = trainer.train()
    rows = [dict(row) for row in trainer.state.log_history]
    return [*rows, dict(result.metrics), trainer.evaluate()]


def _grouped(tokens: Any) -> tuple[Any, Any]:
    """Texts joined and cut into blocks.

    transformers divides by the number of labels, of which the first of a block is no target; loopwright by the targets.
    """

    def prepare(rows: Any) -> Any:
        joined = [number for text in rows["text"] for number in [*tokens(text)["input_ids"], 1]]
        blocks = [joined[start : start + 10] for start in range(0, 340, 10)]
        return {"input_ids": blocks, "labels": [[-100, *each[1:]] for each in blocks]}  # the first has no prediction

    return split({"text": sentences(34, 10, 16)}, prepare)


def _argmax(logits: Any, labels: Any) -> Any:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


@script
def causal_language_modeling(folder: str) -> Rows:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator

    train, test = _grouped(tokenizer())
    torch.manual_seed(0)
    dry = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, **dry))

    def shifted(predicted: Any) -> dict[str, float]:
        return {"accuracy": float((predicted.predictions[:, :-1] == predicted.label_ids[:, 1:]).mean())}

    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments(folder, gradient_accumulation_steps=3, lr_scheduler_type="cosine")),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer(),
        data_collator=default_data_collator,
        compute_metrics=shifted,
        preprocess_logits_for_metrics=_argmax,
    )
    return rows_of(trainer, test)


@script
def masked_language_modeling(folder: str) -> Rows:
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    class EveryThird(DataCollatorForLanguageModeling):
        """Masks without random numbers: evaluations of transformers and of loopwright draw different ones."""

        def torch_mask_tokens(self, inputs: Any, special_tokens_mask: Any = None, offset_mapping: Any = None) -> Any:
            labels = inputs.clone()
            labels[:, [each for each in range(inputs.shape[1]) if each % 3]] = -100
            labels[inputs == 0] = -100
            return inputs.masked_fill(labels != -100, self.tokenizer.mask_token_id), labels

    tokens = tokenizer()
    columns = {"text": sentences(34, 10, 16)}
    train, test = split(columns, lambda rows: tokens(rows["text"], return_special_tokens_mask=True))

    def masked(predicted: Any) -> dict[str, float]:
        kept = predicted.label_ids != -100
        right = (predicted.predictions == predicted.label_ids)[kept]
        return {"accuracy": float(right.mean()), "masked": int(kept.sum())}

    trainer = Trainer(
        model=bert("BertForMaskedLM"),
        args=TrainingArguments(**arguments(folder, per_device_eval_batch_size=ALL)),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokens,
        data_collator=EveryThird(tokens),
        compute_metrics=masked,
        preprocess_logits_for_metrics=_argmax,
    )
    return rows_of(trainer, test)


def _written_with(folder: str, model: Any, prepare: Any, columns: dict[str, Any], **changes: Any) -> Rows:
    """Train a model that writes, and measure what it generates."""
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    tokens = tokenizer()
    train, test = split(columns, prepare)

    def overlap(found: Any) -> dict[str, float]:
        guesses, wanted = (np.where(each != -100, each, 0) for each in (found.predictions, found.label_ids))
        said, meant = tokens.batch_decode(guesses, skip_special_tokens=True), tokens.batch_decode(wanted)
        shared = [len({*one.split()} & {*two.split()}) for one, two in zip(said, meant, strict=True)]
        return {"overlap": float(np.mean(shared)), "length": float((guesses != 0).sum(-1).mean())}

    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            **arguments(
                folder, predict_with_generate=True, generation_max_length=8, per_device_eval_batch_size=ALL, **changes
            )
        ),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokens,
        data_collator=DataCollatorForSeq2Seq(tokens, model=model, label_pad_token_id=-100),
        compute_metrics=overlap,
    )
    return rows_of(trainer, test)


@script
def summarization(folder: str) -> Rows:
    import torch
    from transformers import BartConfig, BartForConditionalGeneration

    tokens = tokenizer()
    torch.manual_seed(0)
    model = BartForConditionalGeneration(
        BartConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=3,
            decoder_start_token_id=3,
            forced_eos_token_id=1,
            dropout=0.0,
        )  # fmt: skip
    )
    documents = sentences(34, 10, 16)
    columns = {"document": documents, "summary": [" ".join(each.split()[:4]) for each in documents]}

    def prepare(rows: Any) -> Any:
        made = tokens(rows["document"], truncation=True)
        made["labels"] = [[*each, 1] for each in tokens(text_target=rows["summary"])["input_ids"]]
        return made

    return _written_with(folder, model, prepare, columns, generation_num_beams=2, metric_for_best_model="overlap")


@script
def translation(folder: str) -> Rows:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    tokens = tokenizer()
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=1,
            num_heads=4,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        )  # fmt: skip
    )
    texts = sentences(34, 4, 8)
    columns = {"one": texts, "other": [" ".join(reversed(each.split())) for each in texts]}

    def prepare(rows: Any) -> Any:
        made = tokens([f"w1 {each}" for each in rows["one"]], truncation=True)
        made["labels"] = [[*each, 1] for each in tokens(text_target=rows["other"])["input_ids"]]
        return made

    changes = {"label_smoothing_factor": 0.1, "optim": "adafactor", "sortish_sampler": False}
    return _written_with(folder, model, prepare, columns, metric_for_best_model="loss", **changes)


@script
def multiple_choice(folder: str) -> Rows:
    from transformers import DataCollatorForMultipleChoice, Trainer, TrainingArguments

    tokens = tokenizer()
    columns = {"start": sentences(34), "ends": [sentences(4, 2, 4, seed=each) for each in range(34)]}
    columns["label"] = [each % 4 for each in range(34)]

    def prepare(rows: Any) -> Any:
        pairs = [(start, end) for start, ends in zip(rows["start"], rows["ends"], strict=True) for end in ends]
        made = tokens([one for one, _ in pairs], [two for _, two in pairs], truncation=True)
        return {name: [values[each : each + 4] for each in range(0, len(values), 4)] for name, values in made.items()}

    train, test = split(columns, prepare, ("label",))
    trainer = Trainer(
        model=bert("BertForMultipleChoice"),
        args=TrainingArguments(**arguments(folder, metric_for_best_model="accuracy")),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokens,
        data_collator=DataCollatorForMultipleChoice(tokenizer=tokens),
        compute_metrics=accuracy,
    )
    return rows_of(trainer, test)


@script
def image_classification(folder: str) -> Rows:
    import torch
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    drawn = np.random.default_rng(0)
    pictures = Dataset.from_dict(
        {"image": drawn.integers(0, 255, (34, 16, 16, 3)).tolist(), "label": [each % 3 for each in range(34)]}
    )

    def transforms(rows: Any) -> Any:
        values = [torch.tensor(each, dtype=torch.float32).permute(2, 0, 1) / 127.5 - 1 for each in rows["image"]]
        return {**rows, "pixel_values": values}

    def collate(samples: list[Any]) -> dict[str, Any]:
        pixels = torch.stack([each["pixel_values"] for each in samples])
        return {"pixel_values": pixels, "labels": torch.tensor([each["label"] for each in samples])}

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
        num_labels=3,
    )  # fmt: skip
    test = pictures.select(range(24, 34)).with_transform(transforms)
    trainer = Trainer(
        model=ViTForImageClassification(config),
        args=TrainingArguments(
            **arguments(folder, remove_unused_columns=False, label_names=["labels"], metric_for_best_model="accuracy")
        ),
        train_dataset=pictures.select(range(24)).with_transform(transforms),
        eval_dataset=test,
        data_collator=collate,
        compute_metrics=accuracy,
    )
    return rows_of(trainer, test)


@script
def audio_classification(folder: str) -> Rows:
    from transformers import Trainer, TrainingArguments, Wav2Vec2ForSequenceClassification

    drawn = np.random.default_rng(0)
    columns = {"audio": drawn.normal(size=(34, 400)).tolist(), "label": [each % 3 for each in range(34)]}
    train, test = split(columns, lambda rows: {"input_values": rows["audio"]}, ("label",))
    trainer = Trainer(
        model=_speech_model(Wav2Vec2ForSequenceClassification, num_labels=3),
        args=TrainingArguments(**arguments(folder, metric_for_best_model="accuracy")),
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=accuracy,
    )
    return rows_of(trainer, test)


def _speech_model(kind: Any, **changes: Any) -> Any:
    import torch
    from transformers import Wav2Vec2Config

    torch.manual_seed(0)
    return kind(
        Wav2Vec2Config(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            conv_dim=(16, 16),
            conv_stride=(5, 4),
            conv_kernel=(10, 3),
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            mask_time_prob=0.0,
            layerdrop=0.0,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            classifier_proj_size=16,
            **changes,
        )  # fmt: skip
    )


@script
def speech_recognition(folder: str) -> Rows:
    import torch
    from transformers import Trainer, TrainingArguments, Wav2Vec2ForCTC

    drawn = np.random.default_rng(0)
    sounds = [drawn.normal(size=drawn.integers(300, 500)).tolist() for _ in range(34)]
    columns = {"audio": sounds, "text": [[3 + (each + other) % 9 for other in range(4)] for each in range(34)]}
    train, test = split(columns, lambda rows: {"input_values": rows["audio"], "labels": rows["text"]})

    class Collator:
        def __call__(self, samples: list[Any]) -> dict[str, Any]:
            from torch.nn.utils.rnn import pad_sequence

            masks = [torch.ones(len(each["input_values"]), dtype=torch.long) for each in samples]
            sounds = [torch.tensor(each["input_values"]) for each in samples]
            texts = [torch.tensor(each["labels"]) for each in samples]
            return {
                "input_values": pad_sequence(sounds, batch_first=True),
                "attention_mask": pad_sequence(masks, batch_first=True),
                "labels": pad_sequence(texts, batch_first=True, padding_value=-100),
            }  # fmt: skip

    def error_rate(predicted: Any) -> dict[str, float]:
        guesses, labels = predicted.predictions.argmax(-1), predicted.label_ids
        rates = [
            len({*wanted[wanted != -100].tolist()} - {*guess.tolist()}) / 4
            for guess, wanted in zip(guesses, labels, strict=True)
        ]
        return {"wer": float(np.mean(rates))}

    model = _speech_model(Wav2Vec2ForCTC, vocab_size=16, ctc_loss_reduction="mean", pad_token_id=0)
    model.freeze_feature_encoder()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments(folder, metric_for_best_model="wer", greater_is_better=False)),
        train_dataset=train,
        eval_dataset=test,
        data_collator=Collator(),
        compute_metrics=error_rate,
    )
    return rows_of(trainer, test)
