"""More scripts as users write them for transformers' Trainer: attributes, overrides and objects used in odd ways."""

from __future__ import annotations

import gc
import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from .patterns import arguments, classifier, logged, options, rows, samples, weights
from .recipes import llama, sentences, tokenizer
from .running import Recipes, Rows
from .scripts import accuracy

RECIPES: Recipes = {}


def habit(function: Any) -> Any:
    RECIPES[function.__name__] = function
    return function


class Plain(nn.Module):
    """A model without a configuration that takes and returns what a user chooses."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, outputs)

    def forward(self, features: Any, labels: Any = None) -> Any:
        logits = self.head(torch.tanh(self.body(features)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if loss is not None else {"logits": logits}


def vectors(number: int = 32, labels: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(seed)
    return [
        {
            "features": torch.randn(6, generator=drawn),
            "labels": int(torch.randint(labels, (1,), generator=drawn)),
        }
        for _ in range(number)
    ]


# ---- losses ---------------------------------------------------------------------------------------------------------


@habit
def class_weights_divided_by_the_items_of_the_update(folder: str) -> Rows:
    from transformers import Trainer

    class Weighted(Trainer):
        def __init__(self, *given: Any, class_weights: Any = None, **named: Any) -> None:
            super().__init__(*given, **named)
            self.class_weights = torch.tensor(class_weights).to(self.args.device)

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.get("labels")
            outputs = model(**inputs)
            logits = outputs.get("logits")
            loss = F.cross_entropy(logits, labels, weight=self.class_weights, reduction="sum")
            count = num_items_in_batch if num_items_in_batch is not None else labels.numel()
            return (loss / count, outputs) if return_outputs else loss / count

    args = arguments(folder, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3)
    data = samples()
    return logged(Weighted(classifier(), args, None, data, data[:10], class_weights=[1.0, 2.0, 0.5]))


@habit
def things_that_are_no_tensors_in_a_batch(folder: str) -> Rows:
    from transformers import Trainer

    class Focused(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            names, none = inputs.pop("names"), inputs.pop("nothing")
            assert none is None and all(isinstance(name, str) for name in names)
            outputs = model(**inputs)
            loss = outputs["loss"] + 0.1 * len(set(names)) * outputs["logits"].pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    def collate(given: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "features": torch.stack([each["features"] for each in given]),
            "labels": torch.tensor([each["labels"] for each in given]),
            "names": [f"sample {each['labels']}" for each in given],
            "nothing": None,
        }

    args = arguments(folder, remove_unused_columns=False)
    return logged(Focused(Plain(), args, data_collator=collate, train_dataset=vectors()))


@habit
def a_loss_for_each_sample_averaged_as_with_several_gpus(folder: str) -> Rows:
    from transformers import Trainer

    class Averaged(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            logits = model(**inputs)["logits"]
            loss = F.cross_entropy(logits, labels, reduction="none").mean()
            return (loss, {"logits": logits}) if return_outputs else loss

    data = vectors()
    args = arguments(folder, eval_strategy="epoch", max_steps=-1, num_train_epochs=1.5, label_names=["labels"])
    return logged(Averaged(Plain(), args, train_dataset=data, eval_dataset=data[:9], compute_metrics=accuracy))


@habit
def labels_in_two_columns(folder: str) -> Rows:
    from transformers import Trainer

    class TwoHeads(Plain):
        def forward(self, features: Any, kind: Any = None, size: Any = None) -> Any:
            logits = self.head(torch.tanh(self.body(features)))
            if kind is None:
                return (logits[:, :3], logits[:, 3:])
            loss = F.cross_entropy(logits[:, :3], kind) + F.mse_loss(logits[:, 3], size)
            return loss, logits[:, :3], logits[:, 3:]

    def metrics(prediction: Any) -> dict[str, float]:
        (kinds, sizes), (kind, size) = prediction.predictions, prediction.label_ids
        return {"kind": float((kinds.argmax(-1) == kind).mean()), "size": float(np.abs(sizes[:, 0] - size).mean())}

    data = [
        {"features": each["features"], "kind": each["labels"], "size": float(each["labels"]) / 2} for each in vectors()
    ]
    args = arguments(folder, eval_strategy="steps", eval_steps=2, label_names=["kind", "size"])
    return logged(Trainer(TwoHeads(4), args, train_dataset=data, eval_dataset=data[:10], compute_metrics=metrics))


# ---- data -----------------------------------------------------------------------------------------------------------


@habit
def rare_classes_drawn_more_often(folder: str) -> Rows:
    from transformers import Trainer

    class Balanced(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            given = self.train_dataset if dataset is None else dataset
            counts = np.bincount([each["labels"] for each in given])
            shares = [1.0 / counts[each["labels"]] for each in given]
            drawn = torch.Generator().manual_seed(self.args.seed)
            return WeightedRandomSampler(shares, len(shares), generator=drawn)

    args = arguments(folder, max_steps=-1, num_train_epochs=2)
    return logged(Balanced(classifier(), args, train_dataset=samples()))


@habit
def batches_of_an_own_loader(folder: str) -> Rows:
    from transformers import Trainer

    class Loaded(Trainer):
        def get_train_dataloader(self) -> Any:
            order = [[index, index + 1, index + 2] for index in range(0, 30, 3)]
            return DataLoader(self.train_dataset, batch_sampler=order, collate_fn=self.data_collator)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(eval_dataset or self.eval_dataset, batch_size=5, collate_fn=self.data_collator)

    args = arguments(folder, max_steps=-1, num_train_epochs=2, eval_strategy="epoch")
    data = samples()
    return logged(Loaded(classifier(), args, train_dataset=data, eval_dataset=data[:10], compute_metrics=accuracy))


@habit
def shuffled_loaders_prepared_by_the_accelerator(folder: str) -> Rows:
    from transformers import Trainer

    class Prepared(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(
                DataLoader(self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator)
            )

    class Batched(Trainer):
        def get_train_dataloader(self) -> Any:
            order = RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(self.args.seed))
            batches = BatchSampler(order, 4, drop_last=True)
            loader = DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)
            return self.accelerator.prepare_data_loader(loader)

    found: Rows = []
    for kind in (Prepared, Batched):
        args = arguments(os.path.join(folder, kind.__name__), max_steps=-1, num_train_epochs=3, save_strategy="steps",
                         save_steps=4)  # fmt: skip
        found += logged(kind(classifier(), args, train_dataset=samples(12)))
        again = kind(classifier(), args, train_dataset=samples(12))
        again.train(resume_from_checkpoint=os.path.join(args.output_dir, "checkpoint-4"))
        found += [{"loss": row["loss"]} for row in rows(again)[4:-1]]
    return found


@habit
def transforms_of_a_dataset(folder: str) -> Rows:
    from datasets import Dataset, DatasetDict
    from transformers import Trainer

    made = Dataset.from_list(samples(40))
    parts = DatasetDict({"train": made.select(range(30)), "test": made.select(range(30, 40))})

    def shifted(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "input_ids": [[(each + 1) % 64 for each in row] for row in batch["input_ids"]]}

    args = arguments(folder, eval_strategy="steps", eval_steps=3, remove_unused_columns=False)
    trainer = Trainer(
        classifier(), args, train_dataset=parts["train"].with_transform(shifted),
        eval_dataset=parts["test"].with_format("torch"),
    )  # fmt: skip
    return logged(trainer)


@habit
def a_stream_made_by_a_generator(folder: str) -> Rows:
    from datasets import IterableDataset
    from transformers import Trainer

    def made() -> Any:
        yield from samples(24)

    args = arguments(folder, max_steps=10, eval_strategy="steps", eval_steps=5)
    stream = IterableDataset.from_generator(made).shuffle(seed=1, buffer_size=8)
    trainer = Trainer(classifier(), args, train_dataset=stream, eval_dataset=IterableDataset.from_generator(made))
    return logged(trainer)


@habit
def evaluation_sets_by_name_and_the_best_of_one(folder: str) -> Rows:
    from transformers import Trainer

    data = samples()
    sets = {"easy": data[:8], "hard": data[8:20]}
    args = arguments(
        folder, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="eval_hard_accuracy", greater_is_better=True,
    )  # fmt: skip
    trainer = Trainer(classifier(), args, train_dataset=data, eval_dataset=sets, compute_metrics=accuracy)
    found = logged(trainer)
    again = trainer.evaluate(sets["easy"], metric_key_prefix="easy")
    return [*found, {"best": trainer.state.best_metric, "step": trainer.state.best_global_step}, again]


# ---- evaluation -----------------------------------------------------------------------------------------------------


@habit
def batches_of_predictions_kept_apart(folder: str) -> Rows:
    from transformers import Trainer

    shapes: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        shapes.append([list(np.shape(each)) for each in prediction.predictions])
        logits, labels = (np.concatenate(each) for each in (prediction.predictions, prediction.label_ids))
        return {"accuracy": float((logits.argmax(-1) == labels).mean())}

    data = samples(low=4, high=9)
    args = arguments(folder, eval_do_concat_batches=False, eval_strategy="steps", eval_steps=3,
                     per_device_eval_batch_size=3)  # fmt: skip
    trainer = Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:10], processing_class=tokenizer(),
                      compute_metrics=metrics)  # fmt: skip
    found = logged(trainer)
    output = trainer.predict(data[:7])
    kinds = [type(output.predictions).__name__, [list(np.shape(each)) for each in output.predictions]]
    return [*found, {"shapes": shapes, "kinds": kinds}]


@habit
def ids_of_tokens_instead_of_logits(folder: str) -> Rows:
    from transformers import DataCollatorForLanguageModeling, Trainer

    tokens = tokenizer()
    data = [dict(tokens(text)) for text in sentences(24, 4, 12)]

    def metrics(prediction: Any) -> dict[str, float]:
        ids, labels = prediction
        kept = labels[:, 1:] != -100
        return {"right": float((ids[:, :-1] == labels[:, 1:])[kept].mean()), "width": float(ids.shape[1])}

    args = arguments(folder, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=8)
    trainer = Trainer(
        llama(), args, train_dataset=data, eval_dataset=data[:8], compute_metrics=metrics, processing_class=tokens,
        data_collator=DataCollatorForLanguageModeling(tokens, mlm=False),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )  # fmt: skip
    return logged(trainer)


@habit
def many_labels_and_numbers_as_labels(folder: str) -> Rows:
    from transformers import Trainer

    found: Rows = []
    for kind in ("multi_label_classification", "regression"):
        model = classifier()
        model.config.problem_type = kind
        data = [{**each, "labels": [float(each["labels"] == number) for number in range(3)]} for each in samples()]
        args = arguments(os.path.join(folder, kind), eval_strategy="epoch", max_steps=-1, num_train_epochs=1)
        found += logged(Trainer(model, args, train_dataset=data, eval_dataset=data[:6]))
    return found


@habit
def outputs_that_are_ignored(folder: str) -> Rows:
    from transformers import Trainer
    from transformers.modeling_outputs import SequenceClassifierOutput

    class Talkative(Plain):
        def forward(self, features: Any, labels: Any = None) -> Any:
            hidden = torch.tanh(self.body(features))
            logits = self.head(hidden)
            loss = None if labels is None else F.cross_entropy(logits, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=(features, hidden))

    data = vectors()
    args = arguments(folder)
    trainer = Trainer(Talkative(), args, train_dataset=data, eval_dataset=data[:6])
    found = logged(trainer)
    all_of_them = trainer.predict(data[:6])
    some = trainer.predict(data[:6], ignore_keys=["hidden_states"])
    return [*found, {"all": len(all_of_them.predictions), "some": list(np.shape(some.predictions)), **some.metrics}]


@habit
def an_evaluation_loop_called_by_hand(folder: str) -> Rows:
    from transformers import Trainer

    data = samples()
    trainer = Trainer(classifier(), arguments(folder), train_dataset=data, eval_dataset=data[:10],
                      compute_metrics=accuracy)  # fmt: skip
    loader = trainer.get_eval_dataloader()
    output = trainer.evaluation_loop(
        loader, description="By hand", prediction_loss_only=False, metric_key_prefix="mine"
    )
    model = trainer._wrap_model(trainer.model, training=False)
    steps = []
    for inputs in loader:
        loss, logits, labels = trainer.prediction_step(model, inputs, prediction_loss_only=False)
        steps += [[float(loss), list(logits.shape), list(labels.shape)]]
    numbers = {name: output.metrics[f"mine_{name}"] for name in ("loss", "accuracy")}
    return [{"samples": output.num_samples, **numbers}, {"steps": steps, "length": len(loader)}]


# ---- training by hand -----------------------------------------------------------------------------------------------


@habit
def an_own_loop_over_the_steps_of_a_trainer(folder: str) -> Rows:
    from transformers import Trainer

    trainer = Trainer(classifier(), arguments(folder, seed=1), train_dataset=samples())
    trainer.create_optimizer_and_scheduler(num_training_steps=8)
    trainer.current_gradient_accumulation_steps = 1
    model, found = trainer.model, []
    model.train()
    for number, inputs in enumerate(trainer.get_train_dataloader()):
        loss = trainer.training_step(model, inputs)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.optimizer.zero_grad()
        found.append({"step": number, "loss": float(loss), "rate": trainer.lr_scheduler.get_last_lr()[0]})
    return [*found, weights(model)]


@habit
def a_backward_through_the_accelerator(folder: str) -> Rows:
    from transformers import Trainer

    class Handmade(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs)
            if self.args.n_gpu > 1:
                loss = loss.mean()
            loss = loss / self.args.gradient_accumulation_steps
            with self.accelerator.autocast():
                extra = 1e-3 * sum(each.pow(2).sum() for each in self.accelerator.unwrap_model(model).parameters())
            self.accelerator.backward(loss + extra / self.args.gradient_accumulation_steps)
            return loss.detach()

        def prediction_step(self, *given: Any, **named: Any) -> Any:
            loss, logits, labels = super().prediction_step(*given, **named)
            self.seen = getattr(self, "seen", 0) + len(self.accelerator.gather_for_metrics(labels))
            return loss, logits, labels

    data = vectors()
    args = arguments(folder, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3)
    trainer = Handmade(Plain(), args, train_dataset=data, eval_dataset=data[:10], compute_metrics=accuracy)
    found = logged(trainer)
    accelerator = trainer.accelerator
    accelerator.wait_for_everyone()
    state = {
        "seen": trainer.seen, "main": accelerator.is_main_process, "local": accelerator.is_local_main_process,
        "processes": accelerator.num_processes, "index": accelerator.process_index, "device": str(accelerator.device),
        "accumulation": accelerator.gradient_accumulation_steps, "precision": str(accelerator.mixed_precision),
        "kind": str(accelerator.distributed_type.value), "sync": accelerator.sync_gradients,
        "sums": accelerator.reduce(torch.tensor([1.0, 2.0]), reduction="sum").tolist(),
        "padded": accelerator.pad_across_processes(torch.ones(2, 2), dim=1).tolist(),
    }  # fmt: skip
    return [*found, state]


@habit
def trained_twice_with_other_arguments(folder: str) -> Rows:
    from transformers import Trainer

    trainer = Trainer(classifier(), arguments(folder, max_steps=3), train_dataset=samples())
    found = logged(trainer)
    trainer.args.max_steps, trainer.args.learning_rate = 5, 5e-3
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train_dataset = samples(12)
    return [*found, *logged(trainer), {"step": trainer.state.global_step, "epoch": trainer.state.epoch}]


# ---- optimizers and models ------------------------------------------------------------------------------------------


@habit
def an_optimizer_without_a_schedule(folder: str) -> Rows:
    from transformers import Trainer

    found: Rows = []
    model = classifier()
    groups = [{"params": model.bert.parameters(), "lr": 1e-3}, {"params": model.classifier.parameters(), "lr": 1e-1}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    args = arguments(folder, warmup_steps=2, lr_scheduler_type="cosine")
    trainer = Trainer(model, args, train_dataset=samples(), optimizers=(optimizer, None))
    found += logged(trainer)
    other = Trainer(classifier(), arguments(folder, max_steps=3), train_dataset=samples(),
                    optimizer_cls_and_kwargs=(torch.optim.RMSprop, {"lr": 1e-3, "alpha": 0.9}))  # fmt: skip
    found += logged(other)
    return [*found, {"rates": [group["lr"] for group in trainer.optimizer.param_groups]}]


@habit
def a_model_made_for_a_trial(folder: str) -> Rows:
    from transformers import Trainer, set_seed

    made: list[Any] = []

    def init(trial: Any = None) -> Any:
        made.append(trial)
        with torch.random.fork_rng():  # transformers' order of samples would depend on the seed that is set here
            return Plain()

    set_seed(3)
    args = arguments(folder, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
                     load_best_model_at_end=True)  # fmt: skip
    data = vectors()
    trainer = Trainer(args=args, model_init=init, train_dataset=data, eval_dataset=data[:6])
    return [*logged(trainer), {"made": len(made), "trials": made}, weights(trainer.model)]


@habit
def adapters_with_gradient_checkpointing(folder: str) -> Rows:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import DataCollatorForLanguageModeling, Trainer

    tokens = tokenizer()
    data = [dict(tokens(text)) for text in sentences(24, 4, 12)]

    def model() -> Any:
        base = llama()
        base.enable_input_require_grads()
        torch.manual_seed(0)
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    args = arguments(folder, gradient_checkpointing=True, save_strategy="steps", save_steps=3,
                     gradient_checkpointing_kwargs={"use_reentrant": False})  # fmt: skip
    collate = DataCollatorForLanguageModeling(tokens, mlm=False)
    trainer = Trainer(model(), args, collate, data)
    found = logged(trainer)
    checkpoint = os.path.join(args.output_dir, "checkpoint-3")
    other = Trainer(model(), args, collate, data)
    other.train(resume_from_checkpoint=checkpoint)
    loaded = PeftModel.from_pretrained(llama(), checkpoint)
    names = sorted(name for name in os.listdir(checkpoint) if name.startswith("adapter"))
    return [*found, rows(other)[-2], {"names": names, **weights(other.model)}, weights(loaded)]


@habit
def a_plain_module_saved_and_loaded(folder: str) -> Rows:
    from safetensors.torch import load_file
    from transformers import Trainer

    trainer = Trainer(Plain(), arguments(folder, max_steps=3), train_dataset=vectors())
    trainer.train()
    place = os.path.join(folder, "model")
    trainer.save_model(place)
    saved = load_file(os.path.join(place, "model.safetensors"))
    return [{"names": sorted(saved)}, {name: float(each.abs().sum()) for name, each in saved.items()}]


# ---- overrides and callbacks ----------------------------------------------------------------------------------------


@habit
def values_added_to_logs(folder: str) -> Rows:
    from transformers import Trainer

    class Noted(Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            if "loss" in logs:
                logs["perplexity"] = float(np.exp(logs["loss"]))
            logs["started"] = float(start_time is not None)
            super().log(logs, start_time)

    trainer = Noted(Plain(), arguments(folder, max_steps=3), train_dataset=vectors(), eval_dataset=vectors(6))
    found = logged(trainer)
    trainer.log({"mine": 1.0})
    return [*found, trainer.evaluate(), *rows(trainer)[-2:]]


@habit
def callbacks_that_come_and_go(folder: str) -> Rows:
    from transformers import Trainer, TrainerCallback, TrainerControl

    told: list[Any] = []

    class Once(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            told.append(["once", state.global_step, round(named["lr_scheduler"].get_last_lr()[0], 8)])

    class Manager(TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self.trainer, self.once = trainer, Once()

        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
            if state.global_step == 1:
                self.trainer.add_callback(self.once)
            if state.global_step == 3:
                told.append(["removed", self.trainer.pop_callback(Once) is self.once])
            for group in named["optimizer"].param_groups:
                group["weight_decay"] = 0.1 * state.global_step
            return control

        def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> Any:
            told.append(["epoch", state.global_step, len(named["train_dataloader"]), model is self.trainer.model])
            return TrainerControl(should_log=True, should_evaluate=True)

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **named: Any) -> None:
            told.append(["evaluated", sorted(key for key in metrics if "per_second" not in key and "time" not in key)])

    args = arguments(folder, max_steps=-1, num_train_epochs=1, logging_strategy="no")
    trainer = Trainer(Plain(), args, train_dataset=vectors(20), eval_dataset=vectors(6))
    trainer.add_callback(Manager(trainer))
    found = logged(trainer)
    return [*found, {"told": told}, weights(trainer.model)]


@habit
def a_callback_that_predicts_and_stops_epochs(folder: str) -> Rows:
    from transformers import Trainer, TrainerCallback

    told: list[Any] = []

    class Predicts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
            model.eval()
            with torch.no_grad():
                told.append(float(model(torch.ones(1, 6))["logits"].sum()))
            if state.global_step % 3 == 0:
                control.should_epoch_stop = True

    args = arguments(folder, max_steps=-1, num_train_epochs=3)
    model = Plain()
    model.tail = nn.Dropout(0.5)
    trainer = Trainer(model, args, train_dataset=vectors(), callbacks=[Predicts])
    found = logged(trainer)
    return [*found, {"told": told, "steps": trainer.state.global_step, "training": model.training}]


@habit
def a_trainer_with_more_arguments(folder: str) -> Rows:
    from transformers import Trainer, TrainingArguments

    @dataclass
    class MyArguments(TrainingArguments):
        alpha: float = field(default=0.5, metadata={"help": "weight of the second term"})
        names: list[str] | None = field(default=None, metadata={"help": "names"})

        def __post_init__(self) -> None:
            super().__post_init__()
            self.doubled = 2 * self.alpha

    class Mine(Trainer):
        args: MyArguments

        def __init__(self, model: Any, args: Any, *, scale: float = 1.0, **named: Any) -> None:
            self.scale = scale
            super().__init__(model=model, args=args, **named)

        def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, *given, **named)
            factor = self.scale * self.args.doubled
            return (loss[0] * factor, loss[1]) if isinstance(loss, tuple) else loss * factor

        def push_to_hub(self, *given: Any, **named: Any) -> str:
            return "nowhere"

        def init_hf_repo(self, token: Any = None) -> None:
            raise AssertionError("nothing is pushed")

    args = MyArguments(**options(folder), alpha=0.25, names=["a", "b"])
    trainer = Mine(Plain(), args, scale=2.0, train_dataset=vectors(), eval_dataset=vectors(6))
    found = logged(trainer)
    known = json.loads(args.to_json_string())
    return [*found, {"alpha": known["alpha"], "names": known["names"], "pushed": trainer.push_to_hub()},
            trainer.evaluate()]  # fmt: skip


# ---- arguments ------------------------------------------------------------------------------------------------------


@habit
def dataclasses_read_from_a_command_line(folder: str) -> Rows:
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    @dataclass
    class ModelArguments:
        width: int = field(default=8)
        model_name: str | None = field(default=None)

    @dataclass
    class DataArguments:
        count: int = field(metadata={"help": "samples"})
        shuffle: bool = field(default=False)

    words = ["--output_dir", os.path.join(folder, "run"), "--count", "16", "--shuffle", "--max_steps", "3",
             "--learning_rate", "0.01", "--report_to", "none", "--use_cpu", "--logging_steps", "1",
             "--disable_tqdm", "true", "--save_strategy", "no", "--lr_scheduler_kwargs", '{"num_cycles": 2}',
             "--lr_scheduler_type", "cosine", "--logging_first_step", "--warmup_steps", "1", "rest"]  # fmt: skip
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, args, rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    trainer = Trainer(Plain(), args, train_dataset=vectors(data_args.count))
    found = logged(trainer)
    (read,) = HfArgumentParser(TrainingArguments).parse_dict({"output_dir": folder, "seed": 7, "logging_steps": 0.5})
    file = Path(folder, "arguments.json")
    file.write_text(json.dumps({"output_dir": folder, "weight_decay": 0.1, "eval_strategy": "epoch"}))
    (again,) = HfArgumentParser(TrainingArguments).parse_json_file(str(file))
    facts = {
        "width": model_args.width, "shuffle": data_args.shuffle, "rest": rest, "kwargs": args.lr_scheduler_kwargs,
        "first": args.logging_first_step, "seed": read.seed, "steps": read.logging_steps, "decay": again.weight_decay,
        "strategy": str(again.eval_strategy.value),
    }  # fmt: skip
    return [*found, facts]


@habit
def what_scripts_read_from_arguments_and_trainers(folder: str) -> Rows:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import IntervalStrategy, get_last_checkpoint

    args = arguments(folder, per_device_eval_batch_size=5, warmup_steps=0.25, save_strategy="steps", save_steps=3)
    trainer = Trainer(Plain(), args, train_dataset=vectors())
    before = {
        "optimizer": trainer.optimizer is None, "schedule": trainer.lr_scheduler is None, "trains": trainer.is_in_train,
        "labels": trainer.label_names, "can": trainer.can_return_loss, "kwargs": trainer.model_accepts_loss_kwargs,
        "wrapped": trainer.model_wrapped is trainer.model, "place": trainer.place_model_on_device,
        "collator": getattr(trainer.data_collator, "__name__", type(trainer.data_collator).__name__),
        "first": trainer.is_world_process_zero(), "compute": trainer.compute_metrics, "step": trainer.state.global_step,
        "samples": trainer.num_examples(trainer.get_train_dataloader()), "trial": trainer.hp_search_backend,
        "precision": [trainer.use_apex if hasattr(trainer, "use_apex") else False, args.fp16, args.bf16],
    }  # fmt: skip
    trainer.train()
    with args.main_process_first(desc="work"):
        last = get_last_checkpoint(args.output_dir)
    copied = TrainingArguments(**{**args.to_dict(), "seed": 6})
    facts = {
        "sizes": [args.train_batch_size, args.eval_batch_size, args.n_gpu, args.world_size, args.process_index],
        "device": str(args.device), "mode": args.parallel_mode.value, "warmup": args.get_warmup_steps(40),
        "last": os.path.basename(last or ""), "same": args.save_strategy == IntervalStrategy.STEPS, "seed": copied.seed,
        "save": [args.should_save, args.should_log], "level": args.get_process_log_level(),
        "state": sorted(set(json.loads(Path(last or "", "trainer_state.json").read_text())) & STATE),
        "parameters": trainer.get_num_trainable_parameters(), "rates": trainer.get_learning_rates(),
        "names": sorted(trainer.get_decay_parameter_names(trainer.model)), "timeout": str(args.ddp_timeout_delta),
    }  # fmt: skip
    return [before, facts]


STATE = {"best_metric", "epoch", "global_step", "log_history", "max_steps", "num_train_epochs", "stateful_callbacks"}


@habit
def fractions_as_intervals(folder: str) -> Rows:
    from transformers import Trainer

    args = arguments(
        folder, max_steps=-1, num_train_epochs=2.5, logging_steps=0.1, eval_strategy="steps", eval_steps=0.3,
        save_strategy="steps", save_steps=0.3, save_total_limit=2, dataloader_drop_last=True, warmup_steps=0.2,
        logging_first_step=True, eval_on_start=True, eval_delay=3,
        include_num_input_tokens_seen="non_padding", load_best_model_at_end=True,
    )  # fmt: skip
    data = samples(33, low=4, high=9)
    trainer = Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:9], processing_class=tokenizer())
    found = logged(trainer)
    folders = sorted(each for each in os.listdir(args.output_dir) if each.startswith("checkpoint"))
    return [*found, {"folders": folders, "tokens": int(trainer.state.num_input_tokens_seen)}]


@habit
def variables_of_torchrun_for_one_process(folder: str) -> Rows:
    import torch.distributed as dist
    from transformers import Trainer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(given)
    try:
        args = arguments(folder, max_steps=3, ddp_backend="gloo")
        trainer = Trainer(Plain(), args, train_dataset=vectors())
        found = logged(trainer)
        is_first = trainer.is_world_process_zero()
        # Freed before the process group: torch may deadlock if a DDP model is the last to refer to it.
        trainer.model_wrapped = trainer.accelerator = trainer = None
        gc.collect()
        return [*found, {"world": args.world_size, "rank": args.process_index, "first": is_first}]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in given:
            os.environ.pop(name, None)


@habit
def metrics_written_as_the_examples_do(folder: str) -> Rows:
    from transformers import Trainer

    data = samples()
    args = arguments(folder, eval_strategy="epoch", max_steps=-1, num_train_epochs=1)
    trainer = Trainer(classifier(), args, train_dataset=data, eval_dataset=data[:8], compute_metrics=accuracy)
    result = trainer.train()
    metrics = {**result.metrics, "train_samples": len(data)}
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    evaluated = trainer.evaluate()
    trainer.save_metrics("eval", evaluated)
    predicted = trainer.predict(data[:5], metric_key_prefix="predict")
    trainer.save_metrics("predict", predicted.metrics, combined=False)
    everything = json.loads(Path(args.output_dir, "all_results.json").read_text())
    names = sorted(each for each in os.listdir(args.output_dir) if each.endswith("results.json"))
    kinds = [type(result).__name__, type(predicted).__name__, result.global_step]
    return [everything, {"names": names, "kinds": kinds}, predicted.metrics]


@habit
def what_both_libraries_refuse(folder: str) -> Rows:
    from transformers import Trainer

    def raised(function: Any) -> bool:
        try:
            function()
        except Exception:
            return True
        return False

    data = vectors()
    wrong: dict[str, Any] = {
        "no model": lambda: Trainer(args=arguments(folder)),
        "a model and a function": lambda: Trainer(Plain(), arguments(folder), model_init=Plain),
        "no data": lambda: Trainer(Plain(), arguments(folder)).train(),
        "no evaluation data": lambda: Trainer(Plain(), arguments(folder, eval_strategy="steps"), train_dataset=data),
        "an unknown argument": lambda: arguments(folder, learning_rat=1.0),
        "an unknown strategy": lambda: arguments(folder, save_strategy="sometimes"),
        "an unknown optimizer": lambda: arguments(folder, optim="adamw_best"),
        "a missing checkpoint": lambda: Trainer(Plain(), arguments(folder), train_dataset=data).train(
            resume_from_checkpoint=os.path.join(folder, "nothing")),
        "no checkpoint": lambda: Trainer(Plain(), arguments(folder), train_dataset=data).train(
            resume_from_checkpoint=True),
        "a file of DeepSpeed": lambda: arguments(folder, deepspeed=os.path.join(folder, "missing.json")),
        "fsdp without processes": lambda: arguments(folder, fsdp="full_shard shard_grad_op"),
        "fp16 and bf16": lambda: arguments(folder, fp16=True, bf16=True),
        "best without evaluation": lambda: arguments(folder, load_best_model_at_end=True, save_strategy="steps"),
    }  # fmt: skip
    return [{name: raised(function) for name, function in wrong.items()}]
