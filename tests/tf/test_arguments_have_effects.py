"""No argument of TFTrainingArguments is accepted and ignored: it has an effect, is refused, or is said to have none."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopwright import ArgumentsError, TrainerCallback
from loopwright.args.field import specs
from loopwright.keras.refusals import IDLE, REFUSED
from loopwright.tf.arguments import TFTrainingArguments

from .tools import MARKS, TF, arrays, kept, logged, rows, sentences, trainer, two_replicas

pytestmark = MARKS

ROOT = Path(__file__).resolve().parents[2]
SHOWN: dict[str, str] = {}


def shows(*names: str) -> Callable[[Any], Any]:
    """Say that a test shows the effect of these arguments."""

    def keep(test: Any) -> Any:
        for name in names:
            assert name not in SHOWN, f"{name} is shown twice"
            SHOWN[name] = test.__name__
        return test

    return keep


CONTRACT = "tests/contract/"
ELSEWHERE = {
    "push_to_hub": "tests/hub/test_pushes.py::test_a_push_after_training_without_push_to_hub",
    "hub_model_id": "tests/hub/test_failures.py::test_the_repository_is_the_one_that_is_named",
    "hub_strategy": "tests/hub/test_pushes.py::test_the_newest_checkpoint_is_in_last_checkpoint",
    "hub_always_push": "tests/hub/test_pushes.py::test_every_save_pushes_the_model_of_each_checkpoint",
    "hub_token": "tests/hub/test_failures.py::test_a_wrong_token_is_refused_before_training",
    "hub_private_repo": "tests/hub/test_pushes.py::test_a_push_after_training_without_push_to_hub",
    "hub_revision": "tests/hub/test_pushes.py::test_a_push_after_training_without_push_to_hub",
    "gradient_accumulation_steps": CONTRACT
    + "test_same_numbers.py::test_losses_and_weights_do_not_depend_on_how_an_update_is_cut_up",
    "max_grad_norm": "tests/tf/test_training.py::test_gradients_are_clipped_by_norm_with_and_without_accumulation",
    "per_device_eval_batch_size": CONTRACT + "test_same_numbers.py::test_evaluation_is_exact",
    "label_smoothing_factor": "tests/tf/test_models.py::test_label_smoothing_is_that_of_torch",
    "on_nonfinite": "tests/tf/test_checkpoints.py::test_updates_that_are_not_finite",
    "on_spike": "tests/tf/test_checkpoints.py::test_the_loss_jumps_and_the_run_goes_back",
    "bf16": "tests/tf/test_checkpoints.py::test_resume_is_exact_in_every_number_format_and_with_xla",
    "fp16": "tests/tf/test_checkpoints.py::test_resume_is_exact_in_every_number_format_and_with_xla",
    "xla": "tests/tf/test_checkpoints.py::test_resume_is_exact_in_every_number_format_and_with_xla",
    "async_save": "tests/tf/test_checkpoints.py::test_resume_is_exact_in_every_number_format_and_with_xla",
    "chart": "tests/report/test_terminal.py::test_the_chart_argument_draws_above_the_progress_bar",
    "html_report": CONTRACT + "test_flow.py::test_the_time_ledger_adds_up_and_the_report_is_written",
    "save_on_interrupt": "tests/core/test_going_on.py::test_a_script_goes_on_and_ctrl_c_shows_no_traceback",
    "take_over": "tests/core/test_owner.py::test_taking_over_stops_the_first_run_which_writes_nothing_more",
    "save_only_model": "tests/tf/test_checkpoints.py::test_a_checkpoint_that_does_not_fit_or_was_cut_says_so",
    "tpu_name": "tests/tf/test_training.py::test_a_tpu_that_is_not_there_says_so",
    "tpu_zone": "tests/tf/test_training.py::test_a_tpu_that_is_not_there_says_so",
    "gcp_project": "tests/tf/test_training.py::test_a_tpu_that_is_not_there_says_so",
    "dataloader_drop_last": "tests/tf/test_training.py::test_epochs_do_not_mix_and_drop_last_drops",
    "prediction_loss_only": "tests/tf/test_training.py::test_evaluation_ends_and_counts_every_sample_once",
    "remove_unused_columns": "tests/tf/test_data.py::test_drop_last_group_by_length_columns_and_collators",
    "length_column_name": "tests/tf/test_data.py::test_drop_last_group_by_length_columns_and_collators",
    "train_sampling_strategy": "tests/tf/test_data.py::test_drop_last_group_by_length_columns_and_collators",
    "load_best_model_at_end": CONTRACT + "test_flow.py::test_rotation_keeps_the_newest_the_best_and_what_is_pinned",
    "metric_for_best_model": CONTRACT + "test_flow.py::test_rotation_keeps_the_newest_the_best_and_what_is_pinned",
    "save_total_limit": CONTRACT + "test_flow.py::test_rotation_keeps_the_newest_the_best_and_what_is_pinned",
    "enable_jit_checkpoint": "tests/faults/test_signals.py::test_signals_are_left_alone_when_told_so",
    "save_minutes": "tests/callbacks/test_flow.py::test_save_minutes_counts_from_the_last_checkpoint",
    "max_runtime": "tests/callbacks/test_flow.py::test_max_runtime_stops_and_saves_before_the_limit",
    "logging_nan_inf_filter": "tests/core/test_meter.py::test_readings_equal_a_plain_loop",
    "ddp_timeout": "tests/tf/test_workers.py::test_two_workers_equal_one_process",
}
"""Arguments whose effect another file shows; those of the core's own parts are shown where the core is tested."""

STORED = {"do_train", "do_eval", "do_predict", "local_rank"}
ONE_PROCESS = {"log_on_each_node", "log_level_replica", "save_on_each_node", "ddp_timeout"}
NEED_WORKERS = {"dataloader_persistent_workers", "dataloader_prefetch_factor"}
OF_A_TRACKER = {
    "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
}  # fmt: skip
OF_WHAT_IS_REFUSED = {"torch_compile_backend", "torch_compile_mode"}
"""They switch on what is refused."""

CURRENT = [name for name, spec in specs(TFTrainingArguments).items() if spec.row is None]


def test_every_argument_is_accounted_for() -> None:
    homes = {
        "shown here": set(SHOWN), "elsewhere": set(ELSEWHERE), "refused": set(REFUSED),
        "idle": set(IDLE), "stored": STORED, "one process": ONE_PROCESS, "workers": NEED_WORKERS,
        "of a tracker": OF_A_TRACKER, "of refused": OF_WHAT_IS_REFUSED,
    }  # fmt: skip
    found = {name: [home for home, names in homes.items() if name in names] for name in CURRENT}
    nowhere = [name for name, where in found.items() if not where]
    assert not nowhere, f"accepted, and nothing shows an effect: {', '.join(nowhere)}"
    unknown = set().union(*homes.values()) - set(CURRENT)
    assert not unknown, f"no arguments at all: {', '.join(unknown)}"


def test_the_tests_elsewhere_exist() -> None:
    missing = []
    for where in sorted(set(ELSEWHERE.values())):
        path, name = where.split("::")
        if not re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), flags=re.M):
            missing.append(where)
    assert missing == []


ASKS: dict[str, Any] = {
    "torch_compile_scope": "model", "fp8": True, "debug": "underflow_overflow",
    "param_groups": {"a": {"freeze": True}}, "train_dataset_weights": {"a": 1},
    "torch_compile": True, "auto_find_batch_size": True, "neftune_noise_alpha": 1.0, "bf16_full_eval": True,
    "fp16_full_eval": True, "half_precision_backend": "cuda_amp", "fp16_opt_level": "O2",
    "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"a": 1}, "torch_empty_cache_steps": 1,
    "dataloader_num_workers": 1, "optim_target_modules": "all-linear", "lr_scheduler_type": "greedy",
    "checkpoint_format": "transformers", "average_tokens_across_devices": False, "fsdp": "full_shard",
    "fsdp_config": {"a": 1}, "deepspeed": {"a": 1}, "parallelism_config": {"tp": 2}, "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True}, "max_recompiles": 1, "batch_packing": "across_updates",
    "static_lengths": [8], "measure_matmul": True,
    "per_device_train_batch_tokens": 8, "train_sampling_strategy": "batch_rebalance", "eval_use_gather_object": True,
    "ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 1, "ddp_broadcast_buffers": True,
    "ddp_static_graph": True, "ddp_backend": "gloo", "accelerator_config": {"even_batches": False},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    more = {"eval_strategy": "steps"} if name == "lr_scheduler_type" else {}
    with pytest.raises(ArgumentsError, match=rf"{name}.*not with TFTrainer: "):
        TFTrainingArguments("run", **{name: ASKS[name]}, **more)


@pytest.mark.parametrize("name", sorted(OF_WHAT_IS_REFUSED | NEED_WORKERS))
def test_what_belongs_to_something_refused_is_refused(name: str) -> None:
    value = {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2}.get(name, "eager")
    with pytest.raises(ArgumentsError):
        TFTrainingArguments("run", **{name: value})


OTHER_VALUES: dict[str, Any] = {
    "local_rank": 0, "log_on_each_node": False,
    "log_level_replica": "error", "save_on_each_node": True, "ddp_timeout": 5, "dataloader_pin_memory": False,
    "speed": "off", "dataloader_multiprocessing_context": "spawn", "dataloader_in_order": False,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_what_has_no_effect_here_is_said(name: str) -> None:
    assert TFTrainingArguments("run", **{name: OTHER_VALUES[name]}).without_effect() == [name]


def test_poly_power_only_goes_with_a_polynomial_descent() -> None:
    with pytest.raises(ArgumentsError, match="poly_power"):
        TFTrainingArguments("run", poly_power=2.0, lr_scheduler_type="cosine")


# ---- effects ---------------------------------------------------------------------------------------------------------


@shows("output_dir", "save_strategy", "save_steps", "num_train_epochs", "max_steps", "per_device_train_batch_size")
def test_duration_batch_and_saving(tmp_path: Any) -> None:
    made = trainer(
        tmp_path / "here", data=rows(9), num_train_epochs=2, max_steps=-1, per_device_train_batch_size=3,
        save_strategy="steps", save_steps=4,
    )  # fmt: skip
    made.train()
    assert (made.state.global_step, kept(tmp_path / "here")) == (6, [4, 6])
    made = trainer(tmp_path / "epochs", data=rows(9), max_steps=4, per_device_train_batch_size=3, save_strategy="epoch")
    made.train()
    assert kept(tmp_path / "epochs") == [3, 4]


@shows("optim", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args")
def test_the_optimizers_numbers_reach_it(tmp_path: Any) -> None:
    def optimizer(**options: Any) -> Any:
        made = trainer(tmp_path, **options)
        made.create_optimizer_and_scheduler(3)
        return made.optimizer

    adam = optimizer(
        optim="adamw_torch", learning_rate=0.5, weight_decay=0.25, adam_beta1=0.7, adam_beta2=0.8, adam_epsilon=0.125
    )
    assert (type(adam).__name__, adam.weight_decay, adam.beta_1, adam.beta_2, adam.epsilon) == (
        "AdamW", 0.25, 0.7, 0.8, 0.125,
    )  # fmt: skip
    assert float(adam.learning_rate) == 0.5
    sgd = optimizer(optim="sgd", optim_args="momentum=0.5,nesterov=true")
    assert (type(sgd).__name__, sgd.momentum, sgd.nesterov) == ("SGD", 0.5, True)
    with pytest.raises(ArgumentsError, match="has no option 'momntum'; did you mean 'momentum'"):
        optimizer(optim="sgd", optim_args="momntum=0.5")
    with pytest.raises(ArgumentsError, match="has no Keras counterpart"):
        optimizer(optim="muon")


@shows("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "poly_power")
def test_the_schedule_decides_the_learning_rates(tmp_path: Any) -> None:
    def rates(**options: Any) -> list[float]:
        made = trainer(tmp_path, max_steps=4, learning_rate=1.0, **options)
        made.create_optimizer_and_scheduler(4)
        found = []
        for _ in range(4):
            found.append(made._get_learning_rate())
            made.lr_scheduler.step()
        return found

    assert rates() == pytest.approx([1, 0.75, 0.5, 0.25])
    assert rates(lr_scheduler_type="constant") == [1, 1, 1, 1]
    assert rates(warmup_steps=2) == pytest.approx([0, 0.5, 1, 0.5])
    assert rates(poly_power=2.0) == pytest.approx([1, 0.5625, 0.25, 0.0625])
    options = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.5}}
    assert min(rates(**options)) > 0.5


def test_a_plateau_lowers_the_learning_rate(tmp_path: Any) -> None:
    scores = iter([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    made = trainer(
        tmp_path, max_steps=4, learning_rate=0.5, evaluation=rows(4), eval_strategy="steps", eval_steps=1,
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        metric_for_best_model="score", compute_metrics=lambda p: {"score": next(scores)},
    )  # fmt: skip
    made.train()
    assert logged(made, "learning_rate") == pytest.approx([0.5, 0.5, 0.25, 0.125])


@shows("logging_strategy", "logging_steps", "logging_first_step", "disable_tqdm", "log_level")
def test_logging(tmp_path: Any) -> None:
    level = logging.getLogger("loopwright").level
    try:
        made = trainer(tmp_path, max_steps=4, logging_steps=2, logging_first_step=True, log_level="error")
        assert logging.getLogger("loopwright").level == logging.ERROR
    finally:
        logging.getLogger("loopwright").setLevel(level)
    made.train()
    assert [row["step"] for row in made.state.log_history if "loss" in row] == [1, 2, 4]
    names = [type(callback).__name__ for callback in made.callback_handler.callbacks]
    assert "PrinterCallback" in names
    epoch = trainer(tmp_path, data=rows(8), max_steps=4, logging_strategy="epoch", disable_tqdm=False)
    epoch.train()
    assert [row["step"] for row in epoch.state.log_history if "loss" in row] == [2, 4]
    assert "ProgressCallback" in [type(callback).__name__ for callback in epoch.callback_handler.callbacks]


@shows("report_to", "run_name", "logging_dir")
def test_tensorboard(tmp_path: Any) -> None:
    pytest.importorskip("tensorboard")
    made = trainer(tmp_path, max_steps=1, report_to="tensorboard", logging_dir=str(tmp_path / "tb"), run_name="mine")
    made.train()
    assert list((tmp_path / "tb").rglob("events.out.tfevents.*"))


@shows("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_do_concat_batches", "include_for_metrics",
       "batch_eval_metrics", "eval_accumulation_steps", "eval_loss_reduction")  # fmt: skip
def test_evaluation(tmp_path: Any) -> None:
    seen: list[Any] = []

    def metrics(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        seen.append((prediction, compute_result))
        return {"n": 1.0}

    made = trainer(
        tmp_path, max_steps=4, evaluation=rows(5), per_device_eval_batch_size=3, eval_strategy="steps", eval_steps=1,
        eval_delay=3, eval_on_start=True, batch_eval_metrics=True, compute_metrics=metrics,
        include_for_metrics=["inputs", "loss"],
    )  # fmt: skip
    made.train()
    assert [row["step"] for row in made.state.log_history if "eval_loss" in row] == [0, 3, 4]
    assert [final for _, final in seen] == [False, True] * 3
    assert seen[0][0].inputs.shape == (3, 4) and len(seen[0][0].losses) == 3
    lists = trainer(tmp_path, eval_do_concat_batches=False, per_device_eval_batch_size=3, eval_accumulation_steps=2)
    assert [len(each) for each in lists.predict(rows(5)).predictions] == [3, 2]
    made.args.batch_eval_metrics = False
    losses = {}
    for reduction in ("item_mean", "batch_mean"):
        made = trainer(
            tmp_path, TF.tokens(), evaluation=sentences(5), per_device_eval_batch_size=2, eval_loss_reduction=reduction
        )
        losses[reduction] = made.evaluate()["eval_loss"]
    assert losses["item_mean"] != losses["batch_mean"]


@shows("seed", "data_seed", "full_determinism", "use_cpu", "tf32", "label_names", "use_cache")
def test_seeds_devices_and_names(tmp_path: Any, monkeypatch: Any) -> None:
    import tensorflow as tf

    orders = {}
    for name, options in {"a": {"seed": 1}, "b": {"seed": 2}, "c": {"seed": 2, "data_seed": 1}}.items():
        source = trainer(tmp_path, **options).get_train_tfdataset()
        orders[name] = next(source.open(0)).features.tolist()
    assert orders["a"] == orders["c"] != orders["b"]
    called: list[Any] = []
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: called.append("deterministic"))
    monkeypatch.setattr(tf.config.experimental, "enable_tensor_float_32_execution", called.append)
    trainer(tmp_path, full_determinism=True, tf32=False)
    assert called == ["deterministic", False]
    assert type(TF.arguments(tmp_path, use_cpu=True).strategy).__name__ == "OneDeviceStrategy"
    data = [{"x": row["x"], "target": row["labels"]} for row in rows(4)]
    made = trainer(tmp_path, data=data, label_names=["target"], max_steps=1)
    made.train()
    model = TF.net()
    object.__setattr__(model, "config", type("Config", (), {"use_cache": True})())
    trainer(tmp_path, model, use_cache=False)
    assert model.config.use_cache is False


@shows("include_num_input_tokens_seen", "skip_memory_metrics")
def test_work_and_memory_are_counted(tmp_path: Any) -> None:
    made = trainer(
        tmp_path, TF.tokens(), sentences(8), max_steps=2, include_num_input_tokens_seen="all",
        skip_memory_metrics=False,
    )  # fmt: skip
    output = made.train()
    assert logged(made, "num_input_tokens_seen")[:2] == [24, 48] and output.metrics["total_flos"] > 0
    assert "train_mem_cpu_alloc_delta" in output.metrics


@shows("save_samples", "save_trigger_file", "greater_is_better", "ignore_data_skip", "resume_from_checkpoint",
       "restore_callback_states_from_checkpoint", "strict")  # fmt: skip
def test_saving_and_resuming(tmp_path: Any) -> None:
    class Counter(TrainerCallback):
        count = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.count += 1
            if state.global_step == 3:
                (tmp_path / "now").touch()

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    options = {"data": rows(40), "save_samples": 8, "save_trigger_file": str(tmp_path / "now")}
    made = trainer(tmp_path / "run", max_steps=4, callbacks=[Counter()], **options)
    made.train()
    assert kept(tmp_path / "run") == [2, 4] or kept(tmp_path / "run") == [2, 3, 4]
    assert not (tmp_path / "now").exists()
    counters = {}
    for restored in (True, False):
        counter = Counter()
        again = trainer(
            tmp_path / "run", data=rows(40), max_steps=5, callbacks=[counter], ignore_data_skip=not restored,
            restore_callback_states_from_checkpoint=restored,
            resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"),
        )  # fmt: skip
        again.train()
        counters[restored] = (counter.count, again._loopwright.run.progress.samples_in_epoch)
    assert counters == {True: (5, 20), False: (1, 4)}
    args = TF.arguments(tmp_path, metric_for_best_model="score")
    assert args.greater_is_better is True
    assert TF.arguments(tmp_path, metric_for_best_model="loss").greater_is_better is False
    with pytest.raises(Exception, match="strict=True"):
        trainer(tmp_path, TF.net(), strict=True, strategy=two_replicas())


def test_the_old_names_of_properties(tmp_path: Any) -> None:
    args = TF.arguments(tmp_path, per_device_train_batch_size=3)
    assert (args.n_replicas, args.n_gpu, args.train_batch_size) == (1, 1, 3)
    args.strategy = two_replicas()
    assert (args.n_replicas, args.train_batch_size, args.eval_batch_size) == (2, 6, 8)
    made = trainer(tmp_path, max_steps=2)
    made.train()
    assert (made.global_step, made.epoch_logging) == (2, pytest.approx(2 / 3))
    assert made.steps_per_epoch == 3 and made.num_train_examples == 12
    assert os.path.isdir(tmp_path) and np.isfinite(arrays(2)[0]).all()
