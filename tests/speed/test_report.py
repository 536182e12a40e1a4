"""The speed report: a table for people, a dict for programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loopwright.speed.report import Choice, SpeedReport, report_of
from tests.models import Tokens, samples, trainer_of

PLAN = {
    "choices": [
        ("flattened rows", True, "loss equal to 2e-7, gradients to 4e-7, no leak"),
        {"name": "whole-update graph", "on": False, "reason": "shapes differ from update to update"},
        Choice("linear cross-entropy", True, ""),
    ],
    "probe": {"loss": 2.1e-7, "gradients": 4.04e-7, "samples": 4},
}
NUMBERS = {
    "tokens_per_second": 58691.2, "computed_tokens_per_second": 59889.0, "samples_per_second": 178.0,
    "steps_per_second": 3.66, "data_wait_share": 0.004, "useful_token_share": 0.98, "mfu": 0.59,
    "peak_memory_gib": 41.5, "recompiles": 2.0,
}  # fmt: skip
MEASURED = (
    "tokens/s 58,691, computed tokens/s 59,889, samples/s 178, steps/s 3.66, useful tokens 98.0%, MFU 59.0%, "
    "waiting for data 0.4%, peak memory 41.50 GiB, recompiles 2"
)


def report() -> SpeedReport:
    return report_of(PLAN, numbers=NUMBERS, split={"data": 0.01, "forward": 0.3, "backward": 0.6, "optimizer": 0.09},
                     sampled_updates=3, update_seconds=0.273, device="NVIDIA H200", number_format="bf16")  # fmt: skip


def test_the_text_is_a_short_table() -> None:
    assert str(report()).splitlines() == [
        "speed report (NVIDIA H200, bf16)",
        "  on   flattened rows        loss equal to 2e-7, gradients to 4e-7, no leak",
        "  on   linear cross-entropy",
        "  off  whole-update graph    shapes differ from update to update",
        "  proof: loss 2.1e-07, gradients 4.04e-07, samples 4",
        "  measured: " + MEASURED,
        "  time per step (3 sampled steps of 273.0 ms): data 1%, forward 30%, backward 60%, optimizer 9%",
    ]


def test_the_data_is_json_and_complete() -> None:
    data = json.loads(json.dumps(report().as_dict()))
    assert data["choices"][1] == {
        "name": "whole-update graph", "on": False, "reason": "shapes differ from update to update"
    }  # fmt: skip
    assert data["numbers"] == NUMBERS and data["probe"] == PLAN["probe"]
    assert data["time_split"]["backward"] == 0.6 and data["sampled_updates"] == 3
    assert (data["device"], data["number_format"]) == ("NVIDIA H200", "bf16")


def test_what_is_not_known_is_not_shown() -> None:
    assert str(report_of(None)).splitlines() == ["speed report", "  measured: no log point yet"]
    assert "MFU" not in str(report_of(None, numbers={"samples_per_second": 2.0}))


def test_a_trainer_reports_before_and_after_training(tmp_path: Any) -> None:
    trainer = trainer_of(Tokens(), samples([6] * 20), tmp_path, num_train_epochs=1, per_device_train_batch_size=1,
                         logging_steps=5)  # fmt: skip
    assert "no log point yet" in str(trainer.speed_report())
    trainer.train()
    report = trainer.speed_report()
    assert report.device == "cpu" and report.number_format == "fp32"
    assert [choice.on for choice in report.choices] == [False]
    assert {"tokens_per_second", "samples_per_second", "useful_token_share", "peak_memory_gib"} <= set(report.numbers)
    assert report.sampled_updates == 1 and report.update_seconds is not None
    assert "time per step (1 sampled step" in str(report)


def test_a_run_without_any_of_it_says_so(tmp_path: Any) -> None:
    trainer = trainer_of(Tokens(), samples([6] * 4), tmp_path, num_train_epochs=1, speed="off")
    trainer.train()
    assert [(choice.on, choice.reason) for choice in trainer.speed_report().choices] == [(False, "speed='off'")]


def test_a_run_without_log_points_is_measured_whole(tmp_path: Any) -> None:
    trainer = trainer_of(Tokens(), samples([6] * 4), tmp_path, num_train_epochs=1, logging_strategy="no")
    trainer.train()
    assert trainer.speed_report().numbers["steps_per_second"] > 0


@pytest.mark.parametrize(("options", "expected"), [({}, "fp32"), ({"bf16": True}, "bf16"), ({"fp16": True}, "fp16")])
def test_the_number_format_is_that_of_the_products(options: dict[str, Any], expected: str, tmp_path: Any) -> None:
    trainer = trainer_of(Tokens(), samples([6] * 2), tmp_path, **options)
    assert trainer.speed_report().number_format == expected


def test_half_precision_weights_count_as_such(tmp_path: Any) -> None:
    trainer = trainer_of(Tokens().bfloat16(), samples([6] * 2), tmp_path)
    assert trainer.speed_report().number_format == "bf16"
