"""What the processes of the pool run: each function is one case, called on every process with the same arguments."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import loopwright
from tests.models import CPU, VOCAB, Tokens, llama, made, pad, samples, trainer_of

LENGTHS = (11, 5, 17, 3, 29, 8, 2, 9, 4, 13, 7, 6, 10, 12, 1, 15, 21, 14, 19, 16)
TIMES = ("runtime", "per_second", "preparation_time")


class Blocks(nn.Module):
    """Two repeated blocks between embedding and head, with sizes that do not divide by 2, 3 or 4."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 10), nn.Tanh(), nn.Linear(10, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    logits = outputs["logits"]
    total = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def divided_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    total, count = summed_loss(outputs, labels)
    return total / (num_items_in_batch if num_items_in_batch is not None else count)


def mixed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    return divided_loss(outputs, labels, num_items_in_batch) + 0.1 * outputs["logits"].pow(2).mean((1, 2)).mean()


LOSSES = {"model": None, "pair": summed_loss, "divided": divided_loss, "mixed": mixed_loss}


class SharedBlock(Blocks):
    """One block, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[0]


class TiedBlocks(Blocks):
    """Two blocks that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][2].weight = self.blocks[0][2].weight


def in_two_dtypes() -> nn.Module:
    model = made(Blocks)
    model.head.float()
    return model


def small_llama(**options: Any) -> nn.Module:
    return llama(**{"vocab_size": 14, "num_key_value_heads": 2, **options})


def small_qwen() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=14, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=2, head_dim=4, intermediate_size=16, max_position_embeddings=128,
                         pad_token_id=0, initializer_range=0.3)  # fmt: skip
    return made(Qwen3ForCausalLM, config)


MODELS = {
    "tokens": lambda: made(Tokens),
    "blocks": lambda: made(Blocks),
    "blocks-single": lambda: made(Blocks).float(),
    "shared-block": lambda: made(SharedBlock),
    "tied-blocks": lambda: made(TiedBlocks),
    "two-dtypes": in_two_dtypes,
    "llama": small_llama,
    "llama-tied": lambda: small_llama(tie_word_embeddings=True),
    "qwen3": small_qwen,
}


def trained(
    folder: str,
    *,
    n: int = 13,
    model: str = "blocks",
    loss: str = "model",
    resume: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train as the arguments say; returns full weights, what was logged and where the run stands."""
    data = samples(LENGTHS[:n])
    given: dict[str, Any] = {"num_train_epochs": 2, "optim": "adamw_torch", "learning_rate": 0.01, "max_grad_norm": 1.0,
             "lr_scheduler_type": "linear", "train_sampling_strategy": "random"}  # fmt: skip
    if LOSSES[loss] is not None:
        given["compute_loss_func"] = LOSSES[loss]
    trainer = trainer_of(MODELS[model](), data, folder, **{**given, **options})
    trainer.train(resume_from_checkpoint=resume)
    return result_of(trainer)


def result_of(trainer: Any) -> dict[str, Any]:
    return {
        "weights": full_weights(trainer.model),
        "logs": [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in trainer.state.log_history],
        "step": trainer.state.global_step,
        "samples": trainer._loopwright.run.progress.samples_seen,
        "strategy": type(trainer._loopwright.strategy).__name__,
    }


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = whole.detach().clone()
    return found


class NamedValues(loopwright.Trainer):
    """Values with several denominators, one of them on some ranks and in some updates only."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs=False, num_items_in_batch=None) -> Any:
        labels = inputs["labels"]
        logits = model(inputs["input_ids"])["logits"]
        each = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100, reduction="none")
        count = (labels != -100).sum()
        loss = each.sum() / (count if num_items_in_batch is None else num_items_in_batch)
        is_long = (labels != -100).sum(-1) > 10
        rows = each.reshape(labels.shape).sum(-1)
        long = {"long": (rows[is_long].sum(), is_long.sum())} if is_long.any() else {}
        return loss, {"ce": loss, "mean": each.sum() / count, **long}


def named_values(folder: str, **options: Any) -> Any:
    """The logged rows of a run with named values."""
    given = {"num_train_epochs": 2, "optim": "adamw_torch", "learning_rate": 0.01, **options}
    trainer = trainer_of(made(Blocks), samples(LENGTHS[:13]), folder, cls=NamedValues, **given)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def mixed(folder: str, **options: Any) -> Any:
    """The rows and weights of a run on a mixture of two datasets."""
    data = {"web": samples(LENGTHS[:9]), "code": samples(LENGTHS[9:13])}
    given = {"num_train_epochs": 2, "optim": "adamw_torch", "learning_rate": 0.01, "max_grad_norm": 1.0,
             "train_sampling_strategy": "random", "train_dataset_weights": {"web": 1, "code": 2}}  # fmt: skip
    trainer = trainer_of(made(Blocks), data, folder, **{**given, **options})
    trainer.train()
    return {**result_of(trainer), "rows": [row for row in trainer.state.log_history if "loss" in row]}


def averaged(folder: str, resume: Any = None, **options: Any) -> Any:
    """The moving averages of a run, in full, and its evaluations with them."""
    ema = loopwright.EMACallback(decay=0.8)
    given = {"num_train_epochs": 2, "optim": "adamw_torch", "learning_rate": 0.01, "save_strategy": "steps",
             "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}  # fmt: skip
    data = samples(LENGTHS[:8])
    trainer = trainer_of(made(Blocks), data, folder, callbacks=[ema], eval_dataset=data, **{**given, **options})
    trainer.train(resume_from_checkpoint=resume)
    found = ema.checkpoint_tensors(trainer.model)
    return {
        "averages": {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in found.items()},
        "losses": [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row],
    }


# ---- faults ----------------------------------------------------------------------------------------------------------


class At(loopwright.TrainerCallback):
    """Does something at the end of an update, on one process."""

    def __init__(self, step: int, rank: int, action: Any) -> None:
        self.step, self.rank, self.action = step, rank, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and args.process_index == self.rank:
            self.action()


def fail() -> None:
    raise ValueError("the disk of this machine is upside down")


def stopped(folder: str, *, how: str, rank: int, step: int = 3, **options: Any) -> dict[str, Any]:
    """A run in which something happens to one process."""
    actions = {"fail": fail, "term": lambda: os.kill(os.getpid(), signal.SIGTERM), "nothing": lambda: None}
    return trained(folder, callbacks=[At(step, rank, actions[how])], **options)


# ---- sharding --------------------------------------------------------------------------------------------------------


def sharded(folder: str, **options: Any) -> dict[str, Any]:
    """A sharded model before any training: which modules are wrapped, and how much this process holds."""
    from torch.distributed.fsdp import FSDPModule

    trainer = trainer_of(made(Blocks), samples(LENGTHS[:4]), folder, optim="adamw_torch", fsdp=True, **options)
    held = sum(p.to_local().numel() for p in trainer.model.parameters())
    return {
        "wrapped": [name for name, module in trainer.model.named_modules() if isinstance(module, FSDPModule)],
        "held": held,
        "whole": sum(p.numel() for p in trainer.model.parameters()),
    }


def saved_model(folder: str, *, model: str = "blocks", **options: Any) -> Any:
    """What save_model writes, from whatever the processes hold."""
    trainer = trainer_of(MODELS[model](), samples(LENGTHS[:4]), folder, optim="adamw_torch", **options)
    before = full_weights(trainer.model)
    trainer.save_model(f"{folder}/model")
    return before


def own_optimizer(folder: str, *, started: bool = False, **options: Any) -> Any:
    """A run with an optimizer that was made before the model was sharded."""
    model = made(Blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if started:
        model(torch.zeros(1, 2, dtype=torch.long))["logits"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    args = loopwright.TrainingArguments(folder, **{**CPU, "num_train_epochs": 1, **options})
    trainer = loopwright.Trainer(
        model, args, train_dataset=samples(LENGTHS[:8]), data_collator=pad, optimizers=(optimizer, None)
    )
    trainer.train()
    return result_of(trainer)


def different_weights(folder: str, **options: Any) -> Any:
    """A run whose processes made models with other weights each."""
    torch.manual_seed(int(os.environ["RANK"]))
    model = Blocks().double()
    first = full_weights(model)
    trainer = trainer_of(
        model, samples(LENGTHS[:8]), folder, **{"learning_rate": 0.0, "num_train_epochs": 1, **options}
    )
    trainer.train()
    return first, full_weights(trainer.model)


def made_on_meta(folder: str) -> Any:
    """Only the first process makes weights; the others hold none until they get their part."""

    seen = []

    def make() -> nn.Module:
        model = made(Blocks)
        seen.append(model.head.weight.is_meta)
        return model

    trainer = trainer_of(
        None, samples(LENGTHS[:8]), folder, model_init=make, fsdp=True, fsdp_config={"cpu_ram_efficient_loading": True},
        optim="adamw_torch", num_train_epochs=1,
    )  # fmt: skip
    before = full_weights(trainer.model)
    trainer.train()
    return before, full_weights(made(Blocks)), trainer.state.global_step, seen[0]


class WithUnused(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)


def with_unused(folder: str, **options: Any) -> Any:
    trainer = trainer_of(made(WithUnused), samples(LENGTHS[:8]), folder, num_train_epochs=1, **options)
    trainer.train()
    return trainer.state.global_step


def clipped(folder: str, **options: Any) -> Any:
    return trained(folder, n=8, max_grad_norm=0.05, num_train_epochs=1, **options)


# ---- generation ------------------------------------------------------------------------------------------------------


def joined_generation(folder: str, n: int, level: str) -> Any:
    """Predictions and labels of mixed prompts, and how many windows of batches were generated together."""
    args = loopwright.Seq2SeqTrainingArguments(
        folder, **{**CPU, "speed": level}, per_device_eval_batch_size=1, predict_with_generate=True,
        generation_max_length=4,
    )  # fmt: skip
    data = samples([2 + LENGTHS[k % len(LENGTHS)] for k in range(n)])
    for k, each in enumerate(data):
        each["labels"][: 1 + k % len(each["labels"])] = -100  # prompts of several lengths
    trainer = loopwright.Seq2SeqTrainer(small_llama(eos_token_id=3), args, pad)
    output = trainer.predict(data)
    joined = trainer._loopwright.evaluation._joined
    return output.predictions, output.label_ids, output.metrics["test_loss"], joined._made, joined.reason


# ---- data ------------------------------------------------------------------------------------------------------------


class Numbers(nn.Module):
    """Remembers which samples it was shown in training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.seen: list[list[int]] = []

    def forward(self, number: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.training and torch.is_grad_enabled():
            self.seen.append(number.long().tolist())
        logits = number.double() * self.weight + number.double()
        return {"loss": (self.weight * number.double()).mean(), "logits": logits}


def row(index: int) -> dict[str, Any]:
    return {"number": index, "labels": float(index)}


class Stream(torch.utils.data.IterableDataset):
    """A stream that knows nothing of workers, or shares itself out among them."""

    def __init__(self, n: int, aware: bool) -> None:
        self.n, self.aware = n, aware

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if self.aware and info is not None else (0, 1)
        return (row(index) for index in range(first, self.n, step))


class OwnSampler(loopwright.Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.RandomSampler(self.train_dataset)  # drawn from this process's own stream


class OwnLoader(loopwright.Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=2, shuffle=True)


class DerivedLoader(torch.utils.data.DataLoader): ...


class OwnClass(loopwright.Trainer):
    def get_train_dataloader(self) -> Any:
        return DerivedLoader(self.train_dataset, batch_size=2, shuffle=True)


class Listed(loopwright.Trainer):
    def get_train_dataloader(self) -> Any:
        return list(torch.utils.data.DataLoader(self.train_dataset, batch_size=2))


class Sharing(loopwright.Trainer):
    def get_train_dataloader(self) -> Any:
        sampler = torch.utils.data.DistributedSampler(self.train_dataset, shuffle=False)
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=2, sampler=sampler)


KINDS = {"ours": loopwright.Trainer, "sampler": OwnSampler, "loader": OwnLoader, "class": OwnClass, "list": Listed,
         "sharing": Sharing}  # fmt: skip


def shown(
    folder: str, *, n: int, kind: str = "ours", stream: str = "", epochs: int = 1, resume: Any = None, **options: Any
) -> Any:
    """The samples each forward pass of training was shown, epoch by epoch."""
    data: Any = Stream(n, aware=stream == "aware") if stream else [row(index) for index in range(n)]
    model = Numbers()
    given = {**CPU, "num_train_epochs": epochs, "per_device_train_batch_size": 2, "train_sampling_strategy": "random"}
    trainer = KINDS[kind](model, loopwright.TrainingArguments(folder, **{**given, **options}), train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    rates = [each["learning_rate"] for each in trainer.state.log_history if "learning_rate" in each]
    progress, state = trainer._loopwright.run.progress, trainer.state
    return {"seen": model.seen, "samples": progress.samples_seen, "steps": state.global_step, "rates": rates}


def evaluated(folder: str, *, n: int, stream: bool = False, **options: Any) -> Any:
    """Metrics and predictions of an evaluation."""
    data: Any = Stream(n, aware=False) if stream else [row(index) for index in range(n)]
    args = loopwright.TrainingArguments(folder, **{**CPU, "per_device_eval_batch_size": 5, **options})
    trainer = loopwright.Trainer(
        Numbers(), args, compute_metrics=lambda each: {"n": len(each.predictions), "sum": float(each.label_ids.sum())}
    )
    metrics = trainer.evaluate(data)
    output = trainer.predict(data)
    kept = {name: value for name, value in metrics.items() if not name.endswith(TIMES)}
    return {"metrics": kept, "predictions": output.predictions.tolist(), "labels": output.label_ids.tolist()}


class RowMeans(Tokens):
    """The mean over rows of the mean over a row's targets."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        return {"loss": (losses.sum(1) / (labels != -100).sum(1)).mean(), "logits": logits}


def evaluated_row_means(folder: str, batch: int) -> float:
    """The loss of an evaluation that is to be weighted by samples."""
    trainer = trainer_of(made(RowMeans), None, folder, per_device_eval_batch_size=batch)
    return float(trainer.evaluate(samples(LENGTHS[:7]))["eval_loss"])


def collected(folder: str) -> Any:
    """What the collectives of `trainer.accelerator` return."""
    it = loopwright.Trainer(Numbers(), loopwright.TrainingArguments(folder, **CPU)).accelerator
    own = torch.full((it.process_index + 1,), float(it.process_index + 1))
    with it.split_between_processes(list(range(5))) as part, it.split_between_processes([1, 2, 3], True) as padded:
        return {
            "sum": it.reduce(own[:1]).tolist(),
            "mean": it.reduce({"a": own[:1]}, "mean", scale=2.0)["a"].tolist(),
            "padded": it.pad_across_processes(own, pad_index=-1).tolist(),
            "padded first": it.pad_across_processes([own], pad_index=-1, pad_first=True)[0].tolist(),
            "gathered": it.gather(it.pad_across_processes(own, pad_index=-1)).tolist(),
            "objects": it.gather_for_metrics([{"rank": it.process_index}], use_gather_object=True),
            "part": part,
            "part padded": padded,
            "batch": it._args.train_batch_size,
            "loader": loopwright.Trainer(Numbers(), it._args, train_dataset=[row(index) for index in range(5)])
            .get_train_dataloader().total_batch_size,  # fmt: skip
        }


class _Stream(torch.utils.data.IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def _loader_to_prepare(kind: str, count: int, **options: Any) -> Any:
    data: Any = _Stream(count) if kind == "stream" else list(range(count))
    if kind == "batches":
        order = torch.utils.data.SequentialSampler(data)
        return torch.utils.data.DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(order, **options))
    return torch.utils.data.DataLoader(data, shuffle=kind == "shuffled", **options)


def _iterated(it: Any, loader: Any) -> Any:
    """Two epochs of a prepared loader, iterated as in a loop for accelerate."""
    prepared = it.prepare(loader)
    own, collected, objects, ends = [], [], [], []
    for _ in range(2):
        for batch in prepared:
            own.append(batch.tolist())
            ends.append(it.gradient_state.end_of_dataloader)
            if it.even_batches:
                collected.append(it.gather_for_metrics({"a": [batch]})["a"][0].tolist())
                objects.append(it.gather_for_metrics(batch.tolist(), use_gather_object=True))
    has_length = not isinstance(loader.dataset, _Stream)
    return {
        "own": own,
        "collected": collected,
        "objects": objects,
        "ends": ends,
        "outside": it.gradient_state.end_of_dataloader,
        "length": len(prepared) if has_length else None,
        "total": prepared.total_batch_size if has_length else None,
        "samples": prepared.total_dataset_length if has_length else None,
    }


def prepared(folder: str, grid: list[Any]) -> Any:
    """What loaders prepared by accelerate and by `trainer.accelerator` iterate, for each of the options."""
    import accelerate

    found = []
    for kind, count, loader, options in grid:
        config = {**options, "use_seedable_sampler": True}
        args = loopwright.TrainingArguments(folder, **CPU, accelerator_config=config, seed=3)
        ours = loopwright.Trainer(Numbers(), args).accelerator
        torch.manual_seed(3)
        shared = accelerate.DataLoaderConfiguration(**config, data_seed=3)
        theirs = accelerate.Accelerator(cpu=True, dataloader_config=shared)
        found.append([_iterated(it, _loader_to_prepare(kind, count, **loader)) for it in (ours, theirs)])
    return found


def loops_by_hand(folder: str) -> Any:
    """Loops over loaders of a trainer, an evaluation called by hand, and a run on a prepared loader."""
    sizes = {"per_device_eval_batch_size": 2, "per_device_train_batch_size": 2}
    args = loopwright.TrainingArguments(folder, **{**CPU, **sizes, "max_steps": 3, "save_strategy": "no"})
    data = [row(index) for index in range(7)]

    class Prepared(loopwright.Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(super().get_train_dataloader())

    torch.manual_seed(0)
    trainer = Prepared(Numbers(), args, train_dataset=data, eval_dataset=data, compute_metrics=lambda each: {
        "n": len(each.predictions), "sum": float(each.label_ids.sum())})  # fmt: skip
    it, labels, count = trainer.accelerator, [], 0
    for batch in trainer.get_eval_dataloader():
        count += len(batch["labels"])
        labels += it.gather_for_metrics(batch["labels"]).flatten().tolist()
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), description="by hand")
    trainer.train()
    torch.manual_seed(0)
    plain = loopwright.Trainer(Numbers(), args, train_dataset=data)
    plain.train()
    return {
        "labels": labels,
        "count": count,
        "lengths": [len(trainer.get_eval_dataloader()), len(trainer.get_train_dataloader())],
        "metrics": {name: output.metrics[f"eval_{name}"] for name in ("n", "sum")},
        "wanted": [float(each["labels"]) for each in data],
        "same": all(map(torch.equal, trainer.model.parameters(), plain.model.parameters())),
    }


def saved_by_accelerator(folder: str) -> Any:
    """A state that both ranks save in a folder, with an object of the user, and the run that resumes from it."""
    place, weights, states = os.path.join(folder, "mine"), [], []
    for start in (None, place):
        options = {**CPU, "max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "no"}
        args = loopwright.TrainingArguments(os.path.join(folder, "run"), **options)
        torch.manual_seed(0)
        trainer = loopwright.Trainer(Numbers(), args, train_dataset=[row(index) for index in range(16)])
        own = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(own.weight, 0.0 if start else 7.0)
        trainer.accelerator.register_for_checkpointing(own)
        if start is None:
            trainer.add_callback(_SavesAt(2, lambda it=trainer: it.accelerator.save_state(place)))
        trainer.train(resume_from_checkpoint=start)
        weights.append([each.tolist() for each in trainer.model.parameters()])
        states.append(own.weight.item())
    return {"same": weights[0] == weights[1], "own": states, "step": trainer.state.global_step}


class _SavesAt(loopwright.TrainerCallback):
    def __init__(self, step: int, save: Any) -> None:
        self.step, self.save = step, save

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.save()


def first_process_first(folder: str) -> Any:
    """The main process writes a file before the others look for it."""
    args = loopwright.TrainingArguments(folder, use_cpu=True)
    path = os.path.join(folder, "made")
    with args.main_process_first(local=False):
        there = os.path.exists(path)
        if args.process_index == 0:
            time.sleep(0.2)
            os.makedirs(folder, exist_ok=True)
            open(path, "w").close()
    return there


def told(folder: str, *, rank: int, **options: Any) -> Any:
    """A callback of one process asks for something; all of them do it."""

    class Ask(loopwright.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and args.process_index == rank:
                control.should_save = control.should_training_stop = True

    result = trained(folder, n=12, callbacks=[Ask()], **options)
    return result["step"], sorted(name for name in os.listdir(folder) if name.startswith("checkpoint"))


# ---- elastic ---------------------------------------------------------------------------------------------------------


class Recorder:
    """A collator that writes down which samples were loaded for which update."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.trainer: Any = None

    def __call__(self, features: list[Any]) -> Any:
        with open(self.path, "a") as file:
            for each in features:
                file.write(f"{self.trainer.state.global_step + 1} {each['id']}\n")
        return pad([{name: value for name, value in each.items() if name != "id"} for each in features])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def elastic(folder: str, *, phase: int, stop_at: int, how: str = "fail", **options: Any) -> Any:
    """One life of a run that is ended at some update, by an error everywhere or by killing one process."""
    data = [{**each, "id": index} for index, each in enumerate(samples(LENGTHS))]
    rank = int(os.environ["RANK"])
    recorder = Recorder(f"{folder}-{phase}-{rank}.txt")
    action = {"fail": fail, "kill": kill if rank == int(os.environ["WORLD_SIZE"]) - 1 else lambda: None}[how]
    given = {"num_train_epochs": 1, "optim": "adamw_torch", "learning_rate": 0.01, "lr_scheduler_type": "linear",
             "train_sampling_strategy": "random", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4,
             "save_strategy": "steps", "save_steps": 1, "remove_unused_columns": False,
             "async_save": how != "kill"}  # fmt: skip
    trainer = trainer_of(
        made(Blocks), data, folder, collator=recorder, callbacks=[At(stop_at, rank, action)], **{**given, **options}
    )
    recorder.trainer = trainer
    trainer.train(resume_from_checkpoint="auto")
    return result_of(trainer)


def on_machines(folder: str, **options: Any) -> Any:
    """A run on machines that see only folders of their own."""
    return trained(os.path.join(folder, os.environ["MACHINE"]), **options)


# ---- training, all of it ---------------------------------------------------------------------------------------------


class Noisy(Blocks):
    """Blocks with dropout and a batch norm: random streams and buffers of each process matter."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(7)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.drop(self.norm(self.embed(input_ids).flatten(0, 1)).reshape(*input_ids.shape, -1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


MODELS["noisy"] = lambda: made(Noisy)


def with_evaluation(folder: str, **options: Any) -> dict[str, Any]:
    """A run that evaluates, keeps the best and loads it at the end."""
    given = {"eval_dataset": samples(LENGTHS[3:14]), "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best",
             "load_best_model_at_end": True, "per_device_eval_batch_size": 2, "learning_rate": 0.3}  # fmt: skip
    return trained(folder, n=12, model="blocks", **{**given, **options})


def synchronized(folder: str, **options: Any) -> Any:
    """How often a run kept its gradients to itself, and how DDP was told to work."""
    from torch.nn.parallel import DistributedDataParallel

    kept, before = [], DistributedDataParallel.no_sync
    DistributedDataParallel.no_sync = lambda self: kept.append(1) or before(self)
    try:
        trainer = trainer_of(made(Blocks), samples(LENGTHS[:12]), folder, num_train_epochs=1, **options)
        trainer.train()
    finally:
        DistributedDataParallel.no_sync = before
    wrapped = trainer.model_wrapped
    told = {name: getattr(wrapped, name) for name in ("find_unused_parameters", "broadcast_buffers", "static_graph")}
    return len(kept), trainer.state.global_step, told, wrapped.bucket_bytes_cap


class RandomStates(loopwright.TrainerCallback):
    """The random states at the beginning of the updates of this run."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(torch.get_rng_state().tolist())


def states_at_start(folder: str, **options: Any) -> Any:
    callback = RandomStates()
    trained(folder, callbacks=[callback], **options)
    return callback.found[0]


class Poisoned(Blocks):
    """Its loss is not a number for one sample."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = super().forward(input_ids, attention_mask, labels)
        if input_ids.shape[1] == LENGTHS[4]:
            outputs["loss"] = outputs["loss"] * float("nan")
        return outputs


MODELS["poisoned"] = lambda: made(Poisoned)


def drawn(folder: str, **options: Any) -> Any:
    """A run on samples that draw random numbers when they are loaded by workers."""

    class Drawing(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 13

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"input_ids": torch.randint(1, VOCAB, (5,)), "labels": torch.randint(0, VOCAB, (5,))}

    given = {"num_train_epochs": 1, "dataloader_num_workers": 1, "per_device_train_batch_size": 2}
    trainer = trainer_of(made(Blocks), Drawing(), folder, **given, **options)
    trainer.train()
    return result_of(trainer)


class Forgetting(loopwright.TrainerCallback):
    """A run that is resumed begins with an empty list: what a model keeps comes back from its checkpoint."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        model.seen.clear()


def streamed(folder: str, *, stop_at: int, **options: Any) -> Any:
    """The samples of a stream that one life of a run trained on."""
    model = Numbers()
    given = {**CPU, "max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
             "save_strategy": "steps", "save_steps": 1}  # fmt: skip
    rank = int(os.environ["RANK"])
    trainer = loopwright.Trainer(
        model, loopwright.TrainingArguments(folder, **{**given, **options}), train_dataset=Stream(24, aware=False),
        callbacks=[At(stop_at, rank, fail), Forgetting()],
    )  # fmt: skip
    try:
        trainer.train(resume_from_checkpoint="auto")
    except ValueError:
        pass
    return model.seen


def generated(folder: str, **options: Any) -> Any:
    """What a sequence-to-sequence model generates for data that does not share out evenly."""
    from tests.models import t5

    args = loopwright.Seq2SeqTrainingArguments(
        folder, predict_with_generate=True, generation_max_length=6, per_device_eval_batch_size=2, **{**CPU, **options}
    )
    trainer = loopwright.Seq2SeqTrainer(t5(), args, data_collator=pad)
    output = trainer.predict(samples(LENGTHS[:5]))
    return output.predictions.tolist(), output.metrics["test_loss"]


# ---- speed -----------------------------------------------------------------------------------------------------------


class Substeps(loopwright.TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


def planned(folder: str, *, n: int, model: str, resume: Any = None, listener: int | None = None, **options: Any) -> Any:
    """As `trained`; also the plan of this process, and how many rows its micro-batches had."""
    given: dict[str, Any] = {"num_train_epochs": 2, "optim": "adamw_torch", "learning_rate": 0.01, "max_grad_norm": 1.0,
             "lr_scheduler_type": "linear", "train_sampling_strategy": "random"}  # fmt: skip
    trainer = trainer_of(MODELS[model](), samples(LENGTHS[:n]), folder, **{**given, **options})
    if trainer.args.process_index == listener:
        trainer.add_callback(Substeps())
    make_update, rows = trainer._loopwright.loss.make_update, []

    def seen(batches: list[Any]) -> Any:
        update = make_update(batches)
        rows.append([len(batch["input_ids"]) for batch in update.batches])
        return update

    trainer._loopwright.loss.make_update = seen
    trainer.train(resume_from_checkpoint=resume)
    has_speed = trainer._loopwright.run.speed is not None
    return {**result_of(trainer), "plan": trainer._loopwright.run.speed_plan, "rows": rows, "has_speed": has_speed}


# ---- wishes ----------------------------------------------------------------------------------------------------------


class Wishing(loopwright.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save |= state.global_step == 2


def wished(folder: str, *, rank: int, **options: Any) -> dict[str, Any]:
    """A run in which one process alone has a callback, which wishes for a checkpoint."""
    trainer = trainer_of(made(Blocks), samples(LENGTHS[:12]), folder, num_train_epochs=1, **options)
    if trainer.args.process_index == rank:
        trainer.add_callback(Wishing())
    trainer.train()
    return result_of(trainer)


# ---- models whose names transformers converts ------------------------------------------------------------------------


def small_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(vocab_size=14, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                           intermediate_size=16, max_position_embeddings=128, initializer_range=0.3,
                           hidden_dropout=0.0, attention_dropout=0.0)  # fmt: skip
    return made(GPTNeoXForCausalLM, config)


def small_dynamic() -> nn.Module:
    """Each process keeps the longest of the sequences it has seen; in the precision of the frequencies it makes."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    return small_llama(max_position_embeddings=8, rope_parameters=rope).float()


MODELS["gpt-neox"] = small_neox
MODELS["dynamic"] = small_dynamic


class Seen(loopwright.TrainerCallback):
    """Whole weights after every update."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = full_weights(model)


def family(folder: str, *, model: str, **options: Any) -> dict[str, Any]:
    """Train, load the best, export, and load the export into the model again."""
    seen, data = Seen(), samples(LENGTHS[:12])
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1,
             "eval_dataset": data[:4], "load_best_model_at_end": True, "metric_for_best_model": "loss",
             "greater_is_better": True, "per_device_train_batch_size": 1, "speed": "off"}  # fmt: skip
    trainer = trainer_of(MODELS[model](), data, folder, callbacks=[seen], **{**given, **options})
    trainer.train()
    best = full_weights(trainer.model)
    trainer.save_model(f"{folder}/exported")
    trainer._loopwright.strategy.barrier()
    with torch.no_grad():
        for each in trainer.model.parameters():
            each.zero_()
    trainer._loopwright.saving._load_weights_of(f"{folder}/exported")
    return {"best": best, "back": full_weights(trainer.model), "seen": seen.weights,
            "best_step": trainer.state.best_global_step}  # fmt: skip


# ---- what is changed while training ----------------------------------------------------------------------------------


def _freeze(trainer: Any) -> None:
    trainer.model.head.requires_grad_(False)


def _unfreeze(trainer: Any) -> None:
    trainer.model.embed.requires_grad_(True)


def _exchange(trainer: Any) -> None:
    _freeze(trainer)
    _unfreeze(trainer)


def _replace_optimizer(trainer: Any) -> None:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)


def _accumulate(trainer: Any) -> None:
    trainer.args.gradient_accumulation_steps *= 2


def _add_layer(trainer: Any) -> None:
    trainer.model.extra = nn.Linear(7, 7).double()


def _leave_in_evaluation_mode(trainer: Any) -> None:
    trainer.model_wrapped.eval()


CHANGES = {"freeze": _freeze, "unfreeze": _unfreeze, "exchange": _exchange, "optimizer": _replace_optimizer,
           "accumulation": _accumulate, "layer": _add_layer, "mode": _leave_in_evaluation_mode}  # fmt: skip


class ChangeAt(loopwright.TrainerCallback):
    def __init__(self, name: str, event: str, rank: int | None) -> None:
        self.name, self.rank, self.trainer, self.modes = name, rank, None, []
        setattr(self, event, self.act)

    def act(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and self.rank in (None, args.process_index):
            CHANGES[self.name](self.trainer)


def changed(folder: str, *, change: str, event: str = "on_step_end", rank: int | None = None, **options: Any) -> Any:
    """A run in which a callback changes something after its second update."""
    callback, model = ChangeAt(change, event, rank), MODELS["blocks"]()
    model.embed.requires_grad_(False)
    model.register_forward_pre_hook(lambda module, args: callback.modes.append(module.training))
    given: dict[str, Any] = {"num_train_epochs": 2, "optim": "adamw_torch", "learning_rate": 0.01, "speed": "off",
                             "max_grad_norm": 0.05, "lr_scheduler_type": "constant"}  # fmt: skip
    args = loopwright.TrainingArguments(output_dir=folder, **{**CPU, "per_device_train_batch_size": 1, **given,
                                                               **options})  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    callback.trainer = trainer = loopwright.Trainer(
        model, args, data_collator=pad, train_dataset=samples(LENGTHS[:12]), eval_dataset=samples(LENGTHS[:4]),
        callbacks=[callback], optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train()
    return {**result_of(trainer), "modes": callback.modes, "changes": trainer._loopwright.strategy.changes}


# ---- adversaries -----------------------------------------------------------------------------------------------------


def adversarial(folder: str, *, name: str, speed: str, accumulation: int, size: int) -> dict[str, Any]:
    """The gradients of a case of the adversary on this process's share of every update, and what was told."""
    from unittest.mock import patch

    from tests.adversary.running import Split, doubles_stay, everything_pays, observe
    from tests.adversary.zoo import CASES

    with ExitStack() as stack:
        doubles_stay(lambda place, name, value: stack.enter_context(patch.object(place, name, value)))
        everything_pays(lambda place, name, value: stack.enter_context(patch.dict(place, {name: value})))
        found = observe(
            CASES[name], Path(folder), speed=speed, split=Split(accumulation, size), ddp_find_unused_parameters=True
        )
    return {"gradients": found.gradients, "told": found.told, "layout": found.layout}


# ---- agreement -------------------------------------------------------------------------------------------------------


def differing(folder: str, *, row: str, **options: Any) -> Any:
    """A run whose processes differ in one thing; see differences.py."""
    from distributed.differences import run_with

    return run_with(row, folder, **options)


def normalized(folder: str, *, seed: int, kill_at: int = 0, **options: Any) -> Any:
    """A run with a batch norm and evaluations; its processes may be killed after an update."""
    given = {"n": 12, "model": "noisy", "seed": seed, "eval_dataset": samples(LENGTHS[3:14]), "eval_strategy": "steps",
             "eval_steps": 2, "save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 1,
             "per_device_eval_batch_size": 2, "async_save": False,
             "callbacks": [At(kill_at, int(os.environ["RANK"]), kill)],
             "load_best_model_at_end": False}  # fmt: skip
    return trained(folder, **{**given, **options})


def unseeded(folder: str, **options: Any) -> Any:
    """A run whose processes have built models with other weights and buffers; its weights, buffers and warnings."""
    torch.manual_seed(int(os.environ["RANK"]))
    model = Noisy().double()
    with torch.no_grad():
        model.norm.running_mean.normal_()
    before = full_weights(model)
    trainer = trainer_of(model, samples(LENGTHS[:8]), folder, num_train_epochs=1, max_steps=2, **options)
    begun: list[Any] = []
    trainer.add_callback(Begun(begun))
    trainer.train()
    return before, begun[0], full_weights(trainer.model), trainer._loopwright.notices.told


class Begun(loopwright.TrainerCallback):
    """Keeps the state of the model when training begins."""

    def __init__(self, kept: list[Any]) -> None:
        self.kept = kept

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.kept.append(full_weights(model))


def evaluated_with_own_statistics(folder: str, **options: Any) -> Any:
    """Evaluations of a model whose buffers differ between processes, then of the saved one; and its buffers."""
    given = {"eval_dataset": samples(LENGTHS[3:14]), "max_steps": 2, "per_device_train_batch_size": 1, **options}
    trainer = trainer_of(made(Noisy), samples(LENGTHS[:8]), folder, **given)
    trainer.train()
    own = trainer.model.norm.running_mean.clone()
    first = trainer.evaluate()["eval_loss"]
    kept = torch.equal(own, trainer.model.norm.running_mean)
    trainer.save_model(f"{folder}/model")
    return own, kept, first


def alone_with_saved(folder: str) -> float:
    """The evaluation of a saved model by one process."""
    from safetensors.torch import load_file

    model = made(Noisy)
    model.load_state_dict(load_file(f"{folder}/model/model.safetensors"))
    trainer = trainer_of(model, samples(LENGTHS[:8]), folder, eval_dataset=samples(LENGTHS[3:14]))
    return float(trainer.evaluate()["eval_loss"])


def pushed(folder: str, url: str, **options: Any) -> Any:
    """A run that pushes to a server, and the error it ends with."""
    import pytest

    from tests.hub import runs
    from tests.hub.conftest import connect

    with pytest.MonkeyPatch.context() as patch:
        connect(url, patch)
        trainer = runs.trainer_of(folder, **options)
        try:
            trainer.train()
            commit = trainer.push_to_hub()
        except loopwright.LoopwrightError as error:
            return type(error).__name__, str(error), trainer.state.global_step
    return trainer.hub_model_id, None if commit is None else commit.oid, trainer.state.global_step
def searched(folder: str, *, in_process: bool) -> dict[str, Any]:
    """A search of two trials, of which the first is pruned."""
    import optuna

    from tests.search.torch_toy import torch_toy

    class First(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return bool(trial.number == 0)

    trainer = torch_toy(folder)
    assert trainer.args.world_size == 2
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 0.5, 0.9)},
        n_trials=2, backend="optuna", pruner=First(), in_process=in_process,
    )  # fmt: skip
    if best is None:
        return {"best": None}
    states = [[each.state.name, max(each.intermediate_values)] for each in best.run_summary.trials]
    return {"best": best.run_id, "states": states, "checkpoint": best.checkpoint}


class Controlled(loopwright.TrainerCallback):
    """Rank 0 uses `loopwright ctl` while an update is computed; every rank notes its learning rate and its saves."""

    def __init__(self, requests: dict[int, list[list[str]]], fails_at: int = 0) -> None:
        self.requests, self.fails_at = requests, fails_at
        self.rates: list[float] = []
        self.saved: list[int] = []
        self.evaluated: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        if state.global_step + 1 == self.fails_at:
            raise RuntimeError("the machine fails")
        for words in self.requests.get(state.global_step + 1, []) if state.is_world_process_zero else []:
            from loopwright.cli.commands.ctl import run

            assert run([str(args.output_dir), *words]) == 0

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated.append(state.global_step)


def controlled(config: str, *, requests: dict[int, list[list[str]]], fails_at: int = 0, words: Any = ()) -> Any:
    """A run of a configuration that `loopwright ctl` directs; returns what this rank did."""
    from loopwright.config import build_trainer, load_config

    trainer = build_trainer(load_config(Path(config), list(words)))
    seen = Controlled(requests, fails_at)
    trainer.add_callback(seen)
    code = 0
    try:
        trainer.train()
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except RuntimeError:
        if not fails_at:
            raise
    return {"code": code, "step": trainer.state.global_step, "weights": full_weights(trainer.model), **vars(seen)}
