"""Runs whose ranks differ in one thing: each row changes what rank 1 passes to its trainer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import loopwright
from tests.models import CPU, made, pad, samples

from .cases import LENGTHS, Blocks, full_weights


@dataclass
class Given:
    """What a rank passes to its trainer; a row changes that of rank 1."""

    args: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = partial(made, Blocks)
    cls: type = loopwright.Trainer
    args_class: type = loopwright.TrainingArguments
    data: Callable[[], Any] = lambda: samples(LENGTHS[:8])
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], Any] | None = None
    schedule: Callable[[Any], Any] | None = None
    resume: Any = None
    before: Callable[[], None] = lambda: None


class Renamed(Blocks): ...


class Dropped(Blocks):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(rate)


class Scaled(loopwright.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs, **kwargs) * 2


def scaling(factor: float) -> Any:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        return outputs["logits"].sum() * factor

    return loss


def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    return (outputs["logits"] ** 2).sum()


class Sets(loopwright.TrainerCallback):
    """Changes something at an event: of this rank only, if the row of rank 1 alone has another value."""

    def __init__(self, event: str, change: Callable[[Any], None]) -> None:
        self.change = change
        setattr(self, event, self._call)

    def _call(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.change({**kwargs, "args": args, "state": state})


def set_rate(value: float, given: Any) -> None:
    for group in given["optimizer"].param_groups:
        group["lr"] = value


def set_weight(value: float, given: Any) -> None:
    with torch.no_grad():
        given["model"].head.bias.fill_(value)


def set_rate_at(step: int, given: Any) -> None:
    if given["state"].global_step == step:
        set_rate(0.5, given)


def move_at(step: int, given: Any) -> None:
    if given["state"].global_step == step:
        set_weight(0.5, given)


def table(offset: int = 0) -> Any:
    from datasets import Dataset

    kept = [{name: value.tolist() for name, value in each.items()} for each in samples(LENGTHS[:8])]
    return Dataset.from_list([*kept[offset:], *kept[:offset]]).with_format("torch")


def part(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.random_split(samples(LENGTHS[:8]), [5, 3], generator=generator)[0]


def frozen_head() -> nn.Module:
    model = made(Blocks)
    model.head.bias.requires_grad = False
    return model


def _arguments(**values: Any) -> Callable[[Given], None]:
    return lambda given: given.args.update(values)


def _set(**values: Any) -> Callable[[Given], None]:
    def change(given: Given) -> None:
        for name, value in values.items():
            setattr(given, name, value)

    return change


def _callback(event: str, change: Callable[..., None]) -> Callable[[Given], None]:
    return lambda given: given.options.update(callbacks=[Sets(event, change)])


def nothing(given: Any) -> None: ...


SGD = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1)}
WITH_SCHEDULE = {**SGD, "schedule": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)}

REFUSED: dict[str, tuple[Callable[[Given], None], Callable[[Given], None], str]] = {
    # what both ranks have, what rank 1 has instead, and the words of the error
    "learning_rate": (_set(), _arguments(learning_rate=0.01), "learning_rate is 0.1 on rank 0 and 0.01 on rank 1"),
    "weight_decay": (_set(), _arguments(weight_decay=0.1), "weight_decay is 0.0 on rank 0 and 0.1 on rank 1"),
    "optim": (_set(), _arguments(optim="adamw_torch"), "optim is 'sgd' on rank 0 and 'adamw_torch' on rank 1"),
    "schedule": (_set(), _arguments(lr_scheduler_type="cosine"), "lr_scheduler_type is 'constant' on rank 0"),
    "clipping": (_set(), _arguments(max_grad_norm=0.5), "max_grad_norm is 0.0 on rank 0 and 0.5 on rank 1"),
    "seed": (_set(), _arguments(seed=7), "seed is 42 on rank 0 and 7 on rank 1"),
    "data_seed": (_set(), _arguments(data_seed=7), "data_seed is None on rank 0 and 7 on rank 1"),
    "batch_size": (_set(), _arguments(per_device_train_batch_size=1), "per_device_train_batch_size is 8"),
    "epochs": (_set(), _arguments(num_train_epochs=2), "num_train_epochs is 1"),
    "precision": (_set(), _arguments(bf16=True), "bf16 is False on rank 0 and True on rank 1"),
    "fsdp": (_set(), _arguments(fsdp=True, optim="adamw_torch"), "fsdp is"),
    "length": (_set(), _set(data=lambda: samples(LENGTHS[:7])), "len(train_dataset) is 8 on rank 0 and 7 on rank 1"),
    "eval_length": (
        _set(options={"eval_dataset": samples(LENGTHS[:4])}),
        _set(options={"eval_dataset": samples(LENGTHS[:3])}),
        "len(eval_dataset) is 4 on rank 0 and 3 on rank 1",
    ),
    "rows": (_set(data=table), _set(data=partial(table, 1)), "a hash of rows of train_dataset is"),
    "subset": (
        _set(data=partial(part, 7)),
        _set(data=partial(part, 8)),
        "a hash of train_dataset.indices is",
    ),
    "columns": (
        _set(data=table),
        _set(data=lambda: table().rename_column("labels", "label")),
        "train_dataset.column_names is",
    ),
    "width": (_set(), _set(model=lambda: made(Blocks, width=9)), "embed.weight is float64 (13, 7)"),
    "dtype": (_set(), _set(model=lambda: made(Blocks).float()), "head.bias is float64 (13,)"),
    "model_class": (_set(), _set(model=partial(made, Renamed)), "model is"),
    "dropout": (
        _set(model=lambda: made(Dropped, rate=0.1)),
        _set(model=lambda: made(Dropped, rate=0.3)),
        "module drop is torch.nn.modules.dropout.Dropout(p=0.1, inplace=False) on rank 0",
    ),
    "requires_grad": (
        _set(),
        _set(model=frozen_head),
        "head.bias is float64 (13,), requires_grad=True on rank 0",
    ),
    "trainer": (_set(), _set(cls=Scaled), "trainer class is loopwright.pt.trainer.Trainer on rank 0"),
    "loss": (
        _set(options={"compute_loss_func": scaling(1.0)}),
        _set(options={"compute_loss_func": squared}),
        "compute_loss_func is",
    ),
    "optimizer": (
        _set(**SGD),
        _set(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
        "momentum of optimizer group 0 is 0 on rank 0 and 0.9 on rank 1",
    ),
    "optimizer_class": (
        _set(**SGD),
        _set(optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.1)),
        "optimizer is torch.optim.sgd.SGD on rank 0 and torch.optim.adam.Adam on rank 1",
    ),
    "schedule_passed": (
        _set(**WITH_SCHEDULE),
        _set(schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)),
        "lr of optimizer group 0 is 0.1 on rank 0 and 0.05 on rank 1",
    ),
    "rate_at_begin": (
        _callback("on_train_begin", nothing),
        _callback("on_train_begin", partial(set_rate, 0.5)),
        "lr of optimizer group 0 is 0.1 on rank 0 and 0.5 on rank 1",
    ),
    "rate_at_step": (
        _callback("on_step_begin", nothing),
        _callback("on_step_begin", partial(set_rate, 0.5)),
        "lr of optimizer group 0 is 0.1 on rank 0 and 0.5 on rank 1",
    ),
    "clipping_at_begin": (
        _callback("on_train_begin", nothing),
        _callback("on_train_begin", lambda given: setattr(given["args"], "max_grad_norm", 0.5)),
        "max_grad_norm is 0.0 on rank 0 and 0.5 on rank 1",
    ),
    "weights_at_begin": (
        _callback("on_train_begin", nothing),
        _callback("on_train_begin", partial(set_weight, 0.5)),
        "the weight head.bias is of hash",
    ),
    "rate_later": (
        _callback("on_step_end", nothing),
        _callback("on_step_end", partial(set_rate_at, 3)),
        "lr of optimizer group 0 is 0.1 on rank 0 and 0.5 on rank 1",
    ),
    "resume": (_set(), _set(resume=False), "resume_from_checkpoint of train() is None on rank 0 and False on rank 1"),
    "default_dtype": (
        _set(),
        _set(before=lambda: torch.set_default_dtype(torch.float64)),
        "torch.get_default_dtype() is torch.float32 on rank 0 and torch.float64 on rank 1",
    ),
}


@dataclass
class OwnArguments(loopwright.TrainingArguments):
    node: int = 0


ALLOWED: dict[str, tuple[Callable[[Given], None], Callable[[Given], None], str]] = {
    # what both ranks have, what rank 1 has instead, and the words of the warning, if there is one
    "nothing": (_set(), _set(), ""),
    "local_rank": (_set(), _arguments(local_rank=1), ""),
    "log_level": (_set(), _arguments(log_level="error", log_level_replica="error"), ""),
    "report_to": (_set(), _arguments(run_name="other", logging_dir="elsewhere"), ""),
    "workers": (_set(), _arguments(dataloader_pin_memory=False), ""),
    "progress": (_set(), _arguments(disable_tqdm=False), ""),
    "output_dir": (_set(), _arguments(output_dir="other"), "output_dir is"),
    "callback": (_callback("on_log", nothing), _set(options={}), "callbacks is"),
    "own_field": (
        _set(args_class=OwnArguments),
        _arguments(node=1),
        "node is 0 on rank 0 and 1 on rank 1",
    ),
    "list": (_set(), _set(data=lambda: samples(LENGTHS[:8][::-1])), "a hash of rows of train_dataset is"),
    "enclosed": (
        _set(options={"compute_loss_func": scaling(1.0)}),
        _set(options={"compute_loss_func": scaling(1.5)}),
        "what compute_loss_func uses is",
    ),
    "diverged": (
        _callback("on_step_end", nothing),
        _callback("on_step_end", partial(move_at, 2)),
        "the replicas have diverged by step 3: the weight",
    ),
}


def run_with(row: str, folder: str, **options: Any) -> Any:
    """Train with what this rank has; returns the weights and the warnings."""
    rank = int(os.environ["RANK"])
    both, other, _ = {**REFUSED, **ALLOWED}[row]
    given = Given(args={"num_train_epochs": 1, "per_device_train_batch_size": 1, **options})
    if row in ("rate_later", "diverged"):
        given.args.update(save_strategy="steps", save_steps=3)
    if row == "batch_size":
        given.args.pop("per_device_train_batch_size")
    both(given)
    if rank == 1:
        other(given)
    before = torch.get_default_dtype()
    try:
        given.before()
        return _trained(given, folder)
    finally:
        torch.set_default_dtype(before)
        logging.getLogger("loopwright").setLevel(logging.NOTSET)


def _trained(given: Given, folder: str) -> Any:
    place = os.path.join(folder, given.args.pop("output_dir", "run"))
    model = given.model()
    optimizer = given.optimizer(model) if given.optimizer else None
    schedule = given.schedule(optimizer) if given.schedule else None
    trainer = given.cls(
        model,
        given.args_class(place, **{**CPU, **given.args}),
        data_collator=pad,
        train_dataset=given.data(),
        optimizers=(optimizer, schedule),
        **given.options,
    )
    trainer.train(resume_from_checkpoint=given.resume)
    return full_weights(trainer.model), trainer._loopwright.notices.told
