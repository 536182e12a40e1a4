"""Trainers as forum threads describe them: subclasses and callbacks that change a step, its data or what is logged."""

from __future__ import annotations

import copy
import math
import os
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from .habits import Plain, vectors
from .patterns import arguments, classifier, logged, rows, samples, weights
from .running import Recipes, Rows
from .scripts import accuracy, bert

RECIPES: Recipes = {}


def question(function: Any) -> Any:
    RECIPES[function.__name__] = function
    return function


def with_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return model


@question
def adversarial_noise_in_a_training_step(folder: str) -> Rows:
    """Two backward passes in a step: the second with embeddings moved along their gradient, which are restored."""
    from transformers import Trainer

    class Adversarial(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            table = model.get_input_embeddings().weight
            before = table.data.clone()
            norm = table.grad.norm()
            if norm != 0 and not torch.isnan(norm):
                table.data.add_(0.5 * table.grad / norm)
            super().training_step(model, inputs, num_items_in_batch)
            table.data = before
            return loss

    args = arguments(folder)
    trainer = Adversarial(classifier(), args, train_dataset=samples(64))
    return [*logged(trainer), weights(trainer.model)]


@question
def two_passes_with_dropout(folder: str) -> Rows:
    """Consistency of two passes with dropout, as a divergence of their distributions."""
    from transformers import Trainer

    class Twice(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            first, second = model(**inputs), model(**inputs)
            p, q = first.logits.log_softmax(-1), second.logits.log_softmax(-1)
            apart = F.kl_div(p, q, log_target=True, reduction="batchmean")
            apart = (apart + F.kl_div(q, p, log_target=True, reduction="batchmean")) / 2
            loss = (first.loss + second.loss) / 2 + apart
            return (loss, first) if return_outputs else loss

    trainer = Twice(with_dropout(classifier()), arguments(folder), train_dataset=samples(), compute_metrics=accuracy)
    return [*logged(trainer), trainer.evaluate(samples(8))]


@question
def losses_logged_inside_compute_loss(folder: str) -> Rows:
    """`self.log` called for the parts of a loss, whose weight grows with the steps."""
    from transformers import Trainer

    class Parts(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**inputs)
            penalty = outputs.logits.pow(2).mean()
            share = min(1.0, self.state.global_step / max(1, self.state.max_steps))
            if model.training:
                self.log({"ce": outputs.loss.item(), "penalty": penalty.item(), "share": share})
            loss = outputs.loss + share * penalty
            return (loss, outputs) if return_outputs else loss

    return logged(Parts(classifier(), arguments(folder), train_dataset=samples()))


@question
def the_arguments_of_log(folder: str) -> Rows:
    """What an overridden `log` is called with: rows of training with a start, summaries and evaluations without."""
    from transformers import Trainer

    seen: Rows = []

    class Named(Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            seen.append({"kind": "named", "started": start_time is not None, "names": sorted(logs)})
            super().log(logs, start_time)

    class Renamed(Trainer):
        def log(self, values: dict[str, float], begun: float | None = None) -> None:
            seen.append({"kind": "renamed", "started": begun is not None, "loss": values.get("loss")})
            super().log(values, begun)

    class Starred(Trainer):
        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            seen.append({"kind": "starred", "args": len(args), "kwargs": sorted(kwargs)})
            super().log(logs, *args, **kwargs)

    for kind in (Named, Renamed, Starred):
        args = arguments(os.path.join(folder, kind.__name__), max_steps=2, eval_strategy="steps", eval_steps=2)
        trainer = kind(classifier(), args, train_dataset=samples(), eval_dataset=samples(8))
        trainer.evaluate()
        trainer.train()
        trainer.predict(samples(4))
    return seen


@question
def names_of_metrics_before_and_after_training(folder: str) -> Rows:
    """The names of the metrics of evaluations and predictions, also those that measure time."""
    from transformers import Trainer

    found: Rows = []
    for early in (True, False):
        place = os.path.join(folder, str(early))
        trainer = Trainer(classifier(), arguments(place, max_steps=2, eval_strategy="steps", eval_steps=1),
                          train_dataset=samples(), eval_dataset={"a": samples(8), "b": samples(4)})  # fmt: skip
        if early:
            found.append({"names": sorted(trainer.predict(samples(4)).metrics)})
            found.append({"names": sorted(trainer.evaluate())})
        trainer.train()
        found.append({"names": sorted(trainer.evaluate(samples(4), metric_key_prefix="late"))})
        found.append({"names": sorted(trainer.predict(samples(4)).metrics)})
        found += [{"names": sorted(row)} for row in trainer.state.log_history]
    return found


@question
def an_evaluation_of_the_training_data_by_a_callback(folder: str) -> Rows:
    """A callback that evaluates the training data after every epoch and keeps the control as it was."""
    from transformers import Trainer, TrainerCallback

    class OnTrainingData(TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if control.should_evaluate:
                kept = copy.deepcopy(control)
                self.trainer.evaluate(eval_dataset=self.trainer.train_dataset, metric_key_prefix="train")
                return kept
            return None

    args = arguments(folder, max_steps=-1, num_train_epochs=2, eval_strategy="epoch", logging_strategy="epoch")
    data = samples(16)
    trainer = Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:6], compute_metrics=accuracy)
    trainer.add_callback(OnTrainingData(trainer))
    return logged(trainer)


@question
def stops_below_a_loss_and_saves(folder: str) -> Rows:
    from transformers import Trainer, TrainerCallback

    class Enough(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
            if logs and logs.get("loss", 9.0) < 1.0:
                control.should_training_stop = True
                control.should_save = True
            return control

    trainer = Trainer(classifier(), arguments(folder, max_steps=40), train_dataset=samples(8), callbacks=[Enough()])
    found = logged(trainer)
    saved = sorted(name for name in os.listdir(trainer.args.output_dir) if name.startswith("checkpoint"))
    return [*found, {"step": trainer.state.global_step, "saved": saved, "epoch": trainer.state.epoch}]


class Lookahead(torch.optim.AdamW):
    """An optimizer of the user: slow weights that follow the fast ones."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        if not self.steps:
            self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        loss = super().step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for parameter, kept in zip(group["params"], slow, strict=True):
                    kept.add_(parameter.data - kept, alpha=0.5)
                    parameter.data.copy_(kept)
        return loss


@question
def an_optimizer_with_slow_weights(folder: str) -> Rows:
    from transformers import Trainer, get_cosine_schedule_with_warmup

    class Looking(Trainer):
        def create_optimizer(self, *given: Any) -> Any:
            decayed = [p for name, p in self.model.named_parameters() if "bias" not in name]
            others = [p for name, p in self.model.named_parameters() if "bias" in name]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 5e-3}]
            self.optimizer = Lookahead(groups, lr=self.args.learning_rate)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = get_cosine_schedule_with_warmup(self.optimizer, 2, num_training_steps)
            return self.lr_scheduler

    trainer = Looking(classifier(), arguments(folder, max_grad_norm=0.5), train_dataset=samples())
    return [*logged(trainer), weights(trainer.model), {"lr": trainer.lr_scheduler.get_last_lr()}]


@question
def predictions_with_dropout(folder: str) -> Rows:
    """Several passes in training mode for one prediction."""
    from transformers import Trainer

    class Sampled(Trainer):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            inputs = self._prepare_inputs(inputs)
            model.train()
            torch.manual_seed(11)
            with torch.no_grad():
                found = [model(**inputs) for _ in range(3)]
            model.eval()
            logits = torch.stack([each.logits for each in found]).mean(0)
            loss = torch.stack([each.loss for each in found]).mean()
            return loss, logits, inputs["labels"]

    data = samples()
    trainer = Sampled(with_dropout(classifier()), arguments(folder), train_dataset=data, compute_metrics=accuracy)
    found = [*logged(trainer), trainer.evaluate(data[:10])]
    output = trainer.predict(data[:6])
    return [*found, {"sum": float(output.predictions.sum()), "loss": output.metrics["test_loss"]}]


@question
def distilled_with_hidden_states(folder: str) -> Rows:
    from transformers import Trainer

    class Student(Trainer):
        def __init__(self, *args: Any, teacher: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.teacher = teacher.to(self.args.device).eval()

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            mine = model(**inputs, output_hidden_states=True)
            with torch.no_grad():
                known = self.teacher(**inputs, output_hidden_states=True)
            soft = F.kl_div((mine.logits / 2).log_softmax(-1), (known.logits / 2).softmax(-1), reduction="batchmean")
            near = F.mse_loss(mine.hidden_states[-1], known.hidden_states[-1])
            loss = 0.5 * mine.loss + 4 * soft + 0.1 * near
            return (loss, mine) if return_outputs else loss

    teacher = classifier()
    with torch.no_grad():
        teacher.classifier.weight.mul_(3)
    args = arguments(folder, eval_strategy="steps", eval_steps=3)
    data = samples(48)

    def measured(predicted: Any) -> dict[str, float]:
        logits, hidden = predicted.predictions
        right = (logits.argmax(-1) == predicted.label_ids).mean()
        return {"accuracy": float(right), "hidden": float(sum(np.abs(each).mean() for each in hidden))}

    trainer = Student(classifier(), args, train_dataset=data, eval_dataset=data[:8], compute_metrics=measured,
                      teacher=teacher)  # fmt: skip
    return logged(trainer)


@question
def several_labels_with_weights(folder: str) -> Rows:
    from transformers import Trainer

    class Weighted(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            positive = torch.tensor([1.0, 2.0, 4.0], device=outputs.logits.device)
            loss = F.binary_cross_entropy_with_logits(outputs.logits, labels, pos_weight=positive)
            return (loss, outputs) if return_outputs else loss

    def measured(predicted: Any) -> dict[str, float]:
        chosen = 1 / (1 + np.exp(-predicted.predictions)) > 0.5
        return {"exact": float((chosen == predicted.label_ids.astype(bool)).all(-1).mean())}

    data = [{**each, "labels": [float(each["labels"] == k or k == 0) for k in range(3)]} for each in samples()]
    model = bert("BertForSequenceClassification", num_labels=3, problem_type="multi_label_classification")
    args = arguments(folder, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=3)
    trainer = Weighted(model, args, train_dataset=data, eval_dataset=data[:12], compute_metrics=measured)
    return logged(trainer)


@question
def samples_with_weights_of_their_own(folder: str) -> Rows:
    """A column that the model does not take, used by the loss."""
    from transformers import Trainer

    class Weighted(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            weight = inputs.pop("weight")
            outputs = model(**inputs)
            each = F.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
            loss = (each * weight).sum() / weight.sum()
            return (loss, outputs) if return_outputs else loss

    data = [{**each, "weight": float(1 + number % 3)} for number, each in enumerate(samples())]
    args = arguments(folder, remove_unused_columns=False, eval_strategy="steps", eval_steps=3)
    trainer = Weighted(classifier(), args, train_dataset=data, eval_dataset=data[:8], compute_metrics=accuracy)
    return logged(trainer)


@question
def pairs_against_the_batch(folder: str) -> Rows:
    """Contrastive learning with the other samples of a batch as negatives."""
    from transformers import Trainer

    class Contrastive(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            left = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            right = model(input_ids=inputs["others"], attention_mask=inputs["attention_mask"])
            a, b = (F.normalize(each.last_hidden_state[:, 0], dim=-1) for each in (left, right))
            loss = F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a), device=a.device))
            return (loss, {"loss": loss, "a": a, "b": b}) if return_outputs else loss

    def collated(batch: list[Any]) -> dict[str, Any]:
        ids = torch.tensor([each["input_ids"] for each in batch])
        return {"input_ids": ids, "others": ids.flip(1), "attention_mask": torch.ones_like(ids)}

    args = arguments(folder, remove_unused_columns=False, gradient_accumulation_steps=2, prediction_loss_only=True,
                     eval_strategy="steps", eval_steps=3)  # fmt: skip
    model = bert("BertModel")
    data = [{"input_ids": each["input_ids"]} for each in samples(48)]
    trainer = Contrastive(model, args, data_collator=collated, train_dataset=data, eval_dataset=data[:8])
    return logged(trainer)


class Growing(Dataset[Any]):
    """Easier samples first: how many there are depends on the epoch."""

    def __init__(self, data: list[Any]) -> None:
        self.data, self.shift = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[(index + self.shift) % len(self.data)]


class EpochOrder(Sampler[int]):
    """A sampler with an epoch, as users write them for curricula."""

    def __init__(self, data: Any) -> None:
        self.data, self.epoch = data, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = list(range(len(self.data)))
        return iter(order if self.epoch % 2 == 0 else order[::-1])

    def __len__(self) -> int:
        return len(self.data)


@question
def a_sampler_and_data_that_change_with_the_epoch(folder: str) -> Rows:
    from transformers import Trainer, TrainerCallback

    class Ordered(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return EpochOrder(self.train_dataset)

    class Shift(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kw: Any) -> None:
            train_dataloader.dataset.shift = int(state.epoch or 0)

    args = arguments(folder, max_steps=-1, num_train_epochs=3, per_device_train_batch_size=4)
    trainer = Ordered(classifier(), args, train_dataset=Growing(samples(12)), callbacks=[Shift()])
    return logged(trainer)


class Tasks:
    """Batches of several tasks in turn, as a loader of an own class."""

    def __init__(self, loaders: dict[str, Any]) -> None:
        self.loaders = loaders
        self.dataset = [None] * sum(len(each.dataset) for each in loaders.values())

    def __len__(self) -> int:
        return sum(map(len, self.loaders.values()))

    def __iter__(self) -> Any:
        order = [name for name, each in self.loaders.items() for _ in range(len(each))]
        chosen = np.random.RandomState(3).permutation(len(order))
        running = {name: iter(each) for name, each in self.loaders.items()}
        for at in chosen:
            yield next(running[order[at]])


@question
def tasks_in_turn(folder: str) -> Rows:
    from transformers import Trainer

    class Both(Trainer):
        def get_train_dataloader(self) -> Any:
            return Tasks({
                name: DataLoader(each, batch_size=4, collate_fn=self.data_collator)
                for name, each in self.train_dataset.items()
            })  # fmt: skip

    args = arguments(folder, max_steps=-1, num_train_epochs=2)
    data = {"a": samples(12), "b": samples(16)[4:]}
    return logged(Both(classifier(), args, train_dataset=data))


class Lines(IterableDataset[Any]):
    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        yield from self.data


@question
def a_stream_accumulated_and_resumed(folder: str) -> Rows:
    from transformers import Trainer

    args = arguments(folder, gradient_accumulation_steps=3, max_steps=8, save_strategy="steps", save_steps=3)
    found = logged(Trainer(Plain(), args, train_dataset=Lines(vectors(48))))
    again = Trainer(Plain(), args, train_dataset=Lines(vectors(48)))
    again.train(resume_from_checkpoint=os.path.join(args.output_dir, "checkpoint-3"))
    return [*found, *[{"loss": row["loss"]} for row in rows(again)[3:-1]]]


@question
def smoothed_and_resumed(folder: str) -> Rows:
    from transformers import DataCollatorWithPadding, Trainer

    from .recipes import tokenizer

    args = arguments(folder, max_steps=-1, num_train_epochs=2, label_smoothing_factor=0.1, save_strategy="steps",
                     save_steps=5)  # fmt: skip
    data = samples(32, low=4, high=14)

    def made() -> Any:
        return Trainer(classifier(), args, data_collator=DataCollatorWithPadding(tokenizer()), train_dataset=data)

    found = logged(made())
    again = made()
    again.train(resume_from_checkpoint=os.path.join(args.output_dir, "checkpoint-10"))
    return [*found, *[{"loss": row["loss"]} for row in rows(again)[10:-1]]]


@question
def labels_of_an_own_name(folder: str) -> Rows:
    from transformers import Trainer

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(4, 3)

        def forward(self, features: Any, target: Any = None, aside: Any = None) -> Any:
            logits = self.inner(features)
            if target is None:
                return {"logits": logits}
            return {"loss": F.cross_entropy(logits, target), "logits": logits, "hidden": features * 2}

    drawn = torch.Generator().manual_seed(0)
    data = [{"features": torch.randn(4, generator=drawn), "target": torch.tensor(k % 3)} for k in range(24)]

    def measured(predicted: Any) -> dict[str, float]:
        logits, hidden = predicted.predictions
        return {"right": float((logits.argmax(-1) == predicted.label_ids).mean()), "sum": float(hidden.sum())}

    args = arguments(folder, label_names=["target"], eval_strategy="steps", eval_steps=3)
    trainer = Trainer(Own(), args, train_dataset=data, eval_dataset=data[:9], compute_metrics=measured)
    found = logged(trainer)
    output = trainer.predict([{"features": each["features"]} for each in data[:5]])
    return [*found, {"predictions": len(output.predictions), "labels": output.label_ids is None}]


@question
def perplexity_from_reduced_logits(folder: str) -> Rows:
    from transformers import DataCollatorForLanguageModeling, Trainer

    from .recipes import llama, tokenizer

    def reduced(logits: Any, labels: Any) -> Any:
        logits = logits[0] if isinstance(logits, tuple) else logits
        return logits.argmax(-1), logits.logsumexp(-1)

    def measured(predicted: Any) -> dict[str, float]:
        chosen, size = predicted.predictions
        labels = predicted.label_ids[:, 1:]
        kept = labels != -100
        return {"right": float((chosen[:, :-1] == labels)[kept].mean()), "size": float(size[:, :-1][kept].mean())}

    words = tokenizer()
    data = [{"input_ids": each["input_ids"]} for each in samples(24, low=8, high=8)]
    args = arguments(folder, eval_strategy="steps", eval_steps=3, eval_accumulation_steps=1,
                     per_device_eval_batch_size=3)  # fmt: skip
    trainer = Trainer(llama(), args, data_collator=DataCollatorForLanguageModeling(words, mlm=False),
                      train_dataset=data, eval_dataset=data[:10], compute_metrics=measured,
                      preprocess_logits_for_metrics=reduced)  # fmt: skip
    found = logged(trainer)
    return [*found, {"perplexity": math.exp(trainer.evaluate()["eval_loss"])}]


@question
def a_second_model_that_follows(folder: str) -> Rows:
    """A teacher that is a moving average of the model, updated after each step, and saved by an own `save_model`."""
    from transformers import Trainer

    class Followed(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.follower = copy.deepcopy(self.model)

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            with torch.no_grad():
                for kept, live in zip(self.follower.parameters(), model.parameters(), strict=True):
                    kept.mul_(0.9).add_(live, alpha=0.1)
            return loss

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            torch.save(self.follower.state_dict(), os.path.join(output_dir or self.args.output_dir, "follower.pt"))

    args = arguments(folder, save_strategy="steps", save_steps=3)
    trainer = Followed(classifier(), args, train_dataset=samples())
    found = logged(trainer)
    state = torch.load(os.path.join(args.output_dir, "checkpoint-3", "follower.pt"))
    return [*found, {"sum": float(sum(each.double().sum() for each in state.values()))}, weights(trainer.follower)]
