"""Scripts as users write them for transformers' Trainer: one function for each pattern, with a small model."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import __version__ as VERSION

from .recipes import sentences, tokenizer
from .running import Recipes, Rows
from .scripts import accuracy, bert

RECIPES: Recipes = {}
GROUPED: dict[str, Any] = (
    {"train_sampling_strategy": "group_by_length"} if int(VERSION.split(".")[0]) >= 5 else {"group_by_length": True}
)


def pattern(function: Any) -> Any:
    RECIPES[function.__name__] = function
    return function


def options(folder: str, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": os.path.join(folder, "run"), "max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 1,
        "learning_rate": 1e-2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
        "seed": 5, **changes,
    }  # fmt: skip


def arguments(folder: str, **changes: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(**options(folder, **changes))


def samples(number: int = 32, labels: int = 3, low: int = 6, high: int = 6) -> list[dict[str, Any]]:
    drawn = random.Random(0)
    return [
        {
            "input_ids": [drawn.randrange(6, 64) for _ in range(drawn.randint(low, high))],
            "labels": drawn.randrange(labels),
        }
        for _ in range(number)
    ]


def classifier(labels: int = 3) -> Any:
    return bert("BertForSequenceClassification", num_labels=labels)


def logged(trainer: Any, **changes: Any) -> Rows:
    """Train, and return what was logged."""
    trainer.train(**changes)
    return rows(trainer)


def rows(trainer: Any) -> Rows:
    return [dict(row) for row in trainer.state.log_history]


def weights(model: Any) -> dict[str, float]:
    """One number for each of a model's tensors."""
    return {name: float(tensor.double().abs().sum()) for name, tensor in model.state_dict().items()}


def files(folder: str) -> list[str]:
    """Names in a checkpoint that both libraries write."""
    wanted = ("config.json", "model.safetensors", "trainer_state.json")
    return sorted(name for name in os.listdir(folder) if name in wanted)


# ---- losses ---------------------------------------------------------------------------------------------------------


@pattern
def weighted_loss(folder: str) -> Rows:
    from transformers import Trainer

    class Weighted(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weight = torch.tensor([1.0, 2.0, 5.0], device=labels.device)
            loss = nn.functional.cross_entropy(outputs.logits, labels, weight=weight)
            return (loss, outputs) if return_outputs else loss

    data = samples()
    trainer = Weighted(classifier(), arguments(folder, eval_strategy="steps", eval_steps=3), train_dataset=data,
                       eval_dataset=data[:4], compute_metrics=accuracy)  # fmt: skip
    return logged(trainer)


@pattern
def loss_function(folder: str) -> Rows:
    from transformers import Trainer

    def focal(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        losses = nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        return ((1 - torch.exp(-losses)) ** 2 * losses).sum() / (num_items_in_batch or len(labels))

    args = arguments(folder, gradient_accumulation_steps=2)
    return logged(Trainer(classifier(), args, train_dataset=samples(64), compute_loss_func=focal))


@pattern
def label_smoothing(folder: str) -> Rows:
    from transformers import Trainer

    data = samples()
    args = arguments(folder, label_smoothing_factor=0.2, eval_strategy="epoch", max_steps=-1, num_train_epochs=1)
    return logged(Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:8]))


@pattern
def distillation(folder: str) -> Rows:
    from transformers import Trainer

    class Distilling(Trainer):
        def __init__(self, *given: Any, teacher: Any, temperature: float = 2.0, **named: Any) -> None:
            super().__init__(*given, **named)
            self.teacher = teacher.to(self.args.device).eval()
            self.temperature = temperature

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            outputs = model(**inputs)
            with torch.no_grad():
                wanted = self.teacher(**{name: each for name, each in inputs.items() if name != "labels"}).logits
            scale = self.temperature
            apart = nn.functional.kl_div(
                nn.functional.log_softmax(outputs.logits / scale, -1),
                nn.functional.softmax(wanted / scale, -1),
                reduction="batchmean",
            )
            loss = 0.5 * outputs.loss + 0.5 * scale**2 * apart
            return (loss, outputs) if return_outputs else loss

    teacher = classifier()
    return logged(Distilling(classifier(), arguments(folder), train_dataset=samples(), teacher=teacher))


@pattern
def several_heads(folder: str) -> Rows:
    from transformers import Trainer

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 16)
            self.kinds, self.scores = nn.Linear(16, 3), nn.Linear(16, 1)

        def forward(self, features: Any, kind: Any = None, score: Any = None) -> dict[str, Any]:
            hidden = torch.tanh(self.body(features))
            kinds, scores = self.kinds(hidden), self.scores(hidden)[:, 0]
            found = {"kinds": kinds, "scores": scores}
            if kind is None:
                return found
            loss = nn.functional.cross_entropy(kinds, kind) + nn.functional.mse_loss(scores, score)
            return {"loss": loss, **found}

    def measured(found: Any) -> dict[str, float]:
        kinds, scores = found.predictions
        kind, score = found.label_ids
        return {"kind": float((kinds.argmax(-1) == kind).mean()), "score": float(np.abs(scores - score).mean())}

    drawn = np.random.default_rng(0)
    data = [
        {"features": drawn.normal(size=8).astype("float32"), "kind": each % 3, "score": float(each % 5)}
        for each in range(32)
    ]
    torch.manual_seed(0)
    args = arguments(folder, label_names=["kind", "score"], eval_strategy="steps", eval_steps=2)
    trainer = Trainer(TwoHeads(), args, train_dataset=data, eval_dataset=data[:8], compute_metrics=measured)
    return logged(trainer)


# ---- callbacks ------------------------------------------------------------------------------------------------------


@pattern
def early_stopping(folder: str) -> Rows:
    from transformers import EarlyStoppingCallback, Trainer

    data = samples(40)
    args = arguments(
        folder, max_steps=60, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False, save_total_limit=1,
    )  # fmt: skip
    trainer = Trainer(classifier(), args, train_dataset=data[:32], eval_dataset=data[32:],
                      callbacks=[EarlyStoppingCallback(early_stopping_patience=2)])  # fmt: skip
    found = logged(trainer)
    best = {"best": trainer.state.best_metric, "checkpoint": Path(trainer.state.best_model_checkpoint).name}
    return [*found, {**best, **weights(trainer.model), "kept": sorted(os.listdir(args.output_dir))[:1]}]


@pattern
def freezing_in_a_callback(folder: str) -> Rows:
    from transformers import Trainer, TrainerCallback

    class Unfreeze(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
            for parameter in model.bert.parameters():
                parameter.requires_grad = False

        def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
            if state.epoch and state.epoch >= 1:
                for parameter in model.bert.parameters():
                    parameter.requires_grad = True

    args = arguments(folder, max_steps=-1, num_train_epochs=2)
    trainer = Trainer(classifier(), args, train_dataset=samples(16), callbacks=[Unfreeze()])
    return [*logged(trainer), weights(trainer.model)]


@pattern
def moving_average_of_weights(folder: str) -> Rows:
    from transformers import Trainer, TrainerCallback

    class MovingAverage(TrainerCallback):
        def __init__(self) -> None:
            self.shadow: dict[str, Any] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
            for name, parameter in model.named_parameters():
                mean = self.shadow.setdefault(name, parameter.detach().clone())
                mean.lerp_(parameter.detach(), 0.1)

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(self.shadow[name])

    data = samples()
    trainer = Trainer(classifier(), arguments(folder), train_dataset=data, eval_dataset=data[:8],
                      callbacks=[MovingAverage])  # fmt: skip
    return [*logged(trainer), trainer.evaluate(), weights(trainer.model)]


@pattern
def log_to_a_file(folder: str) -> Rows:
    from transformers import Trainer, TrainerCallback

    class ToFile(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            if state.is_world_process_zero:
                with open(os.path.join(folder, "log.jsonl"), "a") as file:
                    file.write(json.dumps({"step": state.global_step, **logs}) + "\n")

    trainer = Trainer(classifier(), arguments(folder), train_dataset=samples())
    trainer.add_callback(ToFile)
    trainer.train()
    return [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]


@pattern
def control_from_a_callback(folder: str) -> Rows:
    from transformers import Trainer, TrainerCallback

    class Steering(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
            control.should_evaluate = state.global_step in (2, 3)
            control.should_save = state.global_step == 3
            if state.global_step == 4:
                control.should_training_stop = True
            return control

    data = samples()
    args = arguments(folder, save_strategy="steps", save_steps=100)
    trainer = Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:8], callbacks=[Steering()])
    found = logged(trainer)
    return [*found, {"step": trainer.state.global_step, "saved": "checkpoint-3" in os.listdir(args.output_dir)}]


@pattern
def every_event_in_order(folder: str) -> Rows:
    from transformers import Trainer, TrainerCallback

    events: list[dict[str, Any]] = []

    class Recorder(TrainerCallback):
        pass

    def recorder(name: str) -> Any:
        def event(self: Any, args: Any, state: Any, control: Any, **named: Any) -> None:
            given = sorted(name for name in named if name in ("metrics", "logs", "model", "optimizer", "lr_scheduler"))
            events.append({"event": name, "step": state.global_step, "epoch": float(state.epoch or 0), "given": given})

        return event

    for name in dir(TrainerCallback):
        if name.startswith("on_") and name not in ("on_save", "on_push_begin"):
            setattr(Recorder, name, recorder(name))
    data = samples(16)
    args = arguments(folder, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2, eval_strategy="epoch")
    Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:8], callbacks=[Recorder()]).train()
    return events


@pattern
def copy_of_a_checkpoint(folder: str) -> Rows:
    """A callback that copies each checkpoint when it is there, and one that prunes."""
    from transformers import Trainer, TrainerCallback

    class Copy(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            name = f"checkpoint-{state.global_step}"
            shutil.copytree(os.path.join(args.output_dir, name), os.path.join(folder, "copies", name))

    args = arguments(folder, save_strategy="steps", save_steps=3, save_total_limit=1, max_steps=6)
    trainer = Trainer(classifier(), args, train_dataset=samples(), callbacks=[Copy()])
    found = logged(trainer)
    copies = os.path.join(folder, "copies")
    return [*found, *({"files": files(os.path.join(copies, f"checkpoint-{step}"))} for step in (3, 6))]


@pattern
def best_metric_printed_by_a_callback(folder: str) -> Rows:
    from transformers import Trainer, TrainerCallback

    seen: Rows = []

    class Best(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **named: Any) -> None:
            seen.append({"metrics": sorted(metrics), "loss": metrics["eval_loss"], "before": state.best_metric})

    data = samples()
    args = arguments(
        folder, eval_strategy="steps", eval_steps=2, save_strategy="best", metric_for_best_model="accuracy",
        load_best_model_at_end=True,
    )  # fmt: skip
    trainer = Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:8], compute_metrics=accuracy,
                      callbacks=[Best()])  # fmt: skip
    trainer.train()
    for row in seen:
        row["metrics"] = [name for name in row["metrics"] if name in ("eval_loss", "eval_accuracy", "epoch")]
    return [*seen, {"best": trainer.state.best_metric}]


# ---- optimizers and schedules ---------------------------------------------------------------------------------------


@pattern
def layerwise_learning_rates(folder: str) -> Rows:
    from transformers import Trainer

    class Layerwise(Trainer):
        def create_optimizer(self, *given: Any) -> Any:
            if self.optimizer is None:
                groups = [
                    {"params": [each], "lr": self.args.learning_rate * (0.1 if "embeddings" in name else 1.0)}
                    for name, each in self.model.named_parameters()
                ]
                self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate)
            return self.optimizer

    trainer = Layerwise(classifier(), arguments(folder, warmup_steps=2), train_dataset=samples())
    found = logged(trainer)
    return [*found, weights(trainer.model), {"groups": len(trainer.optimizer.param_groups)}]


@pattern
def own_optimizer_and_schedule(folder: str) -> Rows:
    from transformers import Trainer, get_cosine_with_hard_restarts_schedule_with_warmup

    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 1, 6, num_cycles=2)
    trainer = Trainer(model, arguments(folder), train_dataset=samples(), optimizers=(optimizer, schedule))
    return [*logged(trainer), weights(model)]


@pattern
def own_schedule_in_a_subclass(folder: str) -> Rows:
    from transformers import Trainer

    class Stepped(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if self.lr_scheduler is None:
                self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 2, gamma=0.5)
            return self.lr_scheduler

    return logged(Stepped(classifier(), arguments(folder), train_dataset=samples()))


@pattern
def schedule_by_name(folder: str) -> Rows:
    from transformers import Trainer

    changes = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}, "warmup_steps": 2}
    args = arguments(folder, **changes, optim="sgd", max_grad_norm=0.1, weight_decay=0.1)
    trainer = Trainer(classifier(), args, train_dataset=samples())
    return [*logged(trainer), weights(trainer.model)]


@pattern
def plateau(folder: str) -> Rows:
    from transformers import Trainer

    class EverySecond(Trainer):
        """Lets every second evaluation have an effect on the schedule."""

        def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=self.state.global_step % 2 == 1)

    data = samples()
    args = arguments(
        folder, lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        eval_strategy="steps", eval_steps=1, metric_for_best_model="eval_loss", max_steps=8, learning_rate=0.05,
    )  # fmt: skip
    return [
        row
        for kind in (Trainer, EverySecond)
        for row in logged(kind(classifier(), args, train_dataset=data, eval_dataset=data[:8]))
    ]


# ---- data -----------------------------------------------------------------------------------------------------------


@pattern
def several_evaluation_sets(folder: str) -> Rows:
    from transformers import Trainer

    data = samples(40)
    args = arguments(
        folder, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3, load_best_model_at_end=True,
        metric_for_best_model="eval_hard_loss",
    )  # fmt: skip
    trainer = Trainer(classifier(), args, train_dataset=data[:24], eval_dataset={"easy": data[:8], "hard": data[24:]},
                      compute_metrics=accuracy)  # fmt: skip
    return [*logged(trainer), trainer.evaluate(), {"best": trainer.state.best_metric}]


@pattern
def iterable_dataset(folder: str) -> Rows:
    from torch.utils.data import IterableDataset
    from transformers import Trainer

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(samples(20))

    return logged(Trainer(classifier(), arguments(folder, max_steps=8), train_dataset=Stream()))


@pattern
def own_sampler(folder: str) -> Rows:
    from torch.utils.data import WeightedRandomSampler
    from transformers import Trainer

    class Balanced(Trainer):
        def _get_train_sampler(self, *given: Any) -> Any:
            labels = [each["labels"] for each in self.train_dataset]
            odds = [1 / labels.count(each) for each in labels]
            return WeightedRandomSampler(odds, len(odds), generator=torch.Generator().manual_seed(0))

    return logged(Balanced(classifier(), arguments(folder), train_dataset=samples()))


@pattern
def own_loader(folder: str) -> Rows:
    from torch.utils.data import DataLoader
    from transformers import Trainer

    class Loading(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=5, shuffle=False, collate_fn=self.data_collator)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(eval_dataset or self.eval_dataset, batch_size=2, collate_fn=self.data_collator)

    data = samples(20)
    args = arguments(folder, max_steps=-1, num_train_epochs=2, eval_strategy="epoch")
    return logged(Loading(classifier(), args, train_dataset=data, eval_dataset=data[:8]))


@pattern
def grouped_by_length(folder: str) -> Rows:
    """The order of transformers depends on random numbers drawn before, so only its properties are compared."""
    from transformers import DataCollatorWithPadding, Trainer

    seen: list[list[int]] = []

    class Recording(DataCollatorWithPadding):
        def __call__(self, features: Any) -> Any:
            seen.append([len(each["input_ids"]) for each in features])
            return super().__call__(features)

    data = samples(64, low=3, high=20)
    args = arguments(folder, **GROUPED, max_steps=-1, num_train_epochs=1)
    trainer = Trainer(classifier(), args, train_dataset=data, data_collator=Recording(tokenizer()))
    trainer.train()
    used = [each for each in seen if len(each) == 4][:16]
    padded = sum(max(each) * len(each) - sum(each) for each in used)
    lengths = sorted(length for each in used for length in each)
    return [{"lengths": lengths, "well": padded < 0.1 * sum(lengths), "step": trainer.state.global_step}]


@pattern
def extra_columns_for_the_collator(folder: str) -> Rows:
    from datasets import Dataset
    from transformers import Trainer

    def collate(found: list[Any]) -> dict[str, Any]:
        scale = torch.tensor([float(len(each["note"])) for each in found])
        ids = torch.tensor([each["input_ids"] for each in found])
        return {"input_ids": ids, "labels": torch.tensor([each["labels"] for each in found]), "scale": scale}

    class Scaled(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            scale = inputs.pop("scale")
            outputs = model(**inputs)
            losses = nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
            loss = (losses * scale).mean()
            return (loss, outputs) if return_outputs else loss

    data = Dataset.from_list([{**each, "note": "x" * (number % 4)} for number, each in enumerate(samples())])
    args = arguments(folder, remove_unused_columns=False, eval_strategy="steps", eval_steps=3)
    test = data.select(range(8))
    return logged(Scaled(classifier(), args, train_dataset=data, eval_dataset=test, data_collator=collate))


@pattern
def unused_columns(folder: str) -> Rows:
    from datasets import Dataset
    from transformers import DataCollatorWithPadding, Trainer

    texts = sentences(32)
    data = Dataset.from_list([{**each, "text": text} for each, text in zip(samples(low=3, high=8), texts, strict=True)])
    collator = DataCollatorWithPadding(tokenizer())
    return logged(Trainer(classifier(), arguments(folder), train_dataset=data, data_collator=collator))


@pattern
def workers(folder: str) -> Rows:
    from transformers import Trainer

    data = samples()
    args = arguments(
        folder, dataloader_num_workers=2, dataloader_prefetch_factor=2, dataloader_drop_last=True, eval_steps=3,
        eval_strategy="steps",
    )  # fmt: skip
    return logged(Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:8]))


# ---- evaluation -----------------------------------------------------------------------------------------------------


@pattern
def predict_and_save(folder: str) -> Rows:
    from transformers import Trainer

    data = samples()
    trainer = Trainer(classifier(), arguments(folder), train_dataset=data, compute_metrics=accuracy)
    trainer.train()
    trainer.save_model(os.path.join(folder, "final"))
    found = trainer.predict([{"input_ids": each["input_ids"]} for each in data[:6]])
    loaded = type(trainer.model).from_pretrained(os.path.join(folder, "final"))
    with torch.no_grad():
        again = loaded(torch.tensor([each["input_ids"] for each in data[:6]])).logits
    return [{"labels": found.label_ids, "values": found.predictions.tolist(), "loaded": again.tolist()}]


@pattern
def metrics_with_inputs_and_losses(folder: str) -> Rows:
    from transformers import Trainer

    def measured(found: Any) -> dict[str, float]:
        lengths = (np.asarray(found.inputs) != 0).sum(-1)
        return {"length": float(lengths.mean()), "mean_loss": float(np.mean(found.losses))}

    data = samples()
    args = arguments(folder, include_for_metrics=["inputs", "loss"], eval_strategy="steps", eval_steps=3)
    return logged(Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:16], compute_metrics=measured))


@pattern
def metrics_of_classes(folder: str) -> Rows:
    """A metric object like those of `evaluate`, called by a closure."""
    from transformers import Trainer

    class Metric:
        name = "f1"

        def compute(self, predictions: Any, references: Any, average: str = "macro") -> dict[str, Any]:
            scores = []
            for kind in np.unique(references):
                hits = ((predictions == kind) & (references == kind)).sum()
                scores.append(2 * hits / max(1, (predictions == kind).sum() + (references == kind).sum()))
            return {"f1": np.float64(np.mean(scores))}

    metric = Metric()

    def measured(found: Any) -> Any:
        logits, labels = found
        return metric.compute(predictions=np.argmax(logits, axis=-1), references=labels)

    data = samples()
    args = arguments(folder, eval_strategy="steps", eval_steps=2)
    return logged(Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:16], compute_metrics=measured))


@pattern
def metrics_batch_by_batch(folder: str) -> Rows:
    from transformers import Trainer

    class Running:
        def __init__(self) -> None:
            self.right = self.seen = 0

        def __call__(self, found: Any, compute_result: bool = False) -> dict[str, float]:
            self.right += int((found.predictions.argmax(-1) == found.label_ids).sum())
            self.seen += len(found.label_ids)
            if not compute_result:
                return {}
            result = {"accuracy": self.right / self.seen}
            self.right = self.seen = 0
            return result

    data = samples()
    args = arguments(folder, batch_eval_metrics=True, per_device_eval_batch_size=3, eval_strategy="steps", eval_steps=3)
    return logged(Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:16], compute_metrics=Running()))


@pattern
def evaluation_in_pieces(folder: str) -> Rows:
    from transformers import Trainer

    data = samples()
    args = arguments(
        folder, eval_accumulation_steps=1, per_device_eval_batch_size=3, eval_on_start=True, eval_strategy="steps",
        eval_steps=3, eval_delay=3,
    )  # fmt: skip
    return logged(Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:16], compute_metrics=accuracy))


@pattern
def own_prediction_step(folder: str) -> Rows:
    from transformers import Trainer

    class Predicting(Trainer):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                outputs = model(**inputs)
            return outputs.loss, outputs.logits.softmax(-1), inputs["labels"]

    def confident(found: Any) -> dict[str, float]:
        return {"confidence": float(found.predictions.max(-1).mean())}

    data = samples()
    args = arguments(folder, eval_strategy="steps", eval_steps=3)
    return logged(Predicting(classifier(), args, train_dataset=data, eval_dataset=data[:8], compute_metrics=confident))


@pattern
def own_evaluate(folder: str) -> Rows:
    from transformers import Trainer

    class Evaluating(Trainer):
        def evaluate(self, *given: Any, **named: Any) -> Any:
            metrics = super().evaluate(*given, **named)
            extra = {"eval_perplexity": float(np.exp(metrics["eval_loss"]))}
            self.log(extra)
            return {**metrics, **extra}

    data = samples()
    args = arguments(
        folder, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3, load_best_model_at_end=True,
        metric_for_best_model="eval_perplexity", greater_is_better=False,
    )  # fmt: skip
    trainer = Evaluating(classifier(), args, train_dataset=data, eval_dataset=data[:8])
    return [*logged(trainer), {"best": trainer.state.best_metric}]


@pattern
def generation_options_of_a_call(folder: str) -> Rows:
    from transformers import (
        DataCollatorForSeq2Seq,
        GenerationConfig,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )  # fmt: skip
    )
    data = [{"input_ids": each["input_ids"], "labels": [*each["input_ids"][:3], 1]} for each in samples()]
    longer = GenerationConfig(max_length=6, num_beams=2, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)
    args = Seq2SeqTrainingArguments(**options(folder, predict_with_generate=True, generation_config=longer))
    trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8],
                             data_collator=DataCollatorForSeq2Seq(tokenizer(), model=model))  # fmt: skip
    trainer.train()
    found = trainer.predict(data[:4], max_new_tokens=3, num_beams=1)
    said = [[int(token) for token in row if token not in (0, -100)] for row in found.predictions]
    return [*rows(trainer), trainer.evaluate(max_length=5), {"said": said}]


# ---- the run --------------------------------------------------------------------------------------------------------


@pattern
def resume(folder: str) -> Rows:
    from transformers import Trainer

    def run(steps: int) -> Any:
        args = arguments(folder, save_strategy="steps", save_steps=3, max_steps=steps, lr_scheduler_type="constant")
        return Trainer(classifier(), args, train_dataset=samples(20))

    run(3).train()
    second = run(8)
    second.train(resume_from_checkpoint=True)
    return [*rows(second)[:-1], weights(second.model), {"step": second.state.global_step}]


@pattern
def resume_if_there_is_one(folder: str) -> Rows:
    from transformers import Trainer
    from transformers.trainer_utils import get_last_checkpoint

    found = []
    for steps in (2, 4):
        args = arguments(folder, save_strategy="steps", save_steps=2, max_steps=steps, lr_scheduler_type="constant")
        last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
        found.append({"last": last and Path(last).name})
        trainer = Trainer(classifier(), args, train_dataset=samples(20))
        trainer.train(resume_from_checkpoint=last)
        found += rows(trainer)[:-1]
    return found


@pattern
def weights_only(folder: str) -> Rows:
    from transformers import Trainer

    args = arguments(folder, save_strategy="steps", save_steps=3, save_only_model=True)
    trainer = Trainer(classifier(), args, train_dataset=samples())
    found = logged(trainer)
    place = os.path.join(args.output_dir, "checkpoint-6")
    loaded = type(trainer.model).from_pretrained(place)
    return [*found, {"optimizer": os.path.exists(os.path.join(place, "optimizer.pt")), **weights(loaded)}]


@pattern
def model_init(folder: str) -> Rows:
    from transformers import BertConfig, BertForSequenceClassification, Trainer

    from .scripts import SMALL

    def fresh() -> Any:
        return BertForSequenceClassification(BertConfig(**SMALL, num_labels=3))

    trainer = Trainer(model_init=fresh, args=arguments(folder), train_dataset=samples())
    first = logged(trainer)
    return [*first, *logged(trainer)]


@pattern
def several_seeds(folder: str) -> Rows:
    from transformers import Trainer, set_seed

    found: Rows = []
    for seed in (1, 2):
        set_seed(seed)
        args = arguments(os.path.join(folder, str(seed)), seed=seed, data_seed=seed + 10, max_steps=3)
        found += logged(Trainer(classifier(), args, train_dataset=samples()))
    return found


@pattern
def bfloat16(folder: str) -> Rows:
    from transformers import Trainer

    data = samples()
    args = arguments(folder, bf16=True, bf16_full_eval=False, eval_strategy="steps", eval_steps=3)
    return logged(Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:8]))


@pattern
def gradient_checkpointing(folder: str) -> Rows:
    from transformers import Trainer

    args = arguments(folder, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    return logged(Trainer(classifier(), args, train_dataset=samples()))


@pattern
def compiled(folder: str) -> Rows:
    from transformers import Trainer

    args = arguments(folder, torch_compile=True, torch_compile_backend="eager", max_steps=3)
    return logged(Trainer(classifier(), args, train_dataset=samples()))


@pattern
def steps_and_epochs(folder: str) -> Rows:
    """`max_steps` wins over epochs; strategies as fractions; the first step is logged."""
    from transformers import Trainer

    data = samples(18)
    args = arguments(
        folder, max_steps=10, num_train_epochs=1, logging_strategy="steps", logging_steps=0.25, logging_first_step=True,
        eval_strategy="steps", eval_steps=0.5, warmup_steps=3,
    )  # fmt: skip
    trainer = Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:8])
    state = trainer.train()
    return [*rows(trainer), {"step": state.global_step, "loss": state.training_loss, "epoch": trainer.state.epoch}]


@pattern
def peft_adapter(folder: str) -> Rows:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer

    model = get_peft_model(classifier(), LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS"))
    args = arguments(folder, save_strategy="steps", save_steps=3, label_names=["labels"])
    trainer = Trainer(model, args, train_dataset=samples())
    found = logged(trainer)
    names = os.listdir(os.path.join(args.output_dir, "checkpoint-3"))
    return [*found, {"saved": sorted(name for name in names if name.startswith("adapter"))}]


@pattern
def neftune(folder: str) -> Rows:
    from transformers import Trainer

    args = arguments(folder, neftune_noise_alpha=5.0)
    trainer = Trainer(classifier(), args, train_dataset=samples())
    return [*logged(trainer), {"hooks": len(trainer.model.get_input_embeddings()._forward_hooks)}]


def _script(folder: str) -> str:
    """A script with flags, as on a command line, and the metrics it writes."""
    place = os.path.join(folder, "train.py")
    Path(place).write_text(
        "from dataclasses import dataclass, field\n"
        "from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed\n"
        "from tests.compat.patterns import classifier, samples\n\n"
        "@dataclass\nclass DataArguments:\n"
        "    number: int = field(default=8, metadata={'help': 'samples'})\n"
        "    name: str | None = None\n\n"
        "def main(words):\n"
        "    parser = HfArgumentParser((DataArguments, TrainingArguments))\n"
        "    if len(words) == 1 and words[0].endswith('.json'):\n"
        "        data, args = parser.parse_json_file(json_file=words[0])\n"
        "    else:\n        data, args = parser.parse_args_into_dataclasses(words)\n"
        "    set_seed(args.seed)\n"
        "    trainer = Trainer(classifier(), args, train_dataset=samples(data.number), eval_dataset=samples(8))\n"
        "    if args.do_train:\n        trainer.train()\n"
        "    if args.do_eval:\n        trainer.log_metrics('eval', trainer.evaluate())\n"
        "    return [dict(row) for row in trainer.state.log_history]\n"
    )
    return place


@pattern
def flags_of_a_command_line(folder: str) -> Rows:
    import runpy

    words = [
        "--output_dir", os.path.join(folder, "run"), "--number=24", "--do_train", "--do_eval", "True", "--max_steps=4",
        "--learning_rate", "1e-2", "--logging_steps", "1", "--use_cpu", "--report_to", "none", "--save_strategy", "no",
        "--disable_tqdm", "true", "--lr_scheduler_type", "polynomial", "--lr_scheduler_kwargs", '{"power": 2.0}',
        "--push_to_hub", "False", "--per_device_train_batch_size=4",
    ]  # fmt: skip
    found: Rows = runpy.run_path(_script(folder))["main"](words)
    return found


@pattern
def a_json_file_of_arguments(folder: str) -> Rows:
    import runpy

    place = os.path.join(folder, "arguments.json")
    Path(place).write_text(json.dumps({**options(folder, do_train=True), "number": 24, "name": "mine"}))
    found: Rows = runpy.run_path(_script(folder))["main"]([place])
    return found


@pattern
def arguments_as_a_dict(folder: str) -> Rows:
    """Arguments written to a file and read again, as experiment trackers do."""
    from transformers import Trainer, TrainingArguments

    args = arguments(folder, max_steps=4, weight_decay=0.1)
    again = TrainingArguments(**{name: args.to_dict()[name] for name in options(folder, weight_decay=0.1)})
    json.loads(args.to_json_string())
    return logged(Trainer(classifier(), again, train_dataset=samples()))


@pattern
def own_training_step(folder: str) -> Rows:
    from transformers import Trainer

    class Counting(Trainer):
        seen: list[float]

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.seen.append(float(loss))
            return loss

        def log(self, logs: Any, *given: Any) -> None:
            super().log({**logs, "mean_seen": float(np.mean(self.seen))}, *given)

    trainer = Counting(classifier(), arguments(folder), train_dataset=samples())
    trainer.seen = []
    return logged(trainer)


@pattern
def logs_around_log_save_evaluate(folder: str) -> Rows:
    """An override of `_maybe_log_save_evaluate` that logs before and after the one it overrides."""
    from transformers import Trainer

    seen: Rows = []

    class Around(Trainer):
        def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, model: Any, *given: Any, **named: Any) -> None:
            wanted = {name: getattr(self.control, f"should_{name}") for name in ("log", "evaluate", "save")}
            seen.append({"loss": float(tr_loss), "norm": float(grad_norm), "step": self.state.global_step, **wanted})
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *given, **named)
            if self.state.global_step % 2 == 0:
                self.log({"doubled": 2.0 * self.state.global_step})

    data = samples()
    args = arguments(folder, logging_steps=2, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3)
    trainer = Around(classifier(), args, train_dataset=data, eval_dataset=data[:8])
    found = logged(trainer)
    return [*found, *seen, {"saved": [os.path.isdir(os.path.join(args.output_dir, f"checkpoint-{n}")) for n in (3, 6)]}]


@pattern
def logs_saves_and_evaluates_by_itself(folder: str) -> Rows:
    """An override of `_maybe_log_save_evaluate` that does everything itself, as some trainers of TRL do."""
    from transformers import Trainer

    class Alone(Trainer):
        def _maybe_log_save_evaluate(
            self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, epoch: Any, ignore_keys_for_eval: Any,
            start_time: Any = None, learning_rate: Any = None,
        ) -> None:  # fmt: skip
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                total = float(tr_loss)
                tr_loss -= tr_loss
                logs = {"mine": total / (self.state.global_step - self._globalstep_last_logged)}
                logs |= {"norm": float(grad_norm), "learning_rate": self._get_learning_rate(), "rate": learning_rate}
                self._total_loss_scalar += total
                self._globalstep_last_logged = self.state.global_step
                self.store_flos()
                self.log({**logs, "total": self._total_loss_scalar}, start_time)
            if self.control.should_evaluate:
                metrics = self._evaluate(trial, ignore_keys_for_eval)
                self._determine_best_metric(metrics=metrics, trial=trial)
            if self.control.should_save:
                self._save_checkpoint(model, trial)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def run(steps: int) -> Any:
        args = arguments(
            folder, logging_steps=2, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
            max_steps=steps, lr_scheduler_type="constant",
        )  # fmt: skip
        return Alone(classifier(), args, train_dataset=data, eval_dataset=data[:8])

    data = samples()
    first, second = run(4), run(7)
    found = logged(first)
    second.train(resume_from_checkpoint=os.path.join(folder, "run", "checkpoint-3"))
    return [*found, weights(second.model), {"step": second.state.global_step}]
