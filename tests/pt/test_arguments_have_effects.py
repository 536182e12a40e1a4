"""No argument is accepted and ignored: each has a test that shows its effect, raises, or is known to be stored.

`shows("name", ...)` says which arguments a test is about; the first test walks all arguments and asks for each of them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.args.effects import IDLE
from loopwright.args.field import specs
from tests.models import Regression, logged, regression_data, small_bert, small_llama, token_data

ROOT = Path(__file__).resolve().parents[2]
DATA = regression_data(12)
SHOWN: dict[str, str] = {}


def shows(*names: str) -> Callable[[Any], Any]:
    """Say that a test shows the effect of these arguments."""

    def keep(test: Any) -> Any:
        for name in names:
            assert name not in SHOWN, f"{name} is shown twice"
            SHOWN[name] = test.__name__
        return test

    return keep


ELSEWHERE = {
    "push_to_hub": "tests/hub/test_pushes.py::test_a_push_after_training_without_push_to_hub",
    "hub_model_id": "tests/hub/test_failures.py::test_the_repository_is_the_one_that_is_named",
    "hub_strategy": "tests/hub/test_pushes.py::test_the_newest_checkpoint_is_in_last_checkpoint",
    "hub_always_push": "tests/hub/test_pushes.py::test_every_save_pushes_the_model_of_each_checkpoint",
    "hub_token": "tests/hub/test_failures.py::test_a_wrong_token_is_refused_before_training",
    "hub_private_repo": "tests/hub/test_pushes.py::test_a_push_after_training_without_push_to_hub",
    "hub_revision": "tests/hub/test_pushes.py::test_a_push_after_training_without_push_to_hub",
    "chart": "tests/report/test_terminal.py::test_the_chart_argument_draws_above_the_progress_bar",
    "html_report": "tests/report/test_writer.py::test_html_report_false_writes_no_page",
    "measure_matmul": "tests/speed/test_sustained.py::test_a_run_reports_both_measures",
    "speed": "tests/speed/test_layouts_in_training.py::test_the_level_says_what_is_tried",
    "per_device_train_batch_tokens": "tests/speed/test_layouts_in_training.py::test_a_token_budget_is_kept",
    "static_lengths": "tests/pt/test_static_shapes.py::test_one_length_makes_all_batches_alike",
    "batch_packing": "tests/speed/test_packing.py::test_a_micro_batch_is_what_fits_and_one_row",
    "auto_find_batch_size": "tests/pt/test_oom.py::test_weights_and_logs_are_those_of_the_run_that_fits",
    "bf16": "tests/pt/test_precision.py::test_autocast_computes_in_half_and_keeps_weights_whole",
    "fp16": "tests/pt/test_precision.py::test_a_step_that_overflows_is_skipped_and_the_schedule_waits",
    "bf16_full_eval": "tests/pt/test_precision.py::test_a_full_eval_cast_is_undone_to_the_bit",
    "fp16_full_eval": "tests/pt/test_precision.py::test_a_full_eval_cast_is_undone_to_the_bit",
    "fp8": "tests/speed/test_fp8.py::test_the_argument_is_refused_where_no_device_computes_in_it",
    "tf32": "tests/pt/test_precision.py::test_tf32_is_set_as_asked_and_left_alone_otherwise",
    "half_precision_backend": "tests/pt/test_precision.py::test_every_other_backend_is_torchs",
    "fp16_opt_level": "tests/pt/test_precision.py::test_apex_is_really_used",
    "on_nonfinite": "tests/pt/test_nonfinite.py::test_a_skipped_update_never_happened",
    "on_spike": "tests/pt/test_spikes.py::test_the_run_goes_back_and_leaves_the_window_out",
    "logging_nan_inf_filter": (
        "tests/pt/test_nonfinite.py::test_the_filter_leaves_bad_losses_out_of_the_mean_and_nothing_else"
    ),
    "optim_args": "tests/pt/test_optimizers.py::test_optim_args_are_typed",
    "optim_target_modules": "tests/pt/test_optimizers.py::test_targets_are_names_patterns_or_all_linear",
    "save_minutes": "tests/callbacks/test_flow.py::test_save_minutes_counts_from_the_last_checkpoint",
    "max_runtime": "tests/callbacks/test_flow.py::test_max_runtime_stops_and_saves_before_the_limit",
    "dataloader_drop_last": "tests/pt/test_data.py::test_drop_last_leaves_out_the_short_batch",
    "data_seed": "tests/pt/test_data.py::test_the_seed_decides_the_order_and_data_seed_wins",
    "train_sampling_strategy": "tests/pt/test_data.py::test_grouping_by_length_pads_less_and_loses_no_sample",
    "length_column_name": "tests/pt/test_data.py::test_grouping_by_length_reads_the_length_column",
    "label_names": "tests/pt/test_overrides.py::test_label_names_say_what_labels_are",
    "strict": "tests/pt/test_bad_input.py::test_strict_turns_notices_into_errors",
    "ignore_data_skip": "tests/pt/test_resume.py::test_ignore_data_skip_starts_the_epoch_anew",
    "resume_from_checkpoint": "tests/pt/test_resume.py::test_resume_from_checkpoint_may_be_an_argument",
    "restore_callback_states_from_checkpoint": (
        "tests/pt/test_resume.py::test_callbacks_do_not_get_their_state_back_when_told_so"
    ),
    "save_on_interrupt": "tests/core/test_going_on.py::test_a_script_goes_on_and_ctrl_c_shows_no_traceback",
    "take_over": "tests/core/test_owner.py::test_taking_over_stops_the_first_run_which_writes_nothing_more",
    "save_total_limit": "tests/pt/test_resume.py::test_save_total_limit_keeps_the_newest",
    "save_only_model": "tests/pt/test_resume.py::test_a_checkpoint_of_weights_only_cannot_be_resumed_from",
    "use_cache": "tests/pt/test_constructor.py::test_the_cache_of_a_model_is_switched_as_asked",
    "fsdp": "tests/distributed/test_contract.py::test_fsdp_ends_with_the_weights_of_one_process",
    "fsdp_config": "tests/distributed/test_sharding.py::test_fsdp_config_decides_what_is_wrapped",
    "parallelism_config": "tests/distributed/test_contract.py::test_models_that_carry_a_plan_need_no_other",
    "deepspeed": "tests/distributed/test_contract.py::test_deepspeed_ends_with_the_weights_of_one_process",
    "use_liger_kernel": "tests/speed/test_liger.py::test_kernels_that_agree_are_used_and_removed_afterwards",
    "liger_kernel_config": "tests/speed/test_liger.py::test_an_option_that_does_not_exist_is_named",
    "param_groups": "tests/pt/test_param_groups.py::test_learning_rates_and_decay_by_pattern",
    "train_dataset_weights": "tests/pt/test_mixing.py::test_each_source_has_its_share",
    "logging_source_losses": "tests/pt/test_mixing.py::test_the_loss_of_each_source_is_that_by_hand",
    "debug": "tests/pt/test_debug.py::test_an_overflow_stops_training_and_is_shown",
    "logging_dir": "tests/reporters/test_tensorboard.py::test_a_resumed_run_has_each_step_once",
}
"""Arguments whose effect another file shows."""

STORED = {"do_train", "do_eval", "do_predict", "local_rank"}
"""Kept for scripts and launchers, and listed as having no effect when given."""

ONE_PROCESS = {
    "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
    "ddp_timeout", "average_tokens_across_devices", "log_on_each_node", "log_level_replica", "save_on_each_node",
    "eval_use_gather_object",
}  # fmt: skip
"""About several processes: kept, and listed as having no effect on one."""

OF_A_TRACKER = {
    "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
}  # fmt: skip
"""Options of Trackio: listed as having no effect without it."""

CURRENT = [name for name, spec in specs(TrainingArguments).items() if spec.row is None]


def test_every_argument_is_accounted_for_once() -> None:
    homes = {
        "shown here": set(SHOWN), "shown elsewhere": set(ELSEWHERE), "stored": STORED,
        "one process": ONE_PROCESS, "of a tracker": OF_A_TRACKER,
    }  # fmt: skip
    found = {name: [home for home, names in homes.items() if name in names] for name in CURRENT}
    nowhere = [name for name, where in found.items() if not where]
    assert not nowhere, f"accepted, and nothing shows an effect: {', '.join(nowhere)}"
    assert not {name: where for name, where in found.items() if len(where) > 1}
    unknown = set().union(*homes.values()) - set(CURRENT)
    assert not unknown, f"no arguments at all: {', '.join(unknown)}"


def test_the_tests_elsewhere_exist() -> None:
    missing = []
    for where in sorted(set(ELSEWHERE.values())):
        path, name = where.split("::")
        if not re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), flags=re.M):
            missing.append(where)
    assert missing == []


def test_every_name_of_a_parametrized_test_elsewhere_is_in_its_file() -> None:
    for name, where in ELSEWHERE.items():
        assert name in (ROOT / where.split("::")[0]).read_text(encoding="utf-8"), f"{where} never says {name}"


# ---- what is stored, and what is not available ----------------------------------------------------------------------

OTHER_VALUES: dict[str, Any] = {
    "local_rank": 0, "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 1, "ddp_broadcast_buffers": True, "ddp_static_graph": True, "ddp_backend": "gloo",
    "ddp_timeout": 5, "average_tokens_across_devices": False, "log_on_each_node": False, "log_level_replica": "error",
    "save_on_each_node": True, "eval_use_gather_object": True, "project": "mine",
    "trackio_space_id": "me/space", "trackio_bucket_id": "bucket", "trackio_static_space_id": "me/static",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted((STORED | ONE_PROCESS | OF_A_TRACKER) & {*OTHER_VALUES}))
def test_what_has_no_effect_here_is_kept_and_said(name: str, caplog: Any) -> None:
    args = TrainingArguments("run", use_cpu=True, **{name: OTHER_VALUES[name]})
    assert getattr(args, name) == OTHER_VALUES[name]
    assert args.without_effect() == [name]
    Trainer(Regression(), args)
    assert f"without effect in this run: {name}" in caplog.text


def test_no_row_says_idle_of_a_name_that_does_not_exist() -> None:
    generation = {"generation_max_length", "generation_num_beams", "generation_config"}
    assert {name for row in IDLE for name in row.names} - generation <= set(CURRENT)


# ---- running --------------------------------------------------------------------------------------------------------


def arguments(**options: Any) -> TrainingArguments:
    options = {"per_device_train_batch_size": 4, "max_steps": 4, "logging_steps": 1, "save_strategy": "no",
               "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, **options}  # fmt: skip
    return TrainingArguments(options.pop("output_dir", "run"), **options)


def make(
    model: Any = None, data: Any = DATA, callbacks: Any = None, cls: Any = Trainer, given: Any = None, **options: Any
) -> Any:
    """A trainer; a model is given by the function that makes it, so that every call makes the same."""
    torch.manual_seed(0)
    return cls(
        (model or Regression)(), arguments(**options), train_dataset=data, eval_dataset=data[:5], callbacks=callbacks,
        **(given or {}),
    )  # fmt: skip


def run(*args: Any, **options: Any) -> Any:
    trainer = make(*args, **options)
    trainer.train()
    return trainer


def steps_of(trainer: Any, key: str) -> list[int]:
    return [row["step"] for row in trainer.state.log_history if key in row]


def checkpoints(folder: str = "run") -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in Path(folder).glob("checkpoint-*"))


# ---- output, duration, batch ----------------------------------------------------------------------------------------


@shows("output_dir")
def test_output_dir() -> None:
    run(output_dir="elsewhere", save_strategy="steps")
    assert checkpoints("elsewhere") == [4]


@shows("per_device_train_batch_size", "num_train_epochs", "max_steps", "gradient_accumulation_steps")
@pytest.mark.parametrize(
    ("options", "steps", "epoch"),
    [
        ({"per_device_train_batch_size": 3, "num_train_epochs": 1, "max_steps": -1}, 4, 1.0),
        ({"per_device_train_batch_size": 6, "num_train_epochs": 2, "max_steps": -1}, 4, 2.0),
        ({"per_device_train_batch_size": 6, "num_train_epochs": 1.5, "max_steps": -1}, 3, 1.5),
        ({"per_device_train_batch_size": 6, "max_steps": 5}, 5, 2.5),
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 5}, 5, 2.5),
    ],
    ids=str,
)
def test_duration_and_batch(options: dict[str, Any], steps: int, epoch: float) -> None:
    trainer = run(**options)
    assert (trainer.state.global_step, trainer.state.epoch) == (steps, epoch)
    seen = trainer._loopwright.run.progress.samples_seen
    assert seen == (steps * 6 if "num_train_epochs" not in options else 12 * epoch)


# ---- optimizer and schedule -----------------------------------------------------------------------------------------


@shows("optim", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
def test_the_optimizers_numbers_reach_it() -> None:
    trainer = make(
        optim="adamw_torch", learning_rate=0.5, weight_decay=0.25, adam_beta1=0.7, adam_beta2=0.8, adam_epsilon=0.125
    )
    decayed, plain = trainer.create_optimizer().param_groups
    assert type(trainer.optimizer) is torch.optim.AdamW
    assert (decayed["lr"], decayed["weight_decay"], decayed["betas"], decayed["eps"]) == (0.5, 0.25, (0.7, 0.8), 0.125)
    assert plain["weight_decay"] == 0.0
    assert type(make(optim="sgd").create_optimizer()) is torch.optim.SGD


@shows("max_grad_norm")
def test_max_grad_norm_bounds_what_the_optimizer_sees() -> None:
    seen: list[float] = []

    class Norm(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            seen.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())

    clipped = run(callbacks=[Norm()], max_grad_norm=0.125)
    assert seen == pytest.approx([0.125] * 4, rel=1e-4)
    assert min(logged(clipped, "grad_norm")) > 0.125
    seen.clear()
    free = run(callbacks=[Norm()], max_grad_norm=0)
    assert seen == pytest.approx(logged(free, "grad_norm"), rel=1e-4)


@shows("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
def test_the_schedule_decides_the_logged_learning_rates() -> None:
    rates = {
        name: logged(run(**options), "learning_rate")
        for name, options in {
            "constant": {"lr_scheduler_type": "constant"},
            "linear": {},
            "warm": {"warmup_steps": 2},
            "share": {"warmup_steps": 0.5},
            "floor": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 5e-3}},
        }.items()
    }
    assert rates["constant"] == [1e-2] * 4
    assert rates["linear"] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert rates["warm"] == rates["share"] == pytest.approx([0.0, 5e-3, 1e-2, 5e-3])
    assert min(rates["floor"]) > 5e-3


# ---- loss -----------------------------------------------------------------------------------------------------------


@shows("label_smoothing_factor")
def test_label_smoothing_changes_the_loss_as_torch_does() -> None:
    data = token_data(4, labels="class")
    plain, smooth = (
        run(lambda: small_bert(0.0), data, max_steps=1, label_smoothing_factor=factor) for factor in (0.0, 0.25)
    )
    torch.manual_seed(0)
    model = small_bert(0.0).train()
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch).logits
    for trainer, factor in ((plain, 0.0), (smooth, 0.25)):
        expected = nn.functional.cross_entropy(logits, labels, label_smoothing=factor).item()
        assert logged(trainer, "loss")[0] == pytest.approx(expected, rel=1e-5)


@shows("neftune_noise_alpha")
def test_neftune_adds_noise_in_training_only_and_goes_away() -> None:
    data = token_data(4, labels="class")
    plain = run(lambda: small_bert(0.0), data, max_steps=1)
    noisy = run(lambda: small_bert(0.0), data, max_steps=1, neftune_noise_alpha=50.0)
    assert logged(noisy, "loss")[0] != logged(plain, "loss")[0]
    embeddings = noisy.model.get_input_embeddings()
    ids = torch.tensor([[1, 2]])
    embeddings.eval()
    assert torch.equal(embeddings(ids), embeddings(ids))
    noisy.train()
    assert len(embeddings._forward_hooks) <= 1, "noise is added twice after a second training"


# ---- data -----------------------------------------------------------------------------------------------------------


@shows(
    "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "dataloader_in_order",
)  # fmt: skip
def test_the_loader_is_made_as_asked() -> None:
    plain = make().get_train_dataloader()
    assert (plain.num_workers, plain.persistent_workers) == (0, False)
    loader = make(
        dataloader_num_workers=2, dataloader_persistent_workers=True, dataloader_prefetch_factor=3,
        dataloader_multiprocessing_context="spawn", dataloader_in_order=False,
    ).get_train_dataloader()  # fmt: skip
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (2, True, 3)
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert loader.in_order is False


@shows("dataloader_pin_memory", "use_cpu")
def test_memory_is_pinned_for_a_device_and_never_for_the_cpu(monkeypatch: Any) -> None:
    from loopwright.pt import devices
    from loopwright.pt.data import pipeline as data

    assert TrainingArguments("run", use_cpu=True).device.type == "cpu"
    assert TrainingArguments("run", use_cpu=True).dataloader_pin_memory is False
    monkeypatch.setattr(data, "can_pin_memory", lambda device: True)
    monkeypatch.setattr(torch.utils.data.DataLoader, "check_worker_number_rationality", lambda self: None)
    for wanted in (True, False):
        loader = make(use_cpu=False, dataloader_pin_memory=wanted).get_train_dataloader()
        assert loader.pin_memory is wanted
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *a, **k: torch.device("cuda"))
    assert devices.choose_device(True, 0).type == "cpu"


@shows("remove_unused_columns")
def test_unused_columns_are_passed_on_when_asked() -> None:
    data = [{**row, "extra": torch.tensor(1.0)} for row in DATA]
    assert set(next(iter(make(data=data).get_train_dataloader()))) == {"x", "labels"}
    loader = make(data=data, remove_unused_columns=False).get_train_dataloader()
    assert set(next(iter(loader))) == {"x", "labels", "extra"}


@shows("accelerator_config")
def test_non_blocking_copies_are_asked_for() -> None:
    assert make(accelerator_config={"non_blocking": True})._loopwright.strategy._ahead._non_blocking is True
    assert make(accelerator_config={"non_blocking": False})._loopwright.strategy._ahead._non_blocking is False


# ---- logging --------------------------------------------------------------------------------------------------------


@shows("logging_strategy", "logging_steps", "logging_first_step")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"logging_steps": 2}, [2, 4]),
        ({"logging_steps": 0.5}, [2, 4]),
        ({"logging_steps": 3, "logging_first_step": True}, [1, 3]),
        ({"logging_strategy": "no"}, []),
        ({"logging_strategy": "epoch", "per_device_train_batch_size": 6}, [2, 4]),
    ],
    ids=str,
)
def test_when_to_log(options: dict[str, Any], expected: list[int]) -> None:
    assert steps_of(run(**options), "loss") == expected


@shows("include_num_input_tokens_seen")
@pytest.mark.parametrize("kind", ["all", "non_padding", "no", True, False])
def test_input_tokens_are_counted_as_asked(kind: Any) -> None:
    data = token_data(8, labels="token")
    trainer = run(lambda: small_llama(0.0), data, max_steps=2, include_num_input_tokens_seen=kind)
    everything = 8 * 12
    real = sum(int(row["attention_mask"].sum()) for row in data)
    expected = {"all": everything, True: everything, "non_padding": real, "no": 0, False: 0}[kind]
    assert trainer.state.num_input_tokens_seen == expected
    assert bool(logged(trainer, "num_input_tokens_seen")) == (kind not in ("no", False))
    assert bool(logged(trainer, "train_tokens_per_second")) == (kind not in ("no", False))


@shows("log_level")
def test_log_level_is_that_of_the_logger(caplog: Any) -> None:
    logger = logging.getLogger("loopwright")
    before = logger.level
    try:
        for name, level in (("debug", logging.DEBUG), ("error", logging.ERROR)):
            make(log_level=name)
            assert logger.getEffectiveLevel() == level
        logger.setLevel(logging.INFO)
        make(log_level="passive")
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)


@shows("disable_tqdm")
def test_disable_tqdm_chooses_what_shows_progress(capsys: Any) -> None:
    from loopwright import PrinterCallback, ProgressCallback

    for disabled, kind in ((True, PrinterCallback), (False, ProgressCallback)):
        callbacks = make(disable_tqdm=disabled).callback_handler.callbacks
        assert [type(each) for each in callbacks if isinstance(each, PrinterCallback | ProgressCallback)] == [kind]


@shows("skip_memory_metrics")
def test_memory_figures_are_in_the_metrics_when_asked_for() -> None:
    assert not [key for key in run().state.log_history[-1] if "mem" in key]
    trainer = run(skip_memory_metrics=False)
    assert [key for key in trainer.state.log_history[-1] if key.startswith("train_mem")]
    assert [key for key in trainer.evaluate() if key.startswith("eval_mem")]


@shows("report_to", "run_name")
def test_reporters_are_those_named_and_know_the_name_of_the_run() -> None:
    from loopwright.reporters.base import Reporter
    from loopwright.reporters.callback import ReporterCallback

    assert not [each for each in make().callback_handler.callbacks if isinstance(each, ReporterCallback)]
    seen: list[Any] = []

    class Diary(Reporter):
        def start(self, run: Any) -> None:
            seen.append(run.run_name)

        def log(self, *args: Any, **kwargs: Any) -> None:
            seen.append("log")

    named = make(report_to=["tensorboard"]).callback_handler.callbacks
    assert [type(each).__name__ for each in named if isinstance(each, ReporterCallback)] == ["TensorBoardCallback"]
    trainer = Trainer(
        Regression(), arguments(run_name="my run"), train_dataset=DATA, callbacks=[ReporterCallback(Diary())]
    )
    trainer.train()
    assert seen[0] == "my run" and "log" in seen


# ---- evaluation -----------------------------------------------------------------------------------------------------


@shows("eval_strategy", "eval_steps", "eval_delay", "eval_on_start")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"eval_strategy": "steps", "eval_steps": 2}, [2, 4]),
        ({"eval_strategy": "steps", "eval_steps": 0.25}, [1, 2, 3, 4]),
        ({"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 3}, [3, 4]),
        ({"eval_strategy": "epoch", "per_device_train_batch_size": 6}, [2, 4]),
        ({"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True}, [0, 4]),
    ],
    ids=str,
)
def test_when_to_evaluate(options: dict[str, Any], expected: list[int]) -> None:
    assert steps_of(run(**options), "eval_loss") == expected


@shows("per_device_eval_batch_size")
def test_evaluation_batches_have_the_size_asked_for() -> None:
    sizes: list[int] = []

    class Sizes(Trainer):
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            sizes.append(len(inputs["x"]))
            return super().prediction_step(model, inputs, *args, **kwargs)

    make(cls=Sizes, per_device_eval_batch_size=2).evaluate()
    assert sizes == [2, 2, 1]


@shows("prediction_loss_only")
def test_only_the_loss_when_asked() -> None:
    assert make().predict(DATA).predictions.shape == (12,)
    output = make(prediction_loss_only=True).predict(DATA)
    assert output.predictions is None and output.metrics["test_loss"] > 0


@shows("eval_do_concat_batches")
def test_batches_are_kept_apart_when_asked() -> None:
    joined, apart = (
        make(per_device_eval_batch_size=4, eval_do_concat_batches=concat).predict(DATA).predictions
        for concat in (True, False)
    )
    assert joined.shape == (12,)
    assert [len(each) for each in apart] == [4, 4, 4]
    np.testing.assert_array_equal(np.concatenate(apart), joined)


@shows("eval_accumulation_steps")
def test_predictions_move_to_the_host_every_so_many_batches(monkeypatch: Any) -> None:
    from loopwright.pt.evaluation import step as evaluating

    moved: list[int] = []
    batches: list[int] = []
    convert = evaluating.to_numpy
    monkeypatch.setattr(evaluating, "to_numpy", lambda value: (moved.append(len(batches)), convert(value))[1])

    class Counting(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            batches.append(1)

    when = {}
    for steps in (1, 3):
        moved.clear(), batches.clear()
        trainer = make(callbacks=[Counting()], per_device_eval_batch_size=2, eval_accumulation_steps=steps)
        trainer.predict(DATA)
        when[steps] = sorted(set(moved))
    assert when == {1: [1, 2, 3, 4, 5, 6], 3: [3, 6]}


@shows("eval_loss_reduction")
def test_the_evaluation_loss_is_the_mean_over_items_or_over_batches() -> None:
    data = token_data(6, labels="token")
    losses = {}
    for size in (1, 6):
        for reduction in ("item_mean", "batch_mean"):
            trainer = make(
                lambda: small_llama(0.0), data, per_device_eval_batch_size=size, eval_loss_reduction=reduction
            )
            losses[reduction, size] = trainer.evaluate(data)["eval_loss"]
    assert losses["item_mean", 1] == pytest.approx(losses["item_mean", 6], rel=1e-5)
    assert losses["batch_mean", 1] != pytest.approx(losses["batch_mean", 6], rel=1e-4)


@shows("include_for_metrics")
def test_metrics_receive_what_was_asked_for() -> None:
    data = token_data(6, labels="class")
    seen: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, float]:
        seen.update(inputs=prediction.inputs, losses=prediction.losses)
        return {}

    make(lambda: small_bert(0.0), data, given={"compute_metrics": metrics}).evaluate(data)
    assert seen == {"inputs": None, "losses": None}
    given = {"compute_metrics": metrics}
    make(lambda: small_bert(0.0), data, given=given, include_for_metrics=["inputs", "loss"]).evaluate(data)
    np.testing.assert_array_equal(seen["inputs"], np.stack([row["input_ids"].numpy() for row in data]))
    assert len(seen["losses"]) == 6


@shows("batch_eval_metrics")
def test_metrics_are_collected_batch_by_batch() -> None:
    calls: list[tuple[int, bool]] = []

    def metrics(prediction: Any, compute_result: bool = False) -> dict[str, float]:
        calls.append((len(prediction.label_ids), compute_result))
        return {"seen": float(sum(count for count, _ in calls))} if compute_result else {}

    trainer = make(given={"compute_metrics": metrics}, batch_eval_metrics=True, per_device_eval_batch_size=2)
    assert trainer.evaluate()["eval_seen"] == 5.0
    assert calls == [(2, False), (2, False), (1, True)]


# ---- saving ---------------------------------------------------------------------------------------------------------


@shows("save_strategy", "save_steps", "save_samples")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"save_strategy": "steps", "save_steps": 3}, [3, 4]),
        ({"save_strategy": "steps", "save_steps": 0.5}, [2, 4]),
        ({"save_strategy": "epoch", "per_device_train_batch_size": 6}, [2, 4]),
        ({"save_samples": 8}, [2, 4]),
    ],
    ids=str,
)
def test_when_to_save(options: dict[str, Any], expected: list[int]) -> None:
    run(**options)
    assert checkpoints() == expected


@shows("save_trigger_file")
def test_a_file_that_appears_makes_a_checkpoint(tmp_path: Path) -> None:
    class Ask(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                (tmp_path / "now").touch()

    run(callbacks=[Ask()], save_trigger_file=str(tmp_path / "now"))
    assert checkpoints() == [2]
    assert not (tmp_path / "now").exists()


@shows("async_save")
def test_checkpoints_are_written_in_a_thread_unless_told_otherwise(monkeypatch: Any) -> None:
    import threading

    from loopwright.pt.checkpoint import save as saving

    threads: list[str] = []
    write = saving.write_optimizer
    monkeypatch.setattr(
        saving, "write_optimizer", lambda *args: (threads.append(threading.current_thread().name), write(*args))[1]
    )
    for wanted in (True, False):
        run(save_strategy="steps", async_save=wanted)
    assert threads[0] == "save-4" and threads[1] == threading.main_thread().name


@shows("checkpoint_format")
def test_checkpoints_have_the_file_names_asked_for() -> None:
    run(save_strategy="steps")
    assert (Path("run") / "checkpoint-4" / "rng.json").is_file()
    run(save_strategy="steps", checkpoint_format="transformers", output_dir="theirs")
    names = {path.name for path in Path("theirs/checkpoint-4").iterdir()}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= names


@shows("enable_jit_checkpoint")
def test_a_signal_saves_and_stops_unless_switched_off() -> None:
    class Signal(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

    trainer = make(callbacks=[Signal()], max_steps=50)
    try:
        trainer.train()
    except SystemExit as stopped:
        assert stopped.code == 75
    assert trainer.state.global_step < 50
    assert checkpoints() == [trainer.state.global_step]

    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        trainer = run(callbacks=[Signal()], enable_jit_checkpoint=False, output_dir="off")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert trainer.state.global_step == 4
    assert received == [signal.SIGUSR1]


@shows("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
@pytest.mark.parametrize(("greater", "best"), [(True, 1), (False, 3)])
def test_the_best_model_is_the_one_the_metric_names(greater: bool, best: int) -> None:
    scores = {1: 3.0, 2: 2.0, 3: 1.0, 4: 2.5}

    class Scored(Trainer):
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            output = super().evaluation_loop(*args, **kwargs)
            output.metrics["eval_score"] = scores.get(self.state.global_step, 0.0)
            return output

    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
               "metric_for_best_model": "score", "greater_is_better": greater}  # fmt: skip
    loaded = run(cls=Scored, load_best_model_at_end=True, **options)
    last = run(cls=Scored, load_best_model_at_end=False, output_dir="last", **options)
    assert loaded.state.best_global_step == last.state.best_global_step == best
    assert loaded.state.best_metric == scores[best]
    assert not torch.equal(loaded.model.out.weight, last.model.out.weight)


# ---- memory, compilation, reproducibility ---------------------------------------------------------------------------


@shows("gradient_checkpointing", "gradient_checkpointing_kwargs")
def test_activations_are_recomputed_with_the_options_given(monkeypatch: Any) -> None:
    data = token_data(4, labels="token")
    plain = run(lambda: small_llama(0.0), data, max_steps=1)
    asked: list[Any] = []
    model = small_llama(0.0)
    enable = model.gradient_checkpointing_enable
    model.gradient_checkpointing_enable = lambda **kwargs: (asked.append(kwargs), enable(**kwargs))
    trainer = run(
        lambda: model,
        data,
        max_steps=1,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    assert model.is_gradient_checkpointing
    assert asked[0]["gradient_checkpointing_kwargs"]["use_reentrant"] is False
    assert not plain.model.is_gradient_checkpointing
    assert len(logged(trainer, "loss")) == 1


@shows("torch_compile", "torch_compile_backend", "torch_compile_mode", "torch_compile_scope")
def test_the_model_is_compiled_as_asked(monkeypatch: Any) -> None:
    asked: list[dict[str, Any]] = []

    def record(self: Any, **options: Any) -> None:
        asked.append({"of": type(self).__name__, **options})
        self._compiled_call_impl = self._call_impl

    monkeypatch.setattr(nn.Module, "compile", record)
    run(max_steps=1)
    assert asked == []
    run(max_steps=1, torch_compile=True)
    run(max_steps=1, torch_compile_backend="eager", torch_compile_mode="default")
    assert asked == [
        {"of": "Regression", "backend": "inductor", "mode": None, "dynamic": None},
        {"of": "Regression", "backend": "eager", "mode": "default", "dynamic": None},
    ]
    asked.clear()
    data = token_data(4, labels="token")
    run(lambda: small_llama(0.0), data, max_steps=1, torch_compile=True)
    assert {each["of"] for each in asked} == {"LlamaDecoderLayer"}
    asked.clear()
    run(lambda: small_llama(0.0), data, max_steps=1, torch_compile=True, torch_compile_scope="model")
    assert [each["of"] for each in asked] == ["LlamaForCausalLM"]


@shows("max_recompiles")
@pytest.mark.parametrize("allowed", [None, 0, 9])
def test_more_compilations_than_allowed_are_told(allowed: int | None) -> None:
    torch._dynamo.reset()  # what another test compiled is not compiled again
    data = [{"x": torch.ones(size), "labels": torch.ones(1)} for size in (2, 3, 4)]

    class Flexible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": ((x * self.weight).sum(-1) - labels.squeeze(-1)).square().mean()}

    options = {"torch_compile_backend": "eager", "max_recompiles": allowed}
    trainer = run(Flexible, data, max_steps=3, per_device_train_batch_size=1, **options)
    assert trainer._loopwright.compiled.counter.count > 0
    told = [text for text in trainer._loopwright.notices.told if "max_recompiles=" in text]
    assert len(told) == (allowed == 0)
    assert all("'x' size mismatch" in text for text in told)


@shows("torch_empty_cache_steps")
def test_cached_memory_is_released_every_so_many_updates(monkeypatch: Any) -> None:
    from loopwright.pt.strategies import single

    released: list[Any] = []
    monkeypatch.setattr(single, "empty_cache", released.append)
    run()
    assert released == []
    run(torch_empty_cache_steps=2)
    assert len(released) == 2


@shows("seed")
def test_the_seed_decides_dropout() -> None:
    first, same, other = (logged(run(lambda: Regression(0.5), seed=seed, data_seed=0), "loss") for seed in (1, 1, 2))
    assert first == same != other


@shows("full_determinism")
def test_full_determinism_switches_torch() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    run(full_determinism=True)
    assert torch.are_deterministic_algorithms_enabled()



# ---- old names ------------------------------------------------------------------------------------------------------


def test_every_old_name_has_a_row_that_says_what_became_of_it() -> None:
    old = {name: spec for name, spec in specs(TrainingArguments).items() if spec.row is not None}
    assert set(old) == {field.name for field in dataclasses.fields(TrainingArguments)} - set(CURRENT)
    assert all(spec.help for spec in old.values())


def test_arguments_travel_with_the_model_and_hide_tokens() -> None:
    trainer = make(hub_token="secret", learning_rate=0.125)
    trainer.save_model("saved")
    text = Path("saved/arguments.json").read_text()
    assert json.loads(text)["learning_rate"] == 0.125
    assert "secret" not in text


def test_making_arguments_imports_no_torch() -> None:
    code = "import sys, loopwright; loopwright.TrainingArguments('run'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert done.stderr == ""
