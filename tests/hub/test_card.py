"""The model card, and the files of evaluation results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from loopwright import TrainingArguments
from loopwright.hub.card import BEGIN, END, CardFacts, card
from loopwright.hub.contents import is_pickle
from loopwright.hub.facts import changed_arguments
from loopwright.hub.results import FILE, Results, results_file

from .runs import trainer_of
from .server import HubServer


def measured(**options: Any) -> Any:
    trainer = trainer_of(push_to_hub=False, eval_strategy="steps", eval_steps=2, **options)
    trainer.compute_metrics = lambda prediction: {"error": float(abs(prediction.predictions).mean())}
    trainer.train()
    return trainer


def test_a_card_states_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import ModelCard, parse_eval_result_entries

    trainer = measured(learning_rate=0.03125, hub_token="hf_" + "secret" * 4)
    trainer.create_model_card(
        language="en", license="mit", tags="mine", model_name="Mine", dataset="me/data", dataset_args="test",
        tasks="tabular-regression", finetuned_from="me/base",
    )  # fmt: skip
    made = ModelCard.load("run/README.md")
    data = made.data.to_dict()
    assert data["license"] == "mit" and data["base_model"] == "me/base" and data["datasets"] == ["me/data"]
    assert {"mine", "generated_from_trainer", "loopwright"} <= {*data["tags"]}
    last = trainer.state.log_history[-2]
    results = {each.metric_name: each.metric_value for each in made.data.eval_results}
    assert results == {"loss": last["eval_loss"], "error": last["eval_error"]}
    for text in ("# Mine", "0.03125", "16 samples", "6 of 6", "speed report", "torch", "| step | epoch |"):
        assert text in made.text, text
    assert "secret" not in Path("run/README.md").read_text() and str(tmp_path) not in made.text
    (entry,) = parse_eval_result_entries(yaml.safe_load(Path("run", FILE).read_text()))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("me/data", "test", last["eval_error"])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"report_to": "none", "learning_rate": 5e-5, "eval_strategy": "no"},
        {"learning_rate": 1e-3, "use_cpu": True},
        {"eval_strategy": "epoch", "load_best_model_at_end": True},
        {"eval_strategy": "steps", "eval_steps": 7, "metric_for_best_model": "accuracy"},
        {"torch_compile": True, "debug": "underflow_overflow"},
    ],
)
def test_a_card_lists_the_arguments_that_were_set_and_no_others(given: dict[str, Any]) -> None:
    defaults = {"report_to": "none", "learning_rate": 5e-5, "eval_strategy": "no"}
    expected = {name for name, value in given.items() if defaults.get(name) != value}
    assert set(changed_arguments(TrainingArguments("run", **given))) == expected


def test_what_the_user_wrote_is_kept() -> None:
    Path("run").mkdir()
    Path("run/README.md").write_text("---\nlicense: apache-2.0\ntags: [mine]\n---\n# About\n\nMy text.\n")
    trainer = measured(max_steps=2)
    trainer.create_model_card(license="mit")
    trainer.create_model_card()
    text = Path("run/README.md").read_text()
    values = yaml.safe_load(text.split("---")[1])
    assert values["license"] == "apache-2.0" and {"mine", "loopwright"} <= {*values["tags"]}
    assert "My text." in text and text.count(BEGIN) == text.count(END) == 1


@pytest.mark.parametrize(
    "earlier", ["", "no header", "---\n", "---\n---\n", "---\n: [\n---\nbody", "---\n- a\n---\nbody"]
)
def test_any_earlier_text_gives_a_valid_card(earlier: str) -> None:
    text = card(CardFacts("model", metadata={"tags": ["a"]}, arguments={"x|y": "<!-- a\n -->"}), earlier)
    assert yaml.safe_load(text.split("---\n")[1]) == {"tags": ["a"]}
    assert card(CardFacts("model", metadata={"tags": ["a"]}), text).count(BEGIN) == 1


def test_results_are_those_of_the_last_evaluation() -> None:
    history = [
        {"eval_loss": 3.0, "step": 1},
        {"eval_a_loss": 1.0, "eval_a_f1": 0.5, "step": 2, "epoch": 1.0},
        {"eval_b_loss": 2.0, "eval_b_runtime": 9.0, "eval_b_model_preparation_time": 0.1, "step": 2, "epoch": 1.0},
        {"train_loss": 1.0, "step": 2},
    ]
    found = Results.last(history)
    assert found is not None and found.step == 2 and found.metrics == {"a_loss": 1.0, "a_f1": 0.5, "b_loss": 2.0}
    assert found.main_metric(None) == "a_f1" and found.main_metric("eval_a_f1") == "a_f1"
    assert Results.last([{"loss": 1.0}]) is None


@pytest.mark.parametrize(
    ("metrics", "datasets"), [({"loss": 1.0}, ["me/data"]), ({"f1": 1.0}, ["mine"]), ({"f1": 1.0}, []), ({}, ["a/b"]),
                              ({"f1": 1.0, "em": 1.0}, ["me/data"]), ({"f1": 1.0}, ["me/data", "me/more"])]
)  # fmt: skip
def test_no_file_of_results_without_a_dataset_and_a_metric(metrics: dict[str, float], datasets: list[str]) -> None:
    assert results_file(Results(1, 1.0, metrics), metric=None, datasets=datasets, tasks=[]) is None


def test_pickles_are_recognized(tmp_path: Path) -> None:
    import pickle
    import zipfile

    import numpy as np
    import torch

    torch.save({"a": torch.ones(1)}, tmp_path / "weights")
    (tmp_path / "old").write_bytes(pickle.dumps([1], protocol=2))
    (tmp_path / "state.pkl").write_bytes(pickle.dumps([1], protocol=0))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert all(map(is_pickle, tmp_path.iterdir()))
    plain = tmp_path / "plain"
    plain.mkdir()
    np.save(plain / "numbers.npy", np.ones(3))
    (plain / "a.json").write_text("{}")
    (plain / "empty").write_bytes(b"")
    (plain / "not.zip").write_bytes(b"PK\x03\x04 broken")
    with zipfile.ZipFile(plain / "model.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    assert not any(map(is_pickle, plain.iterdir()))


def test_the_license_of_the_base_is_inherited(online: HubServer) -> None:
    class Config:
        _name_or_path = "me/model"

        def to_dict(self) -> dict[str, Any]:
            return {}

    trainer = trainer_of(max_steps=1, save_strategy="no", hub_strategy="end", push_to_hub=False)
    trainer.init_hf_repo()
    trainer.model.config = Config()
    trainer.init_hf_repo()
    trainer.create_model_card()
    values = yaml.safe_load(Path("run/README.md").read_text().split("---")[1])
    assert values["license"] == "mit" and values["base_model"] == "me/model"
