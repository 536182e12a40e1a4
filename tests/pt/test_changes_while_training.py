"""What callbacks and overrides change while a run trains counts at once, as in a loop written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright
from loopwright import ArgumentsError, ModelError, NotAvailable
from tests.models import CPU, VOCAB, Tokens, pad, samples, summed
from tests.spreads import spread

UPDATES = 6
LENGTHS = (11, 5, 17, 3, 9, 8, 6, 14, 4, 7, 12, 10)
EVENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log")


class Net(Tokens):
    """Tokens with a part that may come later, and a part that computes another thing in training."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Identity()
        self.seen: list[list[bool]] = []

    def logits(self, input_ids: Tensor) -> Tensor:
        self.seen.append([module.training for module in self.modules()])
        hidden = torch.tanh(self.mix(self.embed(input_ids)))
        if hasattr(self, "extra"):
            hidden = hidden + self.extra(hidden)
        return self.head(hidden * (1.5 if self.gate.training else 0.5))


def net(frozen: tuple[str, ...] = ("mix",)) -> Net:
    torch.manual_seed(0)
    model = Net().double()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


# ---- the same run twice ----------------------------------------------------------------------------------------------


class Hand:
    """The loop somebody writes by hand, with the same events."""

    def __init__(self, model: nn.Module, *, accumulation: int, max_norm: float) -> None:
        self.model, self.optimizer, self.lr_scheduler = model, sgd(model), None
        self.args = SimpleNamespace(gradient_accumulation_steps=accumulation, max_grad_norm=max_norm)
        self.norms: list[float] = []
        self.weights: list[dict[str, Tensor]] = []
        self.sizes: list[int] = []

    def train(self, data: list[Any], fire: Callable[[str, int], None], updates: int | None = UPDATES) -> None:
        batches, at, step = [pad([each]) for each in data], 0, 0
        while at < len(batches) if updates is None else step < updates:
            taken = batches[at : at + self.args.gradient_accumulation_steps]
            at = (at + len(taken)) % len(batches) if updates is not None else at + len(taken)
            self.update(taken, lambda event, now=step: fire(event, now))
            step += 1

    def update(self, batches: list[Any], fire: Callable[[str], None]) -> None:
        fire("on_step_begin")
        count = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        self.sizes.append(len(batches))
        for index, batch in enumerate(batches):
            self.model.train()
            (summed(self.model.logits(batch["input_ids"]), batch["labels"])[0] / count).backward()
            if index + 1 < len(batches):
                fire("on_substep_end")
        self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)))
        fire("on_pre_optimizer_step")
        self.optimizer.step()
        fire("on_optimizer_step")
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        for parameter in [*self.model.parameters(), *(p for g in self.optimizer.param_groups for p in g["params"])]:
            parameter.grad = None
        self.weights.append(weights_of(self.model))
        fire("on_step_end")
        fire("on_log")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Change(loopwright.TrainerCallback):
    """Does something to the trainer once, at one event of one step; keeps the weights after each update."""

    def __init__(self, event: str, step: int, action: Callable[[Any], None]) -> None:
        self.event, self.step, self.action, self.run = event, step, action, None
        self.weights: list[dict[str, Tensor]] = []
        self.sizes: list[int] = []
        self.is_done = False
        setattr(self, event, self.act)

    def act(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        after = self.event in ("on_step_end", "on_log", "on_save", "on_evaluate", "on_epoch_end")
        if state.global_step == self.step + after and not self.is_done:
            self.is_done = True
            self.action(self.run)


class Keep(loopwright.TrainerCallback):
    """Comes after every change, so that events of the change itself are not replaced."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.weights.append(weights_of(model))


def trained(
    model: nn.Module, change: Change | None, folder: Any, *, cls: type = loopwright.Trainer, optimizer: Any = sgd,
    data: Any = None, **options: Any,
) -> tuple[Any, Keep]:  # fmt: skip
    keep = Keep()
    args = loopwright.TrainingArguments(
        output_dir=str(folder),
        **{**CPU, "per_device_train_batch_size": 1, "max_grad_norm": 0.2, "max_steps": UPDATES, **options},
    )
    trainer = cls(
        model, args, data_collator=pad, train_dataset=samples(LENGTHS) if data is None else data,
        eval_dataset=samples(LENGTHS[:2]), callbacks=[keep, *([change] if change else [])],
        optimizers=(optimizer(model), None) if optimizer else (None, None),
    )  # fmt: skip
    if change is not None:
        change.run = trainer
    trainer.train()
    assert change is None or change.is_done
    return trainer, keep


def norms(trainer: Any) -> list[float]:
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


def by_hand(
    model: nn.Module, event: str, step: int, action: Callable[[Any], None], *, accumulation: int = 2,
    max_norm: float = 0.2, updates: int | None = UPDATES, data: Any = None,
) -> Hand:  # fmt: skip
    hand, done = Hand(model, accumulation=accumulation, max_norm=max_norm), []

    def fire(name: str, now: int) -> None:
        if name == event and now == step and not done:
            done.append(action(hand))

    hand.train(samples(LENGTHS) if data is None else data, fire, updates)
    assert done
    return hand


def assert_same(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    assert len(ours) == len(theirs)
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert one.keys() == other.keys()
        for name in one:
            worst = float((one[name] - other[name]).abs().max())
            assert worst < 1e-10, f"after step {step} {name} differs by {worst:.1e}"


# ---- parameters and optimizers ---------------------------------------------------------------------------------------


def unfreeze(run: Any) -> None:
    run.model.mix.requires_grad_(True)


def freeze(run: Any) -> None:
    run.model.head.requires_grad_(False)


def exchange(run: Any) -> None:
    """As set_adapter does: one part is frozen, another one is trained."""
    unfreeze(run)
    run.model.embed.requires_grad_(False)


def new_layer() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(6, 6).double()


def add_module(run: Any) -> None:
    run.model.extra = new_layer()
    run.optimizer.add_param_group({"params": list(run.model.extra.parameters()), "lr": 0.03})


def add_module_nobody_steps(run: Any) -> None:
    run.model.extra = new_layer()


def add_group(run: Any) -> None:
    """Parameters that were trained by nobody: a second optimizer made without them."""
    run.optimizer = torch.optim.SGD(run.model.head.parameters(), lr=0.05, momentum=0.9)
    run.optimizer.add_param_group({"params": list(run.model.embed.parameters()), "lr": 0.02})


def replace_parameter(run: Any) -> None:
    old, run.model.head.bias = run.model.head.bias, nn.Parameter(torch.full((VOCAB,), 0.1, dtype=torch.float64))
    put_into_group(run, old, run.model.head.bias)


def write_into_dict(run: Any) -> None:
    """As libraries that move single tensors do, past every hook of torch."""
    old, new = run.model.head.bias, nn.Parameter(torch.full((VOCAB,), 0.2, dtype=torch.float64))
    run.model.head._parameters["bias"] = new
    put_into_group(run, old, new)


def resize_embedding(run: Any) -> None:
    torch.manual_seed(7)
    old, run.model.embed = run.model.embed.weight, nn.Embedding(VOCAB + 3, 6).double()
    put_into_group(run, old, run.model.embed.weight)


def put_into_group(run: Any, old: Tensor, new: Tensor) -> None:
    for group in run.optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    run.optimizer.state.pop(old, None)


def drop_parameter(run: Any) -> None:
    old = run.model.head.bias
    run.model.head.register_parameter("bias", None)
    for group in run.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not old]


def replace_optimizer(run: Any) -> None:
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01)


def replace_both(run: Any) -> None:
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01)
    run.lr_scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)


def clip_harder(run: Any) -> None:
    run.args.max_grad_norm = 0.01


ACTIONS = [unfreeze, freeze, exchange, add_module, add_module_nobody_steps, add_group, replace_parameter,
           write_into_dict, resize_embedding, drop_parameter, replace_optimizer, replace_both, clip_harder]  # fmt: skip
IN_BETWEEN = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")


@pytest.mark.parametrize(("action", "event"), spread(ACTIONS, EVENTS))
def test_a_change_counts_as_in_a_loop_written_by_hand(action: Any, event: str, tmp_path: Any) -> None:
    model = net()
    hand = by_hand(copy.deepcopy(model), event, 2, action)
    change = Change(event, 2, action)
    trainer, keep = trained(model, change, tmp_path, gradient_accumulation_steps=2)
    assert_same(keep.weights, hand.weights)
    assert norms(trainer) == pytest.approx(hand.norms, rel=1e-10)
    assert len({round(norm, 12) for norm in hand.norms}) == UPDATES
    leftover = [
        p for p in (*trainer.model.parameters(), *trainer._loopwright.strategy.contents.outside) if p.grad is not None
    ]
    assert not leftover


@pytest.mark.parametrize("speed", ["off", "auto", "max"])
@pytest.mark.parametrize("action", [unfreeze, exchange, add_module])
def test_a_change_counts_at_every_speed(action: Any, speed: str, tmp_path: Any) -> None:
    model = net()
    hand = by_hand(copy.deepcopy(model), "on_step_end", 2, action)
    trainer, keep = trained(model, Change("on_step_end", 2, action), tmp_path, gradient_accumulation_steps=2,
                            speed=speed)  # fmt: skip
    assert_same(keep.weights, hand.weights)
    assert norms(trainer) == pytest.approx(hand.norms, rel=1e-9)


def test_a_parameter_unfrozen_on_one_batch_at_learning_rate_zero_keeps_one_norm(tmp_path: Any) -> None:
    model, one = net(("mix", "embed")), samples((9,))
    change = Change("on_step_end", 1, unfreeze)
    trainer, _ = trained(model, change, tmp_path, data=one, optimizer=lambda m: sgd(m, lr=0.0))
    found = norms(trainer)
    assert found[2] > found[1] and found[2:] == pytest.approx([found[2]] * (UPDATES - 2), rel=1e-12)


def test_parameters_that_forward_makes_are_clipped_in_their_first_update(tmp_path: Any) -> None:
    class Lazy(Net):
        def logits(self, input_ids: Tensor) -> Tensor:
            if len(self.seen) == 3:
                self.extra = new_layer()
            return super().logits(input_ids)

    torch.manual_seed(0)
    model = Lazy().double()
    hand = by_hand(copy.deepcopy(model), "on_step_begin", 0, lambda run: None, accumulation=1)
    trainer, keep = trained(model, None, tmp_path, gradient_accumulation_steps=1, speed="off")
    assert norms(trainer) == pytest.approx(hand.norms, rel=1e-10)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_an_override_of_compute_loss_may_freeze_and_unfreeze(tmp_path: Any) -> None:
    class Alternating(loopwright.Trainer):
        """Trains one half of the model in one step and the other half in the next."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            even = self.state.global_step % 2 == 0
            model.mix.requires_grad_(even)
            model.head.requires_grad_(not even)
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    model, reference = net(()), net(())
    hand = Hand(reference, accumulation=1, max_norm=0.2)

    def alternate(event: str, step: int) -> None:
        if event == "on_step_begin":
            reference.mix.requires_grad_(step % 2 == 0)
            reference.head.requires_grad_(step % 2 == 1)

    hand.train(samples(LENGTHS), alternate)
    trainer, keep = trained(model, None, tmp_path, cls=Alternating)
    assert_same(keep.weights, hand.weights)
    assert norms(trainer) == pytest.approx(hand.norms, rel=1e-10)


class Margin(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        total, count = summed(outputs["logits"] * self.scale, labels)
        return total, count


def test_parameters_of_the_loss_are_zeroed_and_divided_but_not_clipped(tmp_path: Any) -> None:
    margin, model = Margin(), net(())
    reference, other = copy.deepcopy(model), copy.deepcopy(margin)
    optimizer = torch.optim.SGD([*reference.parameters(), *other.parameters()], lr=0.1)
    for at in range(0, 8, 2):
        batches = [pad([each]) for each in samples(LENGTHS)[at : at + 2]]
        parts = [summed(reference.logits(b["input_ids"]) * other.scale, b["labels"]) for b in batches]
        (sum(total for total, _ in parts) / sum(count for _, count in parts)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    args = loopwright.TrainingArguments(
        output_dir=str(tmp_path),
        **{**CPU, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 4,
           "max_grad_norm": 0.2},
    )  # fmt: skip
    trainer = loopwright.Trainer(
        model, args, data_collator=pad, train_dataset=samples(LENGTHS), compute_loss_func=margin,
        optimizers=(torch.optim.SGD([*model.parameters(), *margin.parameters()], lr=0.1), None),
    )  # fmt: skip
    trainer.train()
    found, expected = float(margin.scale.detach()), float(other.scale.detach())
    assert abs(found - expected) < 1e-10 and abs(found - 1) > 1e-3
    assert margin.scale.grad is None
    assert_same([weights_of(model)], [weights_of(reference)])


def test_peft_adapters_exchanged_in_a_callback_are_trained_one_at_a_time(tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["mix"], r=2, init_lora_weights=False)
        model = peft.get_peft_model(Net().double(), config, adapter_name="first")
        model.add_adapter("second", config)
        model.set_adapter("first")
        return model.double()

    def optimizer(model: Any) -> Any:
        return torch.optim.SGD([p for name, p in model.named_parameters() if "lora" in name], lr=0.1, momentum=0.9)

    def action(run: Any) -> None:
        run.model.set_adapter("second")

    reference = adapted()
    torch.manual_seed(1)
    hand = Hand(reference, accumulation=1, max_norm=0.02)
    hand.optimizer = optimizer(reference)
    hand.train(samples(LENGTHS), lambda event, step: action(hand) if (event, step) == ("on_step_end", 2) else None)
    model = adapted()
    trainer, keep = trained(model, Change("on_step_end", 2, action), tmp_path, optimizer=optimizer, max_grad_norm=0.02)
    assert_same(keep.weights, hand.weights)
    assert norms(trainer) == pytest.approx(hand.norms, rel=1e-9)


def test_the_state_of_a_new_optimizer_is_saved(tmp_path: Any) -> None:
    trainer, _ = trained(net(()), Change("on_step_end", 2, replace_optimizer), tmp_path, save_strategy="steps",
                         save_steps=UPDATES)  # fmt: skip
    text = (tmp_path / f"checkpoint-{UPDATES}" / "optimizer.json").read_text()
    assert "exp_avg_sq" in text and "momentum_buffer" not in text
    assert trainer.callback_handler.context["optimizer"] is trainer.optimizer


def test_a_schedule_of_the_former_optimizer_is_said(tmp_path: Any) -> None:
    trainer, _ = trained(net(()), Change("on_step_end", 2, replace_optimizer), tmp_path, optimizer=None)
    assert any("trainer.optimizer was replaced after step 3" in told for told in trainer._loopwright.notices.told)


def test_a_schedule_that_goes_by_a_metric_may_come_later(tmp_path: Any) -> None:
    def action(run: Any) -> None:
        run.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=0, factor=0.5, mode="max")

    trainer, _ = trained(net(()), Change("on_step_end", 1, action), tmp_path, eval_strategy="steps", eval_steps=1)
    assert trainer.optimizer.param_groups[0]["lr"] < 0.1 and trainer._loopwright.run.schedule_follows_metric


def test_an_optimizer_cannot_be_taken_away(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="set to None"):
        trained(net(), Change("on_step_end", 2, lambda run: setattr(run, "optimizer", None)), tmp_path)


# ---- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [each for each in ACTIONS if each is not clip_harder])
def test_changes_rise_with_each_change_and_never_without(action: Any, tmp_path: Any) -> None:
    seen: list[int] = []

    class Note(loopwright.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if not self._loopwright.is_probing:
                seen.append(self._loopwright.strategy.changes)
            return super().compute_loss(*args, **kwargs)

    trained(net(), Change("on_step_end", 2, action), tmp_path, cls=Note, speed="off", gradient_accumulation_steps=1)
    assert len(set(seen[:3])) == 1 and len(set(seen[3:])) == 1 and seen[3] > seen[2]


# ---- modes -----------------------------------------------------------------------------------------------------------


def evaluate_all(run: Any) -> None:
    run.model.eval()


def evaluate_a_part(run: Any) -> None:
    run.model.gate.eval()


@pytest.mark.parametrize(
    ("action", "event"), spread([evaluate_all, evaluate_a_part], [*EVENTS, "on_epoch_end", "on_save", "on_evaluate"])
)
def test_a_model_left_in_evaluation_mode_is_trained_in_training_mode(action: Any, event: str, tmp_path: Any) -> None:
    model, step = net(()), 5 if event == "on_epoch_end" else 2
    hand = by_hand(copy.deepcopy(model), "on_step_end", 0, lambda run: None)
    more = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    trainer, keep = trained(model, Change(event, step, action), tmp_path, gradient_accumulation_steps=2,
                            **(more if event in ("on_save", "on_evaluate") else {}))  # fmt: skip
    assert_same(keep.weights, hand.weights)


def test_a_part_in_evaluation_mode_from_the_start_is_trained_as_transformers_does(tmp_path: Any) -> None:
    model = net(())
    model.gate.eval()
    trained(model, None, tmp_path, speed="off")
    assert all(all(modes) for modes in model.seen)


def test_a_train_method_of_the_users_decides_in_every_step(tmp_path: Any) -> None:
    class Kept(Net):
        calls = 0

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.calls += 1
            self.gate.eval()
            return self

    torch.manual_seed(0)
    model = Kept().double()
    trained(model, Change("on_step_end", 2, lambda run: run.model.gate.train()), tmp_path, speed="off")
    assert all(not modes[-1] for modes in model.seen) and model.calls >= UPDATES


def test_a_train_method_put_on_a_submodule_is_honoured(tmp_path: Any) -> None:
    def keep_off(run: Any) -> None:
        run.model.gate.eval()
        run.model.gate.train = lambda mode=True: run.model.gate

    model = net(())
    trained(model, Change("on_step_end", 2, keep_off), tmp_path, speed="off")
    assert [modes[-1] for modes in model.seen] == [True] * 3 + [False] * 3


def test_a_wrapper_is_put_into_training_mode_too(tmp_path: Any) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.modes = inner, []

        def forward(self, **inputs: Any) -> Any:
            self.modes.append(self.training)
            return self.inner(**inputs)

    class Wrapping(loopwright.Trainer):
        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            return Wrapper(model) if training else model

    change = Change("on_step_end", 2, lambda run: run.model_wrapped.eval())
    trainer, _ = trained(net(()), change, tmp_path, cls=Wrapping, speed="off")
    assert all(trainer.model_wrapped.modes) and len(trainer.model_wrapped.modes) == UPDATES


def test_an_optimizer_with_modes_is_put_into_training_mode_in_every_step(tmp_path: Any) -> None:
    class Modal(torch.optim.SGD):
        mode = False
        stepped: list[bool] = []

        def train(self) -> None:
            self.mode = True

        def eval(self) -> None:
            self.mode = False

        def step(self, closure: Any = None) -> Any:
            self.stepped.append(self.mode)
            return super().step(closure)

    change = Change("on_step_end", 2, lambda run: run.optimizer.eval())
    trained(net(()), change, tmp_path, optimizer=lambda model: Modal(model.parameters(), lr=0.1))
    assert Modal.stepped == [True] * UPDATES


# ---- accumulation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 1), (2, 5)])
@pytest.mark.parametrize("event", ["on_step_end", "on_log"])
def test_another_accumulation_counts_from_the_next_update_on(
    before: int, after: int, event: str, tmp_path: Any
) -> None:
    """Every sample is seen once in an epoch, however updates are cut."""

    def action(run: Any) -> None:
        run.args.gradient_accumulation_steps = after

    model = net(())
    hand = by_hand(copy.deepcopy(model), event, 1, action, accumulation=before, updates=None)
    trainer, keep = trained(model, Change(event, 1, action), tmp_path, gradient_accumulation_steps=before,
                            max_steps=-1, num_train_epochs=1)  # fmt: skip
    assert_same(keep.weights, hand.weights)
    assert trainer.state.global_step == trainer.state.max_steps == len(hand.sizes)
    assert trainer.state.epoch == 1.0 and trainer._loopwright.run.progress.samples_seen == len(LENGTHS)


@pytest.mark.parametrize(("at", "change"), spread([0, 2, 3], [(1, 3), (4, 1), (2, 5), (6, 1)]), ids=str)
def test_a_run_by_steps_goes_on_to_its_last_step(at: int, change: tuple[int, int], tmp_path: Any) -> None:
    before, after = change

    def action(run: Any) -> None:
        run.args.gradient_accumulation_steps = after

    model = net(())
    trainer, keep = trained(model, Change("on_step_end", at, action), tmp_path, gradient_accumulation_steps=before,
                            max_steps=20)  # fmt: skip
    batches, sizes = len(LENGTHS), []
    in_epoch = 0
    while len(sizes) < 20:
        size = min(before if len(sizes) <= at else after, batches - in_epoch)
        sizes.append(size)
        in_epoch = (in_epoch + size) % batches
    assert trainer.state.global_step == 20 and trainer._loopwright.run.progress.samples_seen == sum(sizes)
    assert trainer.state.epoch == pytest.approx(sum(sizes) / batches)


@pytest.mark.parametrize("epochs", [2, 2.5])
def test_the_epochs_asked_for_are_trained_whatever_becomes_of_the_accumulation(epochs: float, tmp_path: Any) -> None:
    def action(run: Any) -> None:
        run.args.gradient_accumulation_steps = 4

    trainer, _ = trained(net(()), Change("on_step_end", 8, action), tmp_path, max_steps=-1, num_train_epochs=epochs)
    assert trainer.state.global_step == trainer.state.max_steps
    assert trainer.state.epoch == pytest.approx(epochs, abs=2 / 12)


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_run_with_another_accumulation_is_resumed_exactly(again: bool, schedule: str, tmp_path: Any) -> None:
    """Whether the callback sets it again after resuming, or had its moment before."""

    def action(run: Any) -> None:
        run.args.gradient_accumulation_steps = 3

    options: dict[str, Any] = {"gradient_accumulation_steps": 1, "max_steps": -1, "num_train_epochs": 2,
                               "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": schedule}  # fmt: skip
    whole, keep = trained(net(()), Change("on_step_end", 3, action), tmp_path / "whole", optimizer=None, **options)
    args = loopwright.TrainingArguments(
        output_dir=str(tmp_path / "again"), **{**CPU, "per_device_train_batch_size": 1, "max_grad_norm": 0.2, **options}
    )
    change = Change("on_step_begin", 6, action if again else lambda run: None)
    change.run = resumed = loopwright.Trainer(net(()), args, data_collator=pad, train_dataset=samples(LENGTHS),
                                              callbacks=[change])  # fmt: skip
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert resumed.state.global_step == resumed.state.max_steps == whole.state.global_step
    assert_same([weights_of(resumed.model)], [keep.weights[-1]])


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_an_accumulation_that_is_none_is_refused(value: Any, tmp_path: Any) -> None:
    def action(run: Any) -> None:
        run.args.gradient_accumulation_steps = value

    with pytest.raises(ArgumentsError, match="gradient_accumulation_steps"):
        trained(net(()), Change("on_step_end", 2, action), tmp_path)


def test_the_accumulation_of_the_accelerator_is_refused_with_what_to_set(tmp_path: Any) -> None:
    def action(run: Any) -> None:
        assert run.accelerator.gradient_accumulation_steps == 1
        run.accelerator.gradient_accumulation_steps = 4

    with pytest.raises(NotAvailable, match="args.gradient_accumulation_steps=4"):
        trained(net(()), Change("on_step_end", 2, action), tmp_path)


def test_overrides_are_told_the_micro_batches_of_the_current_update(tmp_path: Any) -> None:
    told: list[int] = []

    class Asking(loopwright.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            told.append(self.current_gradient_accumulation_steps)
            return super().training_step(*args, **kwargs)

    trained(net(()), None, tmp_path, cls=Asking, gradient_accumulation_steps=5, max_steps=-1, num_train_epochs=1)
    assert told == [5] * 10 + [2] * 2


# ---- methods and losses that are assigned ----------------------------------------------------------------------------


def doubled(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    total, count = summed(outputs["logits"], labels)
    return total * 2, count


def assign_loss_function(run: Any) -> None:
    run.compute_loss_func = doubled


def assign_compute_loss(run: Any) -> None:
    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = doubled(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss

    run.compute_loss = compute_loss


def assign_on_class(run: Any) -> None:
    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return doubled(model(input_ids=inputs["input_ids"]), inputs["labels"])

    type(run).compute_loss = compute_loss


def assign_training_step(run: Any) -> None:
    ours = run.training_step

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        run.told.append(len(inputs["input_ids"]))
        return ours(model, inputs, num_items_in_batch)

    run.told = []
    run.training_step = training_step


WHEN = [("on_step_end", 2), ("on_step_begin", 3)]
LATER_LOSSES = [assign_loss_function, assign_compute_loss, assign_on_class]


@pytest.mark.parametrize(("when", "action", "speed"), spread(WHEN, LATER_LOSSES, ["off", "auto", "max"]))
def test_another_loss_counts_from_the_next_update_on(action: Any, speed: str, when: Any, tmp_path: Any) -> None:
    class Own(loopwright.Trainer):
        """A class that may be changed without harm to other tests."""

    model = net(())
    reference = copy.deepcopy(model)
    optimizer, factor = sgd(reference), 1.0
    expected = []
    for at in range(0, 12, 2):
        batches = [pad([each]) for each in samples(LENGTHS)[at : at + 2]]
        parts = [summed(reference.logits(b["input_ids"]), b["labels"]) for b in batches]
        (factor * sum(total for total, _ in parts) / sum(count for _, count in parts)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(weights_of(reference))
        factor = 2.0 if at >= 4 else 1.0
    _, keep = trained(model, Change(*when, action), tmp_path, cls=Own, gradient_accumulation_steps=2,
                      speed=speed, max_grad_norm=2.0)  # fmt: skip
    assert_same(keep.weights, expected)


def test_a_training_step_assigned_in_a_callback_is_called_from_the_next_update_on(tmp_path: Any) -> None:
    trainer, _ = trained(net(()), Change("on_step_end", 2, assign_training_step), tmp_path)
    assert trainer.told == [1] * (UPDATES - 3)


def test_an_evaluation_right_after_takes_the_new_loss(tmp_path: Any) -> None:
    trainer, _ = trained(net(()), Change("on_step_end", 2, assign_loss_function), tmp_path, learning_rate=0.0,
                         optimizer=lambda model: sgd(model, lr=0.0), eval_strategy="steps", eval_steps=1)  # fmt: skip
    found = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert found == pytest.approx([found[0]] * 2 + [2 * found[0]] * 4)


# ---- what cannot be followed -----------------------------------------------------------------------------------------


def test_another_model_is_refused_at_the_next_update(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match=r"trainer\.model was assigned after step 3"):
        trained(net(()), Change("on_step_end", 2, lambda run: setattr(run, "model", net(()))), tmp_path)


def test_another_model_for_an_evaluation_is_evaluated(tmp_path: Any) -> None:
    """As callbacks with averaged weights do."""
    silent = net(())
    for parameter in silent.parameters():
        nn.init.zeros_(parameter)
    found: list[float] = []

    def action(run: Any) -> None:
        own, run.model = run.model, silent
        found.append(run.evaluate()["eval_loss"])
        run.model = own

    trained(net(()), Change("on_step_end", 2, action), tmp_path)
    assert found == pytest.approx([float(torch.log(torch.tensor(float(VOCAB))))])


def test_another_model_between_two_runs_is_trained_with_an_optimizer_of_its_own(tmp_path: Any) -> None:
    trainer, _ = trained(net(()), None, tmp_path, optimizer=None)
    other = net(())
    before = weights_of(other)
    trainer.model = other
    trainer.train()
    assert any(not torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    assert trainer._loopwright.strategy.model is other


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (lambda run: setattr(run.args, "learning_rate", 1.0), "without effect on this run: learning_rate"),
        (lambda run: setattr(run.args, "num_train_epochs", 9.0), "without effect on this run: num_train_epochs"),
        (lambda run: setattr(run.args, "logging_steps", 7), "without effect: logging_steps"),
        (lambda run: setattr(run, "train_dataset", samples(LENGTHS)), "trainer.train_dataset was replaced"),
        (lambda run: setattr(run, "data_collator", lambda rows: pad(rows)), "trainer.data_collator was replaced"),
    ],
)
def test_what_is_taken_once_is_said(action: Any, told: str, tmp_path: Any) -> None:
    trainer, _ = trained(net(()), Change("on_step_end", 2, action), tmp_path)
    assert any(told in each for each in trainer._loopwright.notices.told)


def test_other_evaluation_data_and_metrics_count_at_the_next_evaluation(tmp_path: Any) -> None:
    def action(run: Any) -> None:
        run.eval_dataset = samples(LENGTHS[:5])
        run.compute_metrics = lambda predictions: {"rows": float(len(predictions.label_ids))}

    trainer, _ = trained(net(()), Change("on_step_end", 2, action), tmp_path, eval_strategy="steps", eval_steps=1,
                         per_device_eval_batch_size=1)  # fmt: skip
    rows = [row.get("eval_rows") for row in trainer.state.log_history if "eval_loss" in row]
    assert rows[:2] == [None, None] and rows[2:] == [5.0] * 4
