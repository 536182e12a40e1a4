"""Scripts that use the files of checkpoints, the arguments of events and the state of a trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from .patterns import arguments, classifier, logged, options, rows, samples, weights
from .recipes import llama, sentences, tokenizer
from .running import Recipes, Rows

RECIPES: Recipes = {}

OWN = ("manifest.json", "progress.json", "arguments.json", "weights.json", "report.html", "metrics.jsonl", "run.json",
       "run.lock", "current_run.json", "time_ledger.json", "report", "report.data.js")  # fmt: skip
"""Files that loopwright writes besides those of transformers."""


def routine(function: Any) -> Any:
    RECIPES[function.__name__] = function
    return function


def names_in(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name not in OWN and not name.startswith("."))


# ---- files ----------------------------------------------------------------------------------------------------------


@routine
def files_of_checkpoints_and_models(folder: str) -> Rows:
    from transformers import Trainer

    args = arguments(folder, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3)
    trainer = Trainer(
        classifier(), args, train_dataset=samples(), eval_dataset=samples(8), processing_class=tokenizer()
    )
    trainer.train()
    trainer.save_model()
    trainer.save_model(os.path.join(folder, "final"))
    trainer.save_state()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    return [
        {"checkpoint": names_in(os.path.join(args.output_dir, "checkpoint-3"))},
        {"final": names_in(os.path.join(folder, "final"))},
        {"output": names_in(args.output_dir)},
    ]


@routine
def tools_that_read_checkpoints(folder: str) -> Rows:
    """The files of a checkpoint, read without a trainer."""
    from transformers import AutoModelForSequenceClassification, Trainer, TrainerState

    args = arguments(folder, save_strategy="steps", save_steps=3, max_steps=6, weight_decay=0.1, warmup_steps=2)
    trainer = Trainer(classifier(), args, train_dataset=samples())
    trainer.train()
    place = Path(args.output_dir, "checkpoint-3")
    optimizer = torch.load(place / "optimizer.pt")
    schedule = torch.load(place / "scheduler.pt")
    saved = torch.load(place / "training_args.bin", weights_only=False)
    state = TrainerState.load_from_json(str(place / "trainer_state.json"))
    own = torch.optim.AdamW([{"params": group["params"]} for group in trainer.optimizer.param_groups], lr=1.0)
    own.load_state_dict(optimizer)
    model = AutoModelForSequenceClassification.from_pretrained(place)
    random = torch.load(place / "rng_state.pth", weights_only=False)
    return [
        {"rates": [group["lr"] for group in optimizer["param_groups"]],
         "decay": [group["weight_decay"] for group in optimizer["param_groups"]],
         "states": len(optimizer["state"]), "slots": sorted(optimizer["state"][0]),
         "moments": float(sum(each["exp_avg"].abs().sum() for each in own.state_dict()["state"].values()))},
        {"last_epoch": schedule["last_epoch"], "rates": schedule["_last_lr"], "bases": schedule["base_lrs"]},
        {"rate": saved.learning_rate, "steps": saved.max_steps, "seed": saved.seed, "kind": type(saved).__name__},
        {"step": state.global_step, "epoch": state.epoch, "rows": len(state.log_history), "total": state.max_steps},
        {"random": sorted(random)},
        weights(model),
    ]  # fmt: skip


@routine
def the_state_written_to_a_checkpoint(folder: str) -> Rows:
    from transformers import EarlyStoppingCallback, Trainer

    args = arguments(folder, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
                     load_best_model_at_end=True, metric_for_best_model="loss")  # fmt: skip
    trainer = Trainer(classifier(), args, train_dataset=samples(), eval_dataset=samples(8),
                      callbacks=[EarlyStoppingCallback(3)])  # fmt: skip
    trainer.train()
    state = json.loads(Path(args.output_dir, "checkpoint-4", "trainer_state.json").read_text())
    history = state.pop("log_history")
    callbacks = state.pop("stateful_callbacks")
    state["best_model_checkpoint"] = os.path.basename(state["best_model_checkpoint"])
    state.pop("samples_seen", None)
    return [{name: value for name, value in state.items() if name != "total_flos"}, *history,
            {"callbacks": sorted(set(callbacks) & {"EarlyStoppingCallback", "TrainerControl"})},
            callbacks["EarlyStoppingCallback"]["args"], callbacks["TrainerControl"]["args"]]  # fmt: skip


# ---- events ---------------------------------------------------------------------------------------------------------


@routine
def what_events_are_given(folder: str) -> Rows:
    from transformers import Trainer, TrainerCallback

    seen: dict[str, list[str]] = {}

    class Watch(TrainerCallback):
        pass

    for event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:

        def note(self: Any, args: Any, state: Any, control: Any, event: str = event, **kwargs: Any) -> None:
            seen.setdefault(
                event,
                sorted(
                    f"{name}: {type(value).__name__}" if name in ("logs", "metrics") else name
                    for name, value in kwargs.items()
                ),
            )

        setattr(Watch, event, note)

    class Reading(TrainerCallback):
        def __init__(self) -> None:
            self.found: Rows = []

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None,
                        lr_scheduler: Any = None, train_dataloader: Any = None, **kwargs: Any) -> None:  # fmt: skip
            self.found.append({
                "rate": optimizer.param_groups[0]["lr"], "last": lr_scheduler.get_last_lr()[0],
                "batches": len(train_dataloader), "step": state.global_step, "epoch": state.epoch,
                "gradients": sum(each.grad is not None for each in model.parameters()), "mode": model.training,
                "flags": [control.should_log, control.should_save, control.should_evaluate],
                "intervals": [state.logging_steps, state.save_steps, state.eval_steps], "size": state.train_batch_size,
            })  # fmt: skip

    reading = Reading()
    args = arguments(folder, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=2, logging_steps=2)
    trainer = Trainer(classifier(), args, train_dataset=samples(), eval_dataset=samples(8),
                      processing_class=tokenizer(), callbacks=[Watch(), reading])  # fmt: skip
    found = logged(trainer)
    trainer.predict(samples(4))
    return [*found, *reading.found, seen]


@routine
def progress_displays_of_the_user(folder: str) -> Rows:
    """The printed rows come from a class of the user, in the place of the one that every trainer begins with."""
    from transformers import PrinterCallback, ProgressCallback, Trainer

    printed: Rows = []

    class Own(PrinterCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            printed.append({name: value for name, value in logs.items() if name != "total_flos"})

    class Bar(ProgressCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            super().on_log(args, state, control, logs=logs, **kwargs)
            printed.append({"bar": state.global_step, "total": self.training_bar.total, "n": self.training_bar.n})

    trainer = Trainer(classifier(), arguments(folder), train_dataset=samples())
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Own)
    trainer.train()
    trainer = Trainer(classifier(), arguments(folder, disable_tqdm=False), train_dataset=samples())
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Bar)
    trainer.train()
    return printed


# ---- data -----------------------------------------------------------------------------------------------------------


@routine
def samplers_and_loaders_overridden(folder: str) -> Rows:
    from transformers import Trainer, default_data_collator

    class Own(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            data = eval_dataset if eval_dataset is not None else self.eval_dataset
            return self.accelerator.prepare(DataLoader(data, batch_size=3, collate_fn=self.data_collator))

        def get_test_dataloader(self, test_dataset: Any) -> Any:
            return DataLoader(test_dataset, batch_size=2, collate_fn=default_data_collator)

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        made = default_data_collator(batch)
        return {**made, "token_type_ids": torch.zeros_like(made["input_ids"]), "names": ["x"] * len(batch)}

    class Dropped(Own):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            inputs.pop("names", None)
            return super().compute_loss(model, inputs, **kwargs)

        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            inputs.pop("names", None)
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    args = arguments(folder, eval_strategy="steps", eval_steps=3, remove_unused_columns=False)
    trainer = Dropped(classifier(), args, data_collator=collate, train_dataset=samples(), eval_dataset=samples(9))
    found = logged(trainer)
    output = trainer.predict(samples(4), metric_key_prefix="final")
    return [*found, dict(output.metrics), {"sum": float(np.abs(output.predictions).sum())},
            {"length": [len(trainer.get_train_dataloader()), len(trainer.get_eval_dataloader())]}]  # fmt: skip


@routine
def a_shuffled_stream_of_datasets_resumed(folder: str) -> Rows:
    from datasets import Dataset
    from transformers import Trainer

    def made(place: str, **changes: Any) -> Any:
        stream = Dataset.from_list(samples(40)).to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=8)
        args = arguments(place, save_strategy="steps", save_steps=4, max_steps=8, **changes)
        return Trainer(classifier(), args, train_dataset=stream)

    first = made(folder)
    found = logged(first)
    second = made(folder)
    second.train(resume_from_checkpoint=os.path.join(first.args.output_dir, "checkpoint-4"))
    return [*found, *({f"resumed_{name}": value for name, value in row.items()} for row in rows(second))]


class Endless(IterableDataset):  # type: ignore[misc]
    """Samples without an end."""

    def __iter__(self) -> Any:
        while True:
            yield from samples(12)


@routine
def epochs_that_do_not_divide(folder: str) -> Rows:
    """Everything once an epoch, with accumulation that leaves a shorter last step; a stream without an end."""
    from transformers import Trainer

    common: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 3, "gradient_accumulation_steps": 3,
                              "logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch",
                              "save_total_limit": 1}  # fmt: skip
    found: Rows = []
    for change in ({}, {"dataloader_drop_last": True}, {"num_train_epochs": 1.5}, {"save_total_limit": 2}):
        place = os.path.join(folder, str(len(found)))
        args = arguments(place, **{**common, **change})
        trainer = Trainer(classifier(), args, train_dataset=samples(35 if change.get("dataloader_drop_last") else 32),
                          eval_dataset=samples(8))  # fmt: skip
        trainer.model_accepts_loss_kwargs = False
        found += logged(trainer)
        kept = sorted(name for name in os.listdir(args.output_dir) if name.startswith("checkpoint"))
        found.append({"kept": kept, "steps": trainer.state.global_step})
    return [*found, *logged(Trainer(classifier(), arguments(folder), train_dataset=Endless()))]


# ---- evaluation -----------------------------------------------------------------------------------------------------


@routine
def metrics_of_odd_types(folder: str) -> Rows:
    from transformers import Trainer

    def measured(given: Any) -> dict[str, Any]:
        logits, labels = given
        right = logits.argmax(-1) == labels
        return {"mean": np.float32(right.mean()), "count": right.sum(), "tensor": torch.tensor(0.5).item(),
                "whole": int(right.sum()), "eval_named": 0.25}  # fmt: skip

    args = arguments(folder, eval_strategy="steps", eval_steps=3, include_num_input_tokens_seen="all")
    trainer = Trainer(classifier(), args, train_dataset=samples(), eval_dataset=samples(9), compute_metrics=measured)
    found = logged(trainer)
    again = trainer.evaluate(samples(5), metric_key_prefix="test")
    third = trainer.evaluate(eval_dataset={"one": samples(4), "two": samples(6)})
    return [*found, again, third, {"types": sorted({type(value).__name__ for value in again.values()})}]


@routine
def metrics_named_as_the_trainers_own(folder: str) -> Rows:
    """Metrics called `loss` and `runtime`, one with a prefix, and the order in which all of them are logged."""
    from transformers import Trainer

    def measured(given: Any) -> dict[str, Any]:
        return {"loss": 42.0, "accuracy": 0.5, "eval_prefixed": 1, "runtime": 3}

    data = samples(8)
    args = arguments(folder, max_steps=2, eval_strategy="steps", eval_steps=2)
    trainer = Trainer(classifier(), args, train_dataset=data, eval_dataset=data, compute_metrics=measured)
    logged(trainer)
    names = [{"names": [*row]} for row in (*trainer.state.log_history, trainer.predict(data).metrics)]
    return [*rows(trainer), trainer.evaluate(), *names]


@routine
def a_loss_without_labels_and_metrics_of_its_outputs(folder: str) -> Rows:
    """A reward model of pairs: no label names, and batches that ask for a loss with `return_loss`."""
    from transformers import Trainer

    class Reward(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            rewards = model(input_ids=inputs["input_ids"]).logits
            better, worse = rewards[::2], rewards[1::2]
            loss = -torch.nn.functional.logsigmoid(better - worse).mean()
            return (loss, {"better": better, "worse": worse}) if return_outputs else loss

    def collate(pairs: list[Any]) -> dict[str, Any]:
        return {"input_ids": torch.tensor([ids for pair in pairs for ids in pair["ids"]]), "return_loss": True}

    def measured(given: Any) -> dict[str, Any]:
        better, worse = given.predictions
        return {"accuracy": float((better > worse).mean()), "labels": len(given.label_ids)}

    found = samples(32)
    pairs = zip(found[::2], found[1::2], strict=True)
    data = [{"ids": [each["input_ids"], other["input_ids"]]} for each, other in pairs]
    args = arguments(folder, remove_unused_columns=False, label_names=[], eval_strategy="steps", eval_steps=3)
    trainer = Reward(classifier(1), args, data_collator=collate, train_dataset=data, eval_dataset=data,
                     compute_metrics=measured)  # fmt: skip
    trained = logged(trainer)
    predicted = trainer.predict(data)
    shapes = [list(each.shape) for each in predicted.predictions]
    return [*trained, predicted.metrics, {"shapes": shapes, "labels": repr(predicted.label_ids)}]


@routine
def the_best_model_and_a_second_run(folder: str) -> Rows:
    from transformers import EarlyStoppingCallback, Trainer

    def made() -> Any:
        args = arguments(folder, save_strategy="epoch", eval_strategy="epoch", max_steps=-1, num_train_epochs=4,
                         load_best_model_at_end=True, metric_for_best_model="eval_accuracy", save_total_limit=2,
                         learning_rate=5e-2, restore_callback_states_from_checkpoint=True)  # fmt: skip
        return Trainer(
            classifier(), args, train_dataset=samples(24), eval_dataset=samples(9),
            compute_metrics=lambda given: {"accuracy": float((given.predictions.argmax(-1) == given.label_ids).mean())},
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.01)],
        )  # fmt: skip

    first = made()
    found = logged(first)
    state = first.state
    found.append({"best": state.best_metric, "step": state.best_global_step, "end": state.global_step,
                  "place": os.path.basename(state.best_model_checkpoint or "")})  # fmt: skip
    found.append(weights(first.model))
    second = made()
    second.train(resume_from_checkpoint=True)
    return [*found, weights(second.model), {"best": second.state.best_metric}]


@routine
def generated_ids_compared_with_labels(folder: str) -> Rows:
    """A metric that compares generated ids and labels position by position."""
    from transformers import (
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )  # fmt: skip

    torch.manual_seed(0)
    words, found = tokenizer(), []
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0,
                 pad_token_id=0, eos_token_id=1, dropout_rate=0.0)
    )  # fmt: skip
    data = [{"input_ids": words(text)["input_ids"], "labels": words(text)["input_ids"][:5]} for text in sentences(16)]

    def measured(given: Any) -> dict[str, float]:
        predictions, labels = given
        labels = np.where(labels == -100, 0, labels)
        found.append({"shapes": [list(predictions.shape), list(labels.shape)]})
        return {"same": float((predictions == labels).mean())}

    args = Seq2SeqTrainingArguments(**options(folder, predict_with_generate=True, generation_max_length=6,
                                              eval_strategy="steps", eval_steps=3))  # fmt: skip
    trainer = Seq2SeqTrainer(model, args, train_dataset=data, eval_dataset=data[:8], processing_class=words,
                             data_collator=DataCollatorForSeq2Seq(words, model), compute_metrics=measured)  # fmt: skip
    losses = logged(trainer)
    trainer.predict(data[:5], max_new_tokens=4, num_beams=1)
    return [*losses, *found]


# ---- overrides ------------------------------------------------------------------------------------------------------


@routine
def saving_overridden(folder: str) -> Rows:
    """Files of the user in checkpoints, by `_save`, `_save_checkpoint` and `save_model`."""
    from transformers import Trainer

    class Own(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            Path(output_dir or self.args.output_dir, "own.txt").write_text(str(self.state.global_step))

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            place = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            assert (place / "trainer_state.json").is_file()
            (place / "after.txt").write_text("after")

    args = arguments(folder, save_strategy="steps", save_steps=2, save_total_limit=2)
    trainer = Own(classifier(), args, train_dataset=samples(), processing_class=tokenizer())
    found = logged(trainer)
    kept = sorted(name for name in os.listdir(args.output_dir) if name.startswith("checkpoint"))
    again = Own(classifier(), args, train_dataset=samples(), processing_class=tokenizer())
    again.train(resume_from_checkpoint=os.path.join(args.output_dir, "checkpoint-4"))
    return [*found, {"kept": kept, "files": names_in(os.path.join(args.output_dir, "checkpoint-4"))},
            weights(trainer.model), weights(again.model)]  # fmt: skip


@routine
def optimizers_and_schedules_overridden(folder: str) -> Rows:
    from transformers import Trainer, get_cosine_schedule_with_warmup

    class Own(Trainer):
        def create_optimizer(self, *given: Any) -> Any:
            decay = self.get_decay_parameter_names(self.model)
            groups = [
                {"params": [each for name, each in self.model.named_parameters() if name in decay],
                 "weight_decay": 0.1},
                {"params": [each for name, each in self.model.named_parameters() if name not in decay],
                 "weight_decay": 0.0, "lr": 1e-3},
            ]  # fmt: skip
            kind, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = kind(groups, **kwargs)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = get_cosine_schedule_with_warmup(self.optimizer, 2, num_training_steps)
            return self.lr_scheduler

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            logs = {**logs, "rates": self.get_learning_rates(), "trained": self.get_num_trainable_parameters()}
            super().log(logs, start_time)

    args = arguments(folder, save_strategy="steps", save_steps=3, optim="adamw_torch", adam_beta2=0.95)
    first = Own(classifier(), args, train_dataset=samples())
    found = logged(first)
    second = Own(classifier(), args, train_dataset=samples())
    second.train(resume_from_checkpoint=os.path.join(args.output_dir, "checkpoint-3"))
    return [*found, weights(first.model), weights(second.model)]


@routine
def names_read_by_scripts(folder: str) -> Rows:
    from transformers import Trainer, TrainerState
    from transformers.trainer_utils import get_last_checkpoint

    args = arguments(folder, save_strategy="steps", save_steps=3, bf16=False, warmup_steps=0.5)
    trainer = Trainer(classifier(), args, train_dataset=samples())
    before = {"optimizer": trainer.optimizer is None, "schedule": trainer.lr_scheduler is None,
              "callbacks": trainer.callback_handler.callback_list.count("\n") >= 1}  # fmt: skip
    output = trainer.train()
    trainer.state.save_to_json(os.path.join(folder, "state.json"))
    state = TrainerState.load_from_json(os.path.join(folder, "state.json"))
    last = get_last_checkpoint(args.output_dir)
    return [
        before,
        {"step": output.global_step, "loss": output.training_loss},
        {"names": sorted(set(output.metrics) - {"total_flos"})},
        {"last": os.path.basename(last), "step": state.global_step, "zero": trainer.is_world_process_zero()},
        {"rank": args.local_rank, "world": args.world_size, "gpus": args.n_gpu, "mode": args.parallel_mode.value,
         "device": str(args.device), "batch": args.train_batch_size, "eval": args.eval_batch_size,
         "main": trainer.accelerator.is_main_process, "warmup": args.get_warmup_steps(10),
         "same": trainer.accelerator.unwrap_model(trainer.model_wrapped) is trainer.model},
        {"dict": sorted(set(args.to_dict()) & {"learning_rate", "optim", "lr_scheduler_type", "seed"}),
         "optim": args.optim.value, "type": args.lr_scheduler_type.value, "text": args.eval_strategy.value},
        {"name": args.run_name, "label": trainer.label_names, "ga": trainer.current_gradient_accumulation_steps},
    ]  # fmt: skip


# ---- TRL ------------------------------------------------------------------------------------------------------------


@routine
def sft_of_assistants_only(folder: str) -> Rows:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    words = tokenizer()
    words.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} "
        "<eos> {% endgeneration %}{% else %}{{ message['role'] }} {{ message['content'] }} <eos> {% endif %}"
        "{% endfor %}"
    )
    texts = sentences(24)
    data = Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": texts[i]}, {"role": "assistant", "content": texts[-i]}]}
            for i in range(12)
        ]
    )
    args = SFTConfig(**options(folder, assistant_only_loss=True, max_length=32, save_strategy="steps", save_steps=3,
                               gradient_checkpointing=True,
                               gradient_checkpointing_kwargs={"use_reentrant": False}))  # fmt: skip
    trainer = SFTTrainer(llama(), args, train_dataset=data, processing_class=words,
                         peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], r=2))  # fmt: skip
    found = logged(trainer)
    names = names_in(os.path.join(args.output_dir, "checkpoint-3"))
    return [*found, {"files": names}, weights(trainer.model)]
