"""The shared parts of the speed benchmarks: who is void, what is counted, what is shown; and one run of the CPU one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # scripts, not a package: they import each other by name

NAMES = ("arms", "bert", "lengths", "processes", "sft", "t5", "watch")
arms, bert, lengths, processes, sft, t5, watch = map(import_module, NAMES)

EXACT = arms.Tolerance(each=1e-5)
DROPOUT = arms.Tolerance(mean=3e-2)


def ran(losses: list[float], **more: Any) -> dict[str, Any]:
    return {"status": "ok", "losses": losses, "tokens_per_s": 100.0, "samples_per_s": 10.0, "note": "", **more}


def judged(tolerance: Any, **results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    arms.judge(results, tolerance)
    return results


# ---- the judge ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        ([3.0, 2.0], "ok"),
        ([3.0, 2.00001], "ok"),
        ([3.0, 2.001], "void"),
        ([3.0, math.nan], "void"),
        (["nan", 2.0], "void"),  # as it comes out of the JSON file
        ([], "void"),
    ],
)
def test_an_arm_is_void_when_any_loss_is_off(losses: list[float], status: str) -> None:
    results = judged(EXACT, transformers=ran([3.0, 2.0, 1.0]), ours=ran(losses))
    assert results["ours"]["status"] == status
    assert results["transformers"]["status"] == "ok"


def test_only_the_first_updates_are_held_against_the_reference() -> None:
    late = [1.0] * 20 + [5.0]
    assert judged(EXACT, transformers=ran([1.0] * 21), ours=ran(late))["ours"]["status"] == "ok"


def test_with_dropout_means_are_compared() -> None:
    reference, noisy, other = [1.0, 1.0, 1.0, 1.0], [0.8, 1.2, 0.9, 1.1], [1.1, 1.2, 0.9, 1.1]
    results = judged(DROPOUT, transformers=ran(reference), ours=ran(noisy), loop=ran(other))
    assert (results["ours"]["status"], results["loop"]["status"]) == ("ok", "void")


def test_another_sample_order_is_compared_by_its_level() -> None:
    reference = [4.0, 3.0, 2.0, 1.0]
    results = judged(
        EXACT,
        transformers=ran(reference),
        grouped=ran([3.5, 3.5, 2.2, 1.01], reordered=True),
        diverged=ran([4.0, 3.0, 2.0, 1.2], reordered=True),
    )
    assert (results["grouped"]["status"], results["diverged"]["status"]) == ("ok", "void")


def test_without_transformers_the_loop_is_the_reference() -> None:
    results = judged(EXACT, transformers={"status": "not installed"}, loop=ran([1.0]), ours=ran([2.0]))
    assert results["ours"]["curve"]["against"] == "loop"
    assert results["ours"]["status"] == "void"


def test_judging_twice_changes_nothing() -> None:
    results = judged(EXACT, transformers=ran([1.0]), ours=ran([2.0]), loop=ran([1.0]))
    before = json.dumps(results)
    arms.judge(results, EXACT)
    assert json.dumps(results) == before


# ---- table and targets --------------------------------------------------------------------------------------------


def test_the_table_shows_no_number_of_a_void_or_missing_arm() -> None:
    results = judged(EXACT, transformers=ran([1.0]), ours=ran([1.0], tokens_per_s=650.0), loop=ran([9.0]))
    results["lightning"] = {"status": "not installed", "note": "lightning is not installed"}
    lines = {line.split()[0]: line for line in arms.table(results).splitlines()}
    assert "650" in lines["ours"] and "6.50" in lines["ours"]
    assert "void: losses differ" in lines["loop"] and "100" not in lines["loop"]
    assert "not installed" in lines["lightning"]


def test_targets_count_only_what_is_not_void() -> None:
    target = arms.Target("6 x", "tokens_per_s", 6.0, "transformers")
    fast = ran([1.0], tokens_per_s=650.0)
    assert target.verdict({"transformers": ran([1.0]), "ours": fast})["met"] is True
    assert target.verdict({"transformers": ran([1.0]), "ours": {**fast, "status": "void"}})["met"] is None
    assert target.verdict({"ours": fast})["value"] is None
    memory = arms.Target("at most 45 GiB", "peak_gib", 45.0, at_most=True)
    assert memory.verdict({"ours": ran([1.0], peak_gib=50.0)})["met"] is False


def test_numbers_that_are_not_finite_are_still_json(tmp_path: Path) -> None:
    arms.write_json(tmp_path / "deep" / "file.json", {"losses": [1.0, math.inf, math.nan]})
    text = (tmp_path / "deep" / "file.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["losses"] == [1.0, "inf", "nan"]


# ---- one process per arm ------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys, time
arm, into = sys.argv[sys.argv.index("--arm") + 1], sys.argv[sys.argv.index("--into") + 1]
with open(into, "a") as out:
    out.write(json.dumps({"described": {"date": "today"}}) + "\\n")
    out.flush()
    if arm == "slow":
        time.sleep(60)
    if arm == "broken":
        raise SystemExit("no such thing")
    out.write(json.dumps({"status": "ok", "words": sys.argv[1:3]}) + "\\n{half a li")
"""


@pytest.mark.parametrize(
    ("arm", "status", "note"),
    [("fine", "ok", None), ("slow", "timed out", "after 2 s"), ("broken", "failed", "code 1")],
)
def test_an_arm_that_hangs_or_dies_is_reported(tmp_path: Path, arm: str, status: str, note: str | None) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    start = time.perf_counter()
    result = processes.run_arm(script, arm, ["--samples", "8"], timeout=2.0 if arm == "slow" else 20.0)
    assert time.perf_counter() - start < 20
    assert result["status"] == status and (note is None or note in result["note"])
    if arm == "fine":
        assert result["words"] == ["--samples", "8"]
    if arm == "broken":
        assert "no such thing" in result["log"]


def test_a_package_that_is_missing_is_not_a_failure() -> None:
    foreign, own = (ModuleNotFoundError(f"No module named '{name}'", name=name) for name in ("liger", "loopwright.x"))
    assert processes.failure(foreign)["status"] == "not installed"
    assert processes.failure(own)["status"] == "failed"


# ---- what is counted ----------------------------------------------------------------------------------------------


def weights_of(model: torch.nn.Module) -> int:
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))


@pytest.mark.parametrize(
    ("name", "body", "head"), [("0.5b", 0.358, 0.136), ("1.24b", 0.973, 0.263), ("1.7b", 1.409, 0.311)]
)
def test_llama_sizes_are_those_of_the_published_tables(name: str, body: float, head: float) -> None:
    shape = sft.MODELS[name]
    assert (round(shape.body / 1e9, 3), round(shape.head / 1e9, 3)) == (body, head)
    with torch.device("meta"):
        assert weights_of(shape.build()) == shape.body + shape.head


def counted(model: torch.nn.Module, **inputs: torch.Tensor) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    model.set_attn_implementation("eager")  # plain products, which the counter sees
    with FlopCounterMode(display=False) as counter:
        model(**inputs).loss.backward()
    return counter.get_total_flops()


N, M = 24, 10
IDS = torch.arange(2, 2 + N)[None]


def test_llama_operations_are_those_of_a_real_pass() -> None:
    shape = sft.MODELS["tiny"]
    half = 6 * shape.layers * shape.heads * shape.head_width * N**2  # the counter sees both halves of attention
    expected = shape.operations(np.array([N]), np.array([N]))[0] + half
    assert counted(shape.build(), input_ids=IDS, labels=IDS) == pytest.approx(expected, rel=1e-3)


def test_bert_operations_are_those_of_a_real_pass() -> None:
    shape = bert.MODELS["tiny"]
    ends = 6 * (shape.width**2 + 2 * shape.width)
    expected = shape.operations(np.array([N]), np.array([1]))[0] + ends
    assert counted(shape.build(), input_ids=IDS, labels=torch.tensor([1])) == pytest.approx(expected, rel=1e-3)


def test_t5_operations_are_those_of_a_real_pass() -> None:
    shape = t5.MODELS["tiny"]
    half = 6 * shape.layers * shape.heads * shape.head_width * M**2
    expected = shape.operations(np.array([N]), np.array([M]))[0] + half
    assert counted(shape.build(), input_ids=IDS, labels=IDS[:, :M]) == pytest.approx(expected, rel=1e-3)


def test_work_grows_with_tokens_and_with_their_square() -> None:
    shape = sft.MODELS["1.24b"]
    one, two = shape.operations(np.array([1000, 2000]), np.array([1000, 2000]))
    attention = 6 * 16 * 2048 * 1000.0**2
    assert two - 2 * one == pytest.approx(2 * attention)


# ---- samples ------------------------------------------------------------------------------------------------------


def test_samples_are_the_same_in_every_process_and_as_long_as_said() -> None:
    first, second = (lengths.Texts("causal", 64, lengths.SFT, 1000, pool=4096, prompt_masked=True) for _ in range(2))
    assert 16 <= first.lengths.min() and first.lengths.max() <= 2048
    for i in range(64):
        assert np.array_equal(first[i]["input_ids"], second[i]["input_ids"])
        assert len(first[i]["input_ids"]) == first.lengths[i]
        assert (first[i]["labels"] != -100).sum() == first.supervised(np.array([i]))[0]


def test_ids_follow_zipf() -> None:
    ids = lengths.zipf_ids(1000, 100_000, seed=0)
    counts = np.sort(np.bincount(ids, minlength=1000))[::-1]
    assert ids.min() >= lengths.FIRST_ID and ids.max() < 1000
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.2)


def test_padding_keeps_every_token_and_marks_the_rest() -> None:
    texts = lengths.Texts("pair", 8, lengths.SOURCE, 100, targets=lengths.TARGET, pool=4096)
    batch = lengths.pad([texts[i] for i in range(8)])
    assert batch["attention_mask"].sum(1).tolist() == texts.lengths.tolist()
    assert (batch["labels"] != -100).sum(1).tolist() == texts.target_lengths.tolist()
    assert batch["input_ids"].numel() + batch["labels"].numel() == texts.computed(np.arange(8), 8)
    assert torch.equal(batch["input_ids"][3, : texts.lengths[3]], torch.from_numpy(texts[3]["input_ids"]))


def test_the_order_goes_on_over_epochs() -> None:
    order = lengths.consumed(10, 25, seed=42)
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert list(order[:10]) != list(order[10:20]) and len(order) == 25


# ---- the watch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warmup", "updates", "cycle", "stops_at"), [(3, 4, 1, 7), (0, 1, 1, 1), (2, 5, 4, 10), (1, 1, 3, 4)]
)
def test_the_watch_stops_after_warm_up_and_whole_cycles(warmup: int, updates: int, cycle: int, stops_at: int) -> None:
    seen = watch.Watch("cpu", warmup=warmup, updates=updates, cycle=cycle)
    seen.begin()
    while not seen.update_done():
        assert seen.done < 50
    assert (seen.done, seen.opened) == (stops_at, warmup)
    assert seen.elapsed > 0 and seen.first > seen.begun


def test_a_watch_reads_the_clock_it_is_given() -> None:
    ticks = iter(range(100))
    seen = watch.Watch("cpu", warmup=1, updates=3, clock=lambda: float(next(ticks)))
    seen.begin()
    while not seen.update_done():
        pass
    assert seen.begun == 0.0 and all(float(time).is_integer() for _, time in seen.borders) and seen.elapsed >= 3.0


# ---- a whole benchmark --------------------------------------------------------------------------------------------


@pytest.mark.xdist_group("overhead")  # beside nothing that measures
@pytest.mark.parametrize(
    "arms", [("ours",), pytest.param(("ours", "transformers"), marks=pytest.mark.grid)], ids=["ours", "both"]
)
def test_the_layout_benchmark_runs_and_agrees_with_transformers(arms: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "layouts.json"
    options = ["--arms", *arms, "--cases", "bert-8x4", "--rounds", "1", "--updates", "1"]
    command = [sys.executable, BENCHMARKS / "layouts.py", *options, "--json", file]
    done = subprocess.run(command, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    results = written["cases"]["bert-8x4"]
    assert {arm: result["status"] for arm, result in results.items()} == dict.fromkeys(arms, "ok"), done.stdout
    assert results["ours"]["samples_per_s"] > 0
    if "transformers" in arms:
        assert results["ours"]["curve"]["against"] == "transformers" and results["ours"]["times"]["transformers"] > 0
    assert written["versions"]["torch"] and written["date"]


def test_generation_gives_the_same_tokens_in_both_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    file, options = tmp_path / "found.json", ["--tiny", "--models", "causal", "--batches", "12"]
    monkeypatch.setattr(sys, "argv", ["generation", *options, "--json", str(file)])
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # other tests restore the path to what it was before this module
    assert import_module("generation").main() == 0
    found = json.loads(file.read_text())["results"]["causal"]
    assert found["ours"]["tokens"] == found["transformers"]["tokens"] > 96
    assert found["ours"]["rows_with_other_tokens"] == 0
