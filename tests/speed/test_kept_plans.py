"""Plans kept between runs: proved again on one update instead of searched, and never used for anything else."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import random
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.pt import acceleration
from loopwright.pt.acceleration import Acceleration
from loopwright.pt.loss.learning import LossLearning
from loopwright.speed import user_cache
from loopwright.speed.compile.cache import is_cached, load_compile_cache
from loopwright.speed.layouts.samples import take_apart
from loopwright.speed.memory import token_budget
from loopwright.speed.planner import kept as kept_plans, planner, regions
from loopwright.speed.planner.cost import Work
from loopwright.speed.planner.decision import SpeedPlan
from loopwright.speed.planner.kept import EARLIER, KeptPlan, form_of
from loopwright.speed.proof.guard import Coverage, Seen
from loopwright.speed.proof.prober import Prober
from loopwright.speed.proof.prover import NOISE, Prover
from loopwright.speed.source_code import source_digest
from loopwright.speed.training_setup import TrainingSetup
from loopwright.speed.user_cache import home, read_signed, write_signed
from tests.core.tampering import VALUES, changed, paths_in
from tests.speed.architectures import build, collate, samples
from tests.speed.training import InOrder, Run, train

pytest.importorskip("transformers")

STEPS = {"speed": "max", "max_steps": 3, "full_determinism": False}


@pytest.fixture(autouse=True)
def _keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPWRIGHT_KEPT_PLANS", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts of comparisons on a few samples, and of whole updates."""
    counts: Counter[str] = Counter()
    for kind, name in ((Prover, "references"), (Prover, "prove_few"), (Prover, "prove_update"), (Prober, "reference")):
        monkeypatch.setattr(kind, name, _counting(getattr(kind, name), name, counts))
    return counts


def _counting(method: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return method(*args, **kwargs)

    return call


def run(folder: Path, model: nn.Module | None = None, data: Any = None, **options: Any) -> Run:
    torch.manual_seed(0)
    kind = options.pop("kind", InOrder)
    model, data = model or build("llama", "causal"), data or samples(40, "causal")
    return train(model, data, folder, kind=kind, **{**STEPS, **options})


def weights(found: Run) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in found.trainer.model.named_parameters()}


def files() -> list[Path]:
    return sorted((home() / "plans").glob("*.json")) if home().exists() else []


def is_taken_over(found: Run) -> bool:
    return any(choice.name == EARLIER for choice in found.plan.choices)


def switches(plan: SpeedPlan) -> dict[str, Any]:
    return {name: value for name, value in plan.as_dict().items() if name != "choices"}


# ---- the same run again ---------------------------------------------------------------------------------------------


def test_the_second_run_compares_one_update_and_trains_the_same(
    tmp_path: Path, counted: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = run(tmp_path / "first")
    assert not is_taken_over(first) and counted["references"] == 1 and counted["prove_few"] >= 2
    assert len(files()) == 1 and files()[0].stat().st_mode & 0o777 == 0o600
    before, searched = dict(counted), counted["reference"]
    counted.clear()
    with caplog.at_level(logging.WARNING):
        second = run(tmp_path / "second", strict=True)
    assert is_taken_over(second) and f"on   {EARLIER}: this step was compared again, and agrees" in caplog.text
    assert counted["references"] == counted["prove_few"] == 0
    assert 1 <= counted["prove_update"] <= before["prove_update"] and counted["reference"] <= searched - 2
    assert switches(first.plan) == switches(second.plan) and first.plan.layout == "flat" and first.plan.linear_loss
    assert first.losses == second.losses and first.shapes == second.shapes
    one, other = weights(first), weights(second)
    assert all(torch.equal(one[name], other[name]) for name in one)
    audits = [found.trainer._loopwright.run.speed._verification for found in (first, second)]
    assert audits[0].coverage.as_list() == audits[1].coverage.as_list() and audits[0].audits == audits[1].audits


def test_other_weights_are_compared_too(tmp_path: Path, counted: Counter[str]) -> None:
    run(tmp_path / "first")
    counted.clear()
    other = build("llama", "causal")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    found = run(tmp_path / "second", other)
    assert is_taken_over(found) and counted["prove_update"] >= 1 and counted["references"] == 0


class MeanOnly:
    """A function of transformers' losses that does not divide by num_items_in_batch, as an object."""

    def __call__(self, source: Tensor, target: Tensor, *args: Any, ignore_index: int = -100, **rest: Any) -> Tensor:
        return nn.functional.cross_entropy(source, target, ignore_index=ignore_index)


@pytest.mark.parametrize("replaced", ["loss", "its cross entropy"])
def test_the_form_of_the_loss_is_inferred_in_each_run(
    replaced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.loss import loss_utils

    run(tmp_path / "first")
    if replaced == "loss":  # counts the first target of each row
        monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", loss_utils.ForMaskedLMLoss)
    else:
        monkeypatch.setattr(loss_utils, "fixed_cross_entropy", MeanOnly())
    found, plain = run(tmp_path / "second"), run(tmp_path / "plain", speed="off")
    one, other = weights(found), weights(plain)
    assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-9) for name in one)


# ---- what is not the same -------------------------------------------------------------------------------------------


class Louder(InOrder):
    """A loss of the user."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


def _more(batch: Any) -> dict[str, Tensor]:
    made = collate(batch)
    return {**made, "position_ids": torch.arange(made["input_ids"].shape[1]).expand(len(batch), -1).clone()}


def _frozen() -> nn.Module:
    model = build("llama", "causal")
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


def _patched() -> nn.Module:
    model = build("llama", "causal")
    norm = model.model.norm
    plain = norm.forward
    norm.forward = lambda x: plain(x) * 1.0
    return model


def _dropping() -> nn.Module:
    model = build("llama", "causal")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return model


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "batch size": lambda: {"per_device_train_batch_size": 5},
    "accumulation": lambda: {"gradient_accumulation_steps": 1},
    "precision": lambda: {"bf16": True},
    "loss": lambda: {"kind": Louder},
    "label smoothing": lambda: {"label_smoothing_factor": 0.1},
    "collator": lambda: {"data_collator": _more},
    "frozen weights": lambda: {"model": _frozen()},
    "another width": lambda: {"model": build("llama", "causal", hidden_size=16)},
    "dropout": lambda: {"model": _dropping()},
    "a function set on a module": lambda: {"model": _patched()},
    "architecture": lambda: {"model": build("qwen2", "causal")},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_not_used_for_other_training(change: str, tmp_path: Path, counted: Counter[str]) -> None:
    run(tmp_path / "first", max_steps=1)
    counted.clear()
    found = run(tmp_path / "second", **{"max_steps": 1, **CHANGES[change]()})
    assert not is_taken_over(found) and counted["references"] >= 1


@pytest.mark.parametrize("how", ["full_determinism", "off", "variable"])
def test_nothing_is_kept_or_read(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"full_determinism": {"full_determinism": True}, "off": {"speed": "off"}, "variable": {}}[how]
    if how == "variable":
        monkeypatch.setenv("LOOPWRIGHT_KEPT_PLANS", "off")
    found = run(tmp_path / "first", **options)
    assert not files() and not is_taken_over(found)
    monkeypatch.setenv("LOOPWRIGHT_KEPT_PLANS", "on")
    run(tmp_path / "second")
    assert len(files()) == 1
    if how == "variable":
        monkeypatch.setenv("LOOPWRIGHT_KEPT_PLANS", "off")
    assert not is_taken_over(run(tmp_path / "third", **options))


def test_data_without_padding_is_planned_by_itself(tmp_path: Path, counted: Counter[str]) -> None:
    first = run(tmp_path / "first", max_steps=1)
    assert first.plan.layout == "flat"
    even = [
        {name: value[:4] for name, value in each.items()} for each in samples(40, "causal") if len(each["labels"]) >= 4
    ]
    kept = run(tmp_path / "kept", data=even, max_steps=1)
    files()[0].unlink()
    alone = run(tmp_path / "alone", data=even, max_steps=1)
    assert switches(kept.plan) == switches(alone.plan) and kept.losses == alone.losses


def test_other_lengths_are_covered_by_the_new_run(tmp_path: Path) -> None:
    short = [{name: value[:9] for name, value in each.items()} for each in samples(40, "causal")]
    run(tmp_path / "first", data=short)
    found = run(tmp_path / "second")
    alone = run(tmp_path / "alone", speed="off")
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)


def test_a_whole_update_that_differs_is_planned_from_the_beginning(
    tmp_path: Path, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "first", max_steps=1)
    counted.clear()
    prove, calls = Prover.prove_update, []

    def differs_once(self: Any, *args: Any) -> Any:
        calls.append(1)
        proof = prove(self, *args)
        return proof.refuse("the loss differs by 1e+00") if len(calls) <= 2 else proof

    monkeypatch.setattr(Prover, "prove_update", differs_once)
    found = run(tmp_path / "second", max_steps=1)
    assert not is_taken_over(found) and counted["references"] == 1 and found.plan.layout == "flat"


@pytest.mark.parametrize("couples", [False, True])
def test_a_plan_that_failed_later_is_forgotten(couples: bool, tmp_path: Path) -> None:
    found = run(tmp_path / "first", max_steps=1)
    assert len(files()) == 1
    internals = found.trainer._loopwright
    if couples:
        internals.loss._leave_layouts()  # the loss turned out to compare samples
    else:
        internals.run.speed._switch_off("a later step differed")
    assert not files()


# ---- the file -------------------------------------------------------------------------------------------------------


def test_a_file_of_another_form_or_user_is_ignored(
    tmp_path: Path, counted: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "first", max_steps=1)
    (path,) = files()
    good = path.read_bytes()
    values = json.loads(good[32:])
    contents = [b"", good[:-1], good[:32] + b"{}", b"?" + good[1:]]
    for content in contents:
        path.write_bytes(content)
        assert not is_taken_over(run(tmp_path / "again", max_steps=1))
        path.write_bytes(good)
    assert "was not written by this user (or is damaged) and is ignored" in caplog.text
    values["proved"]["flat"] = "everything"
    write_signed(path, path.name, json.dumps(values).encode(), most=9)
    assert not is_taken_over(run(tmp_path / "again", max_steps=1)) and "expected an object" in caplog.text
    path.write_bytes(good)
    os.chmod(path.parent, 0o777)
    assert not is_taken_over(run(tmp_path / "again", max_steps=1)) and "can be changed by, another user" in caplog.text
    os.chmod(path.parent, 0o700)
    assert is_taken_over(run(tmp_path / "again", max_steps=1))


def test_values_of_another_kind_are_refused() -> None:
    good = {"made_for": "here", "form": "a", "shape": "b", "code": "c", "proved": {"flat": {"loss": 0.0}},
            "work": {"launches": 3, "device_seconds": 0.1, "product_seconds": 0.1, "plain_bytes": 2.0},
            "memory": {"measured_for": "flat", "estimate": {
                "fixed": 9, "per_token": {"none": 3.0, "selective": 2.0, "full": 1.0}}}, "row": 64}  # fmt: skip
    memory = KeptPlan.from_json(json.dumps(good).encode()).memory
    assert memory is not None and memory.estimate.at(10, "selective") == 29
    assert KeptPlan.from_json(json.dumps(good).encode()).work == Work(3, 0.1, 0.1, 2.0)
    for path in paths_in(good):
        for kind in ("a string", "a list", "true", "null"):
            new = changed(good, path, VALUES[kind])
            is_alike = new is None or (
                kind == "a string" and path[-1] in ("made_for", "form", "shape", "code", "measured_for")
            )
            if is_alike or (kind == "null" and path in (("work",), ("memory",))):
                continue
            with pytest.raises(ValueError):
                KeptPlan.from_json(new.encode() if isinstance(new, str) else new)
    for content in (b"[]", b"not json", json.dumps({**good, "more": "x"}).encode()):
        with pytest.raises(ValueError):
            KeptPlan.from_json(content)


def test_a_folder_that_cannot_be_written_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file in place of the folder")
    found = run(tmp_path / "first", max_steps=1, strict=True)
    assert found.plan.layout == "flat" and "could not be saved" in caplog.text


def test_old_files_are_removed_and_none_is_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "MOST_FILES", 1)
    run(tmp_path / "first", max_steps=1)
    run(tmp_path / "second", max_steps=1, per_device_train_batch_size=5)
    assert len(files()) == 1 and [each.name for each in files()[0].parent.iterdir()] == [files()[0].name]


def test_the_key_is_complete_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = home() / "plans" / "a.json"
    with monkeypatch.context() as patched:
        patched.setattr(user_cache.os, "link", _fails)
        patched.setattr(user_cache.os, "replace", _fails)
        with pytest.raises(OSError):
            write_signed(path, path.name, b"content", most=9)
    assert not [each for each in home().rglob("*") if each.is_file()], "nothing half-made is left"
    write_signed(path, path.name, b"content", most=9)
    assert read_signed(path, path.name) == b"content" and len(user_cache.key_file().read_bytes()) == 32
    user_cache.key_file().unlink()
    monkeypatch.setattr(user_cache.os, "link", _fails)  # a file system without hard links
    write_signed(path, path.name, b"other", most=9)
    assert read_signed(path, path.name) == b"other"


def _fails(*args: Any) -> None:
    raise OSError("not here")


def test_what_a_killed_process_has_left_is_removed() -> None:
    path = home() / "plans" / "a.json"
    write_signed(path, path.name, b"content", most=9)
    old, new = (path.with_name(f".a.json.{name}.partial") for name in ("old", "new"))
    for each in (old, new):
        each.write_bytes(b"half")
    os.utime(old, (0, 0))
    write_signed(path, path.name, b"content", most=9)
    assert not old.exists() and new.exists() and path.exists()


def test_a_relative_cache_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path / ".cache" / "loopwright"


def test_a_user_without_a_folder_has_no_compile_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(user_cache.Path, "home", _unknown)
    assert not is_cached("a") and not load_compile_cache("a")


def _unknown() -> None:
    raise RuntimeError("Could not determine home directory.")


def test_only_plans_that_a_later_run_can_prove_are_kept() -> None:
    def plan(noise: float = 0.0, **switches: Any) -> SpeedPlan:
        made = SpeedPlan(**{"layout": "flat", **switches})
        made.note("flat", True, "", {"loss": 0.0, NOISE: noise, "update_loss": 1.0})
        made.note("fused loss", False, "the logits are used outside the loss")
        return made

    coverage = Coverage()
    coverage.add(Seen(shortest={"source": 2}, longest={"source": 9}, row=64))
    found = KeptPlan.of(plan(), coverage, form="form", shape="shape", work=None)
    assert found is not None and found.proved == {"flat": {"loss": 0.0, NOISE: 0.0}} and found.row == 64
    assert KeptPlan.of(plan(), None, form="form", shape="shape", work=None) is None, "the whole update was not compared"
    assert KeptPlan.of(SpeedPlan(compiled=True), coverage, form="form", shape="shape", work=None) is None
    for each in (plan(graphed=True), plan(activations="full"), plan(noise=0.1), plan(noise=float("nan"))):
        assert KeptPlan.of(each, coverage, form="form", shape="shape", work=None) is None


def test_memory_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceleration, "total_memory", lambda device: 2**30)
    counts: Counter[str] = Counter()
    monkeypatch.setattr(token_budget, "_estimate", _counting(token_budget._estimate, "measured", counts))
    first, second = (run(tmp_path / name, max_steps=1) for name in ("first", "second"))
    assert is_taken_over(second) and counts["measured"] == 1
    assert first.plan.budget and switches(first.plan) == switches(second.plan)
    reasons = [[each.reason for each in found.plan.choices if each.name == "token budget"] for found in (first, second)]
    assert reasons[0] == reasons[1] and len(reasons[0]) == 1
    longer = samples(40, "causal")
    longer[0] = {name: torch.cat([value] * 3) for name, value in longer[0].items()}
    third = run(tmp_path / "third", data=longer, max_steps=1)
    assert counts["measured"] == 2, "the longest sample is another"
    files()[0].unlink()
    assert run(tmp_path / "alone", data=longer, max_steps=1).plan.budget == third.plan.budget


def test_weights_and_optimizer_are_counted_in_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceleration, "total_memory", lambda device: 2**30)
    run(tmp_path / "first", max_steps=1)
    plain = acceleration.model_bytes
    # As with an optimizer that has more states.
    monkeypatch.setattr(acceleration, "model_bytes", lambda *args, **kwargs: plain(*args, **kwargs) + 2**29)
    kept = run(tmp_path / "kept", max_steps=1)
    files()[0].unlink()
    alone = run(tmp_path / "alone", max_steps=1)
    assert is_taken_over(kept) and not is_taken_over(alone)
    needed = [found.plan.number("budget_gib") for found in (kept, alone)]
    assert needed[0] == needed[1] > 0.5


def test_the_same_lengths_are_compared_again(tmp_path: Path) -> None:
    first = run(tmp_path / "first", max_steps=1)
    again = run(tmp_path / "again", max_steps=1)
    assert is_taken_over(again)
    forms = [each.trainer._loopwright.run.speed._verification.coverage.forms for each in (first, again)]
    assert forms[0] == forms[1]


# ---- a part of the update -------------------------------------------------------------------------------------------

MANY = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The micro-batches of every update that was computed as written for comparison."""
    found: list[list[Any]] = []
    update = Prover.update

    def recorded(self: Any, samples: Any, batches: Any, **more: Any) -> Any:
        found.append(list(batches))
        return update(self, samples, batches, **more)

    monkeypatch.setattr(Prover, "update", recorded)
    return found


@pytest.mark.parametrize("place", [0, 5, 11])
def test_of_many_micro_batches_the_one_with_the_longest_sample_and_another_are_compared(
    place: int, tmp_path: Path, references: list[list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    data = samples(40, "causal", longest=12)
    data[place] = {name: value.repeat(15)[:15] for name, value in data[place].items()}
    first = run(tmp_path / "first", data=data, max_steps=1, **MANY)
    assert [len(each) for each in references] == [4]
    references.clear()
    with caplog.at_level(logging.WARNING):
        second = run(tmp_path / "second", data=data, max_steps=1, **MANY)
    assert is_taken_over(second) and "of 2 of 4 micro-batches were compared again, and agree" in caplog.text
    assert [len(each) for each in references] == [2]
    assert max(batch["input_ids"].shape[1] for batch in references[0]) == 15
    assert first.losses == second.losses and switches(first.plan) == switches(second.plan)


def test_what_the_compared_micro_batches_do_not_have_is_compared_before_it_is_used(
    tmp_path: Path, references: list[list[Any]]
) -> None:
    data = samples(40, "causal", longest=12)
    data[0] = {name: value.repeat(12)[:12] for name, value in data[0].items()}
    run(tmp_path / "first", data=data, max_steps=1, **MANY)
    references.clear()
    other = [dict(each) for each in data]
    for place in (9, 10, 11):  # more than twice the longest of the first run
        other[place] = {name: value.repeat(12)[:27] for name, value in other[place].items()}
    second = run(tmp_path / "second", data=other, max_steps=1, **MANY)
    alone = run(tmp_path / "alone", data=other, max_steps=1, speed="off", **MANY)
    verification = second.trainer._loopwright.run.speed._verification
    assert is_taken_over(second) and verification.coverage.forms[0].longest["source"] >= 27
    assert second.losses == pytest.approx(alone.losses, rel=1e-5)


WIDE = """
from torch import nn

WIDE = 20
MASKS = {}


class Norm(nn.Module):
    \"\"\"Adds what is in the padding of wide batches to their tokens.\"\"\"

    def __init__(self, plain):
        super().__init__()
        self.plain = plain

    def forward(self, x):
        x, mask = self.plain(x), MASKS.pop("mask")
        if mask is None or mask.shape != x.shape[:2] or x.shape[1] <= WIDE:
            return x
        return x + (x * (mask == 0).unsqueeze(-1)).sum(1, keepdim=True)


def watch(module, args, kwargs):
    MASKS["mask"] = kwargs.get("attention_mask")


watch.__module__ = "transformers.here"  # not a hook that prevents layouts
"""


def test_of_many_micro_batches_one_with_padding_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first micro-batch and that with the longest samples have none: they are truncated to one length."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kept_wide.py").write_text(WIDE)
    wide = importlib.import_module("kept_wide")

    def model() -> nn.Module:
        made = build("llama", "causal")
        made.model.norm = wide.Norm(made.model.norm)
        made.model.register_forward_pre_hook(wide.watch, with_kwargs=True)
        return made

    def lengths(*wanted: int) -> list[dict[str, Tensor]]:
        rows = zip(samples(12, "causal"), wanted, strict=True)
        return [{name: value.repeat(length)[:length] for name, value in row.items()} for row, length in rows]

    try:
        first = run(tmp_path / "first", model(), lengths(*[12] * 6, *[3, 9] * 3), max_steps=1, **MANY)
        assert first.plan.layout == "flat" and len(files()) == 1
        other = lengths(*[12] * 3, *[23] * 3, *[22, 3, 3] * 2)
        found = run(tmp_path / "second", model(), other, max_steps=1, **MANY)
        alone = run(tmp_path / "alone", model(), other, max_steps=1, speed="off", **MANY)
    finally:
        del sys.modules["kept_wide"]
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.parametrize("place", [0, 3, 8, 10])
def test_of_other_micro_batches_the_loss_is_compared(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding counts where a token is in the batch, which is in a micro-batch that has nothing else."""
    monkeypatch.syspath_prepend(str(tmp_path))
    code = WIDE
    marked = 'bool((kwargs["input_ids"] == 63).any())'
    for written, instead in (
        ("x.shape[1] <= WIDE", "not marked"),
        ('MASKS.pop("mask")\n', 'MASKS.pop("mask")\n        marked = MASKS.pop("marked")\n'),
        ('kwargs.get("attention_mask")\n', f'kwargs.get("attention_mask")\n    MASKS["marked"] = {marked}\n'),
    ):
        assert written in code
        code = code.replace(written, instead)
    (tmp_path / "kept_marked.py").write_text(code)
    made = importlib.import_module("kept_marked")

    def model() -> nn.Module:
        model = build("llama", "causal")
        model.model.norm = made.Norm(model.model.norm)
        model.model.register_forward_pre_hook(made.watch, with_kwargs=True)
        return model

    data = [{name: value % 60 for name, value in each.items()} for each in samples(12, "causal", longest=12)]
    for row, length in enumerate([9, 3, 4, 12, 4, 3, 11, 2, 2, 8, 6, 5]):
        data[row] = {name: value.repeat(length)[:length] for name, value in data[row].items()}
    other = [{name: value.clone() for name, value in each.items()} for each in data]
    other[place]["input_ids"][1] = 63
    try:
        run(tmp_path / "first", model(), data, max_steps=1, **MANY)
        assert is_taken_over(run(tmp_path / "again", model(), data, max_steps=1, **MANY))
        found = run(tmp_path / "second", model(), other, max_steps=1, **MANY)
        alone = run(tmp_path / "alone", model(), other, max_steps=1, speed="off", **MANY)
    finally:
        del sys.modules["kept_marked"]
    assert not is_taken_over(found) and found.losses == pytest.approx(alone.losses, rel=1e-5)


# ---- code -----------------------------------------------------------------------------------------------------------

MODEL = """
from torch import nn
from {helper} import scale

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x) * scale()
"""


def test_the_digest_changes_with_code_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kept_helper.py").write_text("def scale():\n    return 1.0\n")
    (tmp_path / "kept_model.py").write_text(MODEL.format(helper="kept_helper"))
    model = importlib.import_module("kept_model").Model()
    first = source_digest(model)
    assert first is not None and source_digest(model) == first
    (tmp_path / "kept_helper.py").write_text("def scale():\n    return 2.0\n")
    assert source_digest(model) != first, "a function that the model's module imports"
    (tmp_path / "kept_helper.py").write_text("def scale():\n    return 1.0\n")
    assert source_digest(model) == first
    sys.modules["kept_model"].scale = lambda: 3.0  # type: ignore[attr-defined]
    assert source_digest(model) != first, "a function that was replaced in the module"
    for name in ("kept_model", "kept_helper"):
        del sys.modules[name]


def test_code_without_a_file_is_not_identified() -> None:
    space: dict[str, Any] = {"nn": nn, "__name__": "a_notebook"}
    exec(compile("class Model(nn.Module):\n    def forward(self, x):\n        return x", "<cell>", "exec"), space)
    assert source_digest(space["Model"]()) is None
    assert source_digest(nn.Linear(2, 2)) is not None


# ---- values that code reads -----------------------------------------------------------------------------------------

READS = """
import os
from types import SimpleNamespace
import torch
from torch import nn

FAR = 9
STRENGTH = 0.0
SETTINGS = SimpleNamespace(strength=0.0)
CALLS = {}


def strength():
    return STRENGTH + SETTINGS.strength + float(os.environ.get("KEPT_STRENGTH", "0"))


class Norm(nn.Module):
    \"\"\"Couples tokens far from the start of a sample with the rest of their row.\"\"\"

    of_class = 0.0

    def __init__(self, plain):
        super().__init__()
        self.plain, self.added = plain, None
        self.args, self.options, self.many = SimpleNamespace(strength=0.0), {"strength": 0.0}, [0.0]
        self.register_buffer("gate", torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        own = self.of_class + self.args.strength + self.options["strength"] + self.many[0]
        own = own + self.gate + self.frozen + strength() + (0.0 if self.added is None else self.added())
        far = (CALLS["positions"] >= FAR).unsqueeze(-1).to(x.dtype)
        x = self.plain(x)
        return x + own * far * x.mean(1, keepdim=True)


def watch(module, args, kwargs):
    ids, found = kwargs["input_ids"], kwargs.get("position_ids")
    CALLS["positions"] = torch.arange(ids.shape[1]).expand(len(ids), -1) if found is None else found


watch.__module__ = "transformers.here"  # not a hook that prevents layouts


def bound(value):
    return lambda: value


def given(value=0.0):
    return value


def written(path):
    with open(path) as file:
        return float(file.read())
"""


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the user whose layer reads values from many places."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kept_reads.py").write_text(READS)
    monkeypatch.setenv("KEPT_STRENGTH", "0")
    yield importlib.import_module("kept_reads")
    del sys.modules["kept_reads"]


def coupled(reads: Any) -> nn.Module:
    torch.manual_seed(0)
    model = build("llama", "causal")
    model.model.norm = reads.Norm(model.model.norm)
    model.model.register_forward_pre_hook(reads.watch, with_kwargs=True)
    return model


def few_long() -> list[dict[str, Tensor]]:
    """Three updates; only the last has samples of more than nine tokens, fewer than twice those of the first."""
    generator = torch.Generator().manual_seed(0)
    lengths = [8 - i % 2 for i in range(12)] + [3 + i % 3 for i in range(24)]
    lengths[25] = lengths[31] = 14
    rows = [torch.randint(3, 60, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()} for row in rows]


def test_a_long_sample_is_compared_beside_others_in_its_row(tmp_path: Path, reads: Any) -> None:
    reads.STRENGTH = 1.0
    options = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1, "learning_rate": 0.05}
    fast, plain = (run(tmp_path / s, coupled(reads), few_long(), speed=s, **options) for s in ("max", "off"))
    assert fast.plan.layout == "flat" and fast.losses == pytest.approx(plain.losses, rel=1e-6)


VALUES_READ: dict[str, Callable[[Any, Any], Any]] = {
    "global": lambda here, norm: setattr(here, "STRENGTH", 1.0),
    "global object": lambda here, norm: setattr(here.SETTINGS, "strength", 1.0),
    "environment": lambda here, norm: os.environ.update(KEPT_STRENGTH="1"),
    "class": lambda here, norm: setattr(here.Norm, "of_class", 1.0),
    "namespace": lambda here, norm: setattr(norm.args, "strength", 1.0),
    "dictionary": lambda here, norm: norm.options.update(strength=1.0),
    "list": lambda here, norm: norm.many.__setitem__(0, 1.0),
    "buffer": lambda here, norm: norm.gate.fill_(1.0),
    "frozen weight": lambda here, norm: norm.frozen.data.fill_(1.0),
    "bound variable": lambda here, norm: setattr(norm, "added", here.bound(1.0)),
    "bound argument": lambda here, norm: setattr(norm, "added", functools.partial(here.given, 1.0)),
}


@pytest.mark.parametrize("place", VALUES_READ)
def test_a_plan_is_not_used_if_code_reads_another_value(place: str, tmp_path: Path, reads: Any) -> None:
    def model() -> nn.Module:
        made = coupled(reads)
        added = {"bound variable": reads.bound(0.0), "bound argument": functools.partial(reads.given)}
        made.model.norm.added = added.get(place)
        return made

    options = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1, "max_steps": 1}
    for name in ("first", "second"):
        reads.CALLS.clear()
        found = run(tmp_path / name, model(), few_long(), **options)
    assert found.plan.layout == "flat" and is_taken_over(found)
    reads.CALLS.clear()
    other = model()
    VALUES_READ[place](reads, other.model.norm)
    assert not is_taken_over(run(tmp_path / "other", other, few_long(), **options))


def test_lengths_are_compared_again_as_code_may_read_what_no_key_has(tmp_path: Path, reads: Any) -> None:
    file, options = tmp_path / "strength", {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}

    def model() -> nn.Module:
        reads.CALLS.clear()
        made = coupled(reads)
        made.model.norm.added = functools.partial(reads.written, str(file))
        return made

    file.write_text("0")
    run(tmp_path / "first", model(), few_long(), learning_rate=0.05, **options)
    file.write_text("1")
    found = run(tmp_path / "second", model(), few_long(), learning_rate=0.05, **options)
    plain = run(tmp_path / "plain", model(), few_long(), learning_rate=0.05, speed="off", **options)
    assert is_taken_over(found) and found.losses == pytest.approx(plain.losses, rel=1e-6)


def of_lengths(*lengths: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 60, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()} for row in rows]


SHORT_UPDATE, LONG_UPDATE = [2, 3, 2, 4, 2, 3], [7, 3, 4, 8, 5, 5]
THREE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 2}
IN_ONE_ROW = {**THREE, "per_device_train_batch_tokens": 64}


def test_rows_as_long_as_in_the_earlier_run_are_compared_with_the_first_update(tmp_path: Path) -> None:
    data = of_lengths(*SHORT_UPDATE, *LONG_UPDATE)
    run(tmp_path / "first", data=data, **IN_ONE_ROW)
    second = run(tmp_path / "second", data=data, **IN_ONE_ROW)
    alone = run(tmp_path / "alone", data=data, speed="off", **THREE)
    verification = second.trainer._loopwright.run.speed._verification
    assert is_taken_over(second) and second.shapes == [[(1, 16)], [(1, 32)]]
    assert verification.coverage.forms[0].row == 32 and verification.proofs == 0
    assert second.losses == pytest.approx(alone.losses, rel=1e-6)


def test_rows_are_not_longer_than_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update of the later run is more than one row, those of the earlier run were one."""
    rows: list[int] = []
    prove_loss = Prover.prove_loss

    def recorded(self: Any, candidate: Any, samples: Any, batches: Any, plan: Any) -> Any:
        rows.extend(batch["input_ids"].shape[1] for batch in candidate.lay_update(samples))
        return prove_loss(self, candidate, samples, batches, plan)

    options = {**THREE, "per_device_train_batch_tokens": 24}
    run(tmp_path / "first", data=of_lengths(*SHORT_UPDATE, *SHORT_UPDATE), **options)
    assert json.loads(files()[0].read_bytes()[32:])["row"] == 32
    monkeypatch.setattr(Prover, "prove_loss", recorded)
    second = run(tmp_path / "second", data=of_lengths(*LONG_UPDATE, *LONG_UPDATE), **options)
    assert is_taken_over(second) and second.shapes[0] == [(1, 14), (1, 18)] and rows == [14, 18]


class Masked(nn.Module):
    """A causal model whose loss counts tokens by a mask, also those without a label."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("llama", "causal")
        self.config = self.inner.config

    def forward(self, input_ids: Any, labels: Any, loss_mask: Any, **more: Any) -> dict[str, Any]:
        logits, counted = self.inner(input_ids=input_ids, **more).logits[:, :-1], loss_mask[:, 1:].double()
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        return {"loss": (losses * counted).sum() / counted.sum()}


def with_mask(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = collate([{name: row[name] for name in ("input_ids", "labels")} for row in rows])
    mask = batch["attention_mask"].clone()
    mask[:, 0] = 0
    return {**batch, "loss_mask": mask}


def test_the_plan_of_a_loss_that_counts_samples_without_labels_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    tolerance = Prober.tolerance

    def recorded(self: Any, batches: Any, setting: Any) -> Any:
        counted.append(len(batches))
        return tolerance(self, batches, setting)

    monkeypatch.setattr(Prober, "tolerance", recorded)
    data = of_lengths(*SHORT_UPDATE, *LONG_UPDATE)
    options = {**THREE, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 6}
    options |= {"data_collator": with_mask, "remove_unused_columns": False}
    alone = run(tmp_path / "alone", Masked(), data, speed="off", **options)
    options["per_device_train_batch_tokens"] = 64
    first = run(tmp_path / "first", Masked(), data, **options)
    second = run(tmp_path / "second", Masked(), data, **options)
    assert first.plan.layout == "flat" and is_taken_over(second)
    assert second.losses == pytest.approx(alone.losses, rel=1e-6) and second.shapes[0] == [(1, 16)]
    assert set(counted) == {1}, "the activations of all micro-batches would be in memory"


ROWS = """
from torch import nn


class Norm(nn.Module):
    \"\"\"Differs in rows of more tokens than a file says.\"\"\"

    def __init__(self, plain, file):
        super().__init__()
        self.plain, self.file = plain, file

    def forward(self, x):
        with open(self.file) as file:
            most = int(file.read())
        return self.plain(x) * (1.0 if x.shape[0] > 1 or x.shape[1] <= most else 1.5)
"""


@pytest.mark.parametrize("most", [10, 16, 31])
def test_the_loss_of_long_rows_is_compared_again(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rows of 32 tokens, although the first update has 16: if they differ, they are not covered."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kept_rows.py").write_text(ROWS)
    made, file = importlib.import_module("kept_rows"), tmp_path / "most"

    def model() -> nn.Module:
        model = build("llama", "causal")
        model.model.norm = made.Norm(model.model.norm, str(file))
        return model

    data = of_lengths(*SHORT_UPDATE, *LONG_UPDATE)
    try:
        for number in ("first", "second"):
            file.write_text("1000")
            assert is_taken_over(run(tmp_path / number, model(), data, **IN_ONE_ROW)) is (number == "second")
        file.write_text(str(most))
        found = run(tmp_path / "changed", model(), data, **IN_ONE_ROW)
        alone = run(tmp_path / "alone", model(), data, speed="off", **THREE)
    finally:
        del sys.modules["kept_rows"]
    verification = found.trainer._loopwright.run.speed._verification
    assert is_taken_over(found) is (most >= 16) and verification.left == (most >= 16)
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)


class Weighted(InOrder):
    """A trainer with a setting of its own."""

    weight = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own = {"weight": Weighted.weight}


class Tagged:
    """A collator with a setting of its own."""

    def __init__(self, value: float) -> None:
        self.options = {"value": value}

    def __call__(self, rows: Any) -> dict[str, Tensor]:
        return collate(rows)


def test_settings_of_trainer_and_collator_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(name: str, value: float) -> bool:
        return is_taken_over(run(tmp_path / name, kind=Weighted, data_collator=Tagged(value), max_steps=1))

    assert [taken("a", 0.0), taken("b", 0.0), taken("c", 1.0), taken("d", 1.0)] == [False, True, False, True]
    monkeypatch.setattr(Weighted, "weight", 1.0)
    assert not taken("e", 1.0)


def test_the_value_of_a_constant_is_part_of_the_form() -> None:
    batch = collate(samples(4, "causal"))
    updates = [[{**batch, "scale": scale}] for scale in (0.0, 1.0, 0.0)]
    one, other, again = (form_of(take_apart(each, is_pair=False, counts_trailing=True)) for each in updates)
    assert one == again != other


def test_a_function_replaced_in_a_library_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_digest(nn.Linear(2, 2))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: None)
    assert source_digest(nn.Linear(2, 2)) != before


def test_code_that_a_forward_imports_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))

    class Late(InOrder):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * importlib.import_module("kept_late").factor()

    def taken(name: str, text: str) -> bool:
        (tmp_path / "kept_late.py").write_text(text)
        importlib.invalidate_caches()
        sys.modules.pop("kept_late", None)
        return is_taken_over(run(tmp_path / name, kind=Late, max_steps=1))

    one, other = ("def factor():\n    return 1.0\n", "def factor():\n    return 1.0 + 0.0\n")
    assert [taken("a", one), taken("b", one), taken("c", other), taken("d", other)] == [False, True, False, True]
    del sys.modules["kept_late"]


def test_what_the_compiler_adds_to_modules_does_not_count() -> None:
    model = build("llama", "causal")
    before = source_digest(model)
    norm, place = model.model.norm, sys.modules[type(model.model.norm).__module__]
    held = set(vars(place))
    try:
        torch.compile(type(norm).forward, backend="eager")(norm, torch.ones(2, model.config.hidden_size))
        torch.compile(_in_module(place, _in_two), backend="eager")(torch.ones(3), torch._dynamo.graph_break)
        torch.compile(_in_module(place, _by_chance), backend="eager")(torch.ones(3), random.randint)
        added = set(vars(place)) - held
        starts = ("__compiled_fn_", "__resume_at_", "__gen_rand_values_")
        assert all(any(name.startswith(start) for name in added) for start in starts)
        assert before is not None and source_digest(model) == before
    finally:
        torch._dynamo.reset()


def _in_two(x: Tensor, cut: Callable[[], None]) -> Tensor:
    x = x * 2
    cut()
    return x + 1


def _by_chance(x: Tensor, draw: Callable[[int, int], int]) -> Tensor:
    return x + draw(0, 5)


def test_a_method_that_the_compiler_wraps_counts_if_the_user_has_replaced_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "from torch import nn\nplain = nn.Module.__init__\ndef init(self):\n    plain(self)\n    self.factor = {}\n"
    (tmp_path / "kept_init.py").write_text(text.format(1.0))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    model = nn.Linear(2, 2)
    digests = [source_digest(model)]
    monkeypatch.setattr(nn.Module, "__init__", importlib.import_module("kept_init").init)
    digests.append(source_digest(model))
    (tmp_path / "kept_init.py").write_text(text.format(2.0))
    digests.append(source_digest(model))
    del sys.modules["kept_init"]
    assert None not in digests and len(set(digests)) == 3


def _in_module(module: Any, function: Any) -> Any:
    """The function with the global variables of a module."""
    return types.FunctionType(function.__code__, vars(module), function.__name__, None, function.__closure__)


# ---- the compiler ---------------------------------------------------------------------------------------------------


def test_on_a_gpu_the_second_run_prepares_the_compiler_before_it_learns_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: Counter[str]
) -> None:
    events: list[str] = []
    monkeypatch.setattr(TrainingSetup, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(planner, "get_ready", lambda: events.append("prepared"))
    monkeypatch.setattr(Acceleration, "_compile_blocks", lambda self, short_rows: events.append("compiled"))
    monkeypatch.setattr(LossLearning, "learn_loss", _noting(LossLearning.learn_loss, "learned", events))
    monkeypatch.setattr(regions, "count_work", _noting(regions.count_work, "counted", events))
    deep = {"layers": 2}
    first = run(tmp_path / "first", build("llama", "causal", **deep), max_steps=1)
    assert events[:3] == ["learned", "counted", "prepared"] and "compiled" in events
    events.clear()
    second = run(tmp_path / "second", build("llama", "causal", **deep), max_steps=1)
    assert events[:2] == ["prepared", "learned"] and "counted" not in events and "compiled" in events
    assert is_taken_over(second) and first.losses == second.losses and switches(first.plan) == switches(second.plan)


def _noting(method: Callable[..., Any], name: str, events: list[str]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        events.append(name)
        return method(*args, **kwargs)

    return call


def test_a_run_on_a_cpu_does_not_prepare_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for module in (planner, regions):
        monkeypatch.setattr(module, "get_ready", lambda: events.append("prepared"))
    for name in ("first", "second"):
        run(tmp_path / name)
    assert events == []
