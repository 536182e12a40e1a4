"""The everyday benchmark: tiny runs of its tasks, what it counts, what it keeps, and what a profile says."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # scripts, not a package: they import each other by name

NAMES = ("arms", "compiled_loop", "everyday", "kernels", "lengths", "products", "sft", "update_times", "workloads")
arms, compiled_loop, everyday, kernels, lengths, products, sft, update_times, workloads = map(import_module, NAMES)

ALWAYS = "mlp"
OTHERS = [name for name in everyday.PLANS if name != ALWAYS]


def run(folder: Path, *words: str, timeout: int = 400) -> dict[str, Any]:
    """What the command wrote."""
    file = folder / "everyday.json"
    command = [sys.executable, BENCHMARKS / "everyday.py", *words, "--tiny", "--to", file]
    done = subprocess.run(command, timeout=timeout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {**json.loads(file.read_text()), "printed": done.stdout}


def check(content: dict[str, Any], task: str, arms: tuple[str, ...] = everyday.ARMS) -> None:
    results = content["tasks"][task]["results"]
    assert {arm: result["status"] for arm, result in results.items()} == dict.fromkeys(arms, "ok"), results
    assert all(result["ms_per_update"] > 0 and result["first_update_s"] > 0 for result in results.values())
    timed = [result["updates"] for result in results.values()]
    assert timed == [timed[0]] * len(timed), "every arm is timed on the same updates"
    assert results["loopwright"]["curve"]["against"] == "transformers"


@pytest.mark.parametrize(
    "arms", [("loopwright", "transformers"), pytest.param(everyday.ARMS, marks=pytest.mark.grid)], ids=["two", "all"]
)
def test_arms_of_a_task_train_the_same(arms: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    content = run(tmp_path, ALWAYS, "--arms", *arms)
    check(content, ALWAYS, arms)
    known = content["tasks"][ALWAYS]
    assert known["described"]["versions"]["torch"] and len(known["targets"]) == 2
    again = run(tmp_path, ALWAYS, "--arms", *arms)  # everything is in the file
    assert again["tasks"] == content["tasks"] and "..." not in again["printed"]


def test_arms_that_get_ready_beside_each_other_train_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    arms = ("loopwright", "transformers", "hand-eager")
    words = ("--arms", *arms, "--skip", f"{ALWAYS}:hand-eager", "--beside", "2", "--preload")
    results = run(tmp_path, ALWAYS, *words)["tasks"][ALWAYS]["results"]
    assert {arm: result["status"] for arm, result in results.items()} == dict.fromkeys(arms[:2], "ok"), results
    assert all(result["ms_per_update"] > 0 and result["ready_s"] is None for result in results.values())


def test_other_arms_are_stopped_while_one_is_timed(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)

    def state() -> str:
        return Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0]

    try:
        shared, turns = update_times.Turns(str(tmp_path)), update_times.Turns(str(tmp_path))
        shared.enter(other.pid)
        turns.begin()
        with shared.between() as is_free:
            assert state() == "T" and not is_free
        turns.end()
        with shared.between() as is_free:
            assert state() != "T" and is_free
    finally:
        other.kill()
        other.wait()


@pytest.mark.grid
@pytest.mark.parametrize("task", OTHERS)
def test_all_arms_of_every_other_task_train_the_same(task: str, tmp_path: Path) -> None:
    for package in ("transformers", *["peft"] * (task == "lora")):
        pytest.importorskip(package)
    check(run(tmp_path, task), task)


@pytest.mark.grid
def test_a_profile_of_an_arm_lists_its_operators(tmp_path: Path) -> None:
    content = run(tmp_path, ALWAYS, "--arms", "hand-eager", "--profile")
    found = content["tasks"][ALWAYS]["profiles"]["hand-eager"]["profile"]
    assert found["kernels"] > 0 and "aten::addmm" in found["top"] and "aten::addmm" in content["printed"]


def test_every_task_has_a_plan_and_a_workload() -> None:
    assert [*everyday.PLANS] == [*workloads.WORKLOADS]


def test_the_most_important_arms_of_all_tasks_run_first() -> None:
    options = everyday.parser().parse_args(["gpt2", "vit", "--arms", "loopwright", "hand"])
    pairs = [("gpt2", "loopwright"), ("vit", "loopwright"), ("gpt2", "hand"), ("vit", "hand")]
    assert list(everyday.order(options)) == pairs
    options.by_task = True
    assert list(everyday.order(options)) == [pairs[0], pairs[2], pairs[1], pairs[3]]


def test_a_spent_budget_starts_no_arm_and_keeps_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "everyday.json"
    before = {"benchmark": "everyday", "tasks": {"vit": {"about": "", "results": {"hand": {"status": "ok"}}}}}
    file.write_text(json.dumps(before))
    options = everyday.parser().parse_args(["vit", "--to", str(file), "--budget", "0"])
    assert everyday.measure(options)["tasks"]["vit"]["results"] == {"hand": {"status": "ok"}}
    assert json.loads(file.read_text()) == before


def test_an_arm_whose_losses_differ_is_void_and_counts_for_no_target() -> None:
    def ran(loss: float) -> dict[str, Any]:
        return {"status": "ok", "losses": [loss] * 4, "rate": 1.0, "described": {"date": "today"}}

    known: dict[str, Any] = {"results": {"transformers": ran(2.0), "hand": ran(2.01), "loopwright": ran(2.1)}}
    options = everyday.parser().parse_args(["gpt2"])
    everyday.conclude("gpt2", known, options)
    status = {arm: result["status"] for arm, result in known["results"].items()}
    assert status == {"transformers": "ok", "hand": "ok", "loopwright": "void"}
    assert [verdict["met"] for verdict in known["targets"]] == [None, None, None]
    assert known["described"] == {"date": "today"}


# ---- what is timed ------------------------------------------------------------------------------------------------


def test_as_many_updates_are_timed_as_were_asked_for() -> None:
    watch = update_times.UpdateTimes("cpu", warmup=3, updates=5, seconds=100.0)
    watch.begin()
    while not watch.update_done():
        assert watch.done < 50
    assert (watch.done, watch.opened, len(watch.milliseconds())) == (8, 3, 5)


def test_a_window_that_lasts_too_long_ends_after_a_few_updates() -> None:
    watch = update_times.UpdateTimes("cpu", warmup=1, updates=500, seconds=0.0)
    watch.begin()
    while not watch.update_done():
        assert watch.done < 50
    assert watch.done == 1 + update_times.FEWEST


# ---- what is counted ----------------------------------------------------------------------------------------------

PLAIN = update_times.UpdateTimes("cpu")


def real_operations(task: Any, count: int) -> int:
    """Forward and backward of the first samples, one by one, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    model = task.model()
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        for i in range(count):
            model(**task.collate([task.data[i]])).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("name", "share"), [("gpt2", 0.05), ("whisper", 0.05), ("vit", 0.05)])
def test_operations_are_those_of_a_real_pass(name: str, share: float) -> None:
    pytest.importorskip("transformers")
    task = workloads.WORKLOADS[name](PLAIN, True)
    indices = np.arange(2)
    targets = task.data.supervised(indices)
    expected = task.operations(task.data.lengths[indices], targets).sum()
    if name == "gpt2":  # the counter sees both halves of causal attention
        expected += 2 * 6 * 2 * 64 * 64**2
    if name == "whisper":
        expected += 6 * 2 * 64 * (targets.astype(float) ** 2).sum()
    assert real_operations(task, 2) == pytest.approx(expected, rel=share)


def test_samples_are_the_same_in_every_process() -> None:
    first, second = (workloads.made_samples.images(8, 16) for _ in range(2))
    assert np.array_equal(first[5]["pixel_values"], second[5]["pixel_values"])
    assert not np.array_equal(first[5]["pixel_values"], first[6]["pixel_values"])


def test_the_hand_written_loop_pads_to_few_lengths() -> None:
    texts = lengths.Texts("pair", 8, lengths.SOURCE, 100, targets=lengths.TARGET, pool=4096)
    samples = [texts[i] for i in range(8)]
    plain, wide = lengths.pad(samples), compiled_loop.Widened(lengths.pad, 64)(samples)
    assert all(values.shape[1] % 64 == 0 for values in wide.values())
    assert (wide["labels"] != -100).sum() == (plain["labels"] != -100).sum()
    assert torch.equal(wide["attention_mask"].sum(1), plain["attention_mask"].sum(1))


# ---- the profile --------------------------------------------------------------------------------------------------


def kernel(name: str, start: float, length: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length}


def test_a_profile_counts_idle_time_launches_and_kinds() -> None:
    trace = [
        {"ph": "M", "name": "process_name"},
        kernel("sm90_xmma_gemm_bf16", 0, 4000),
        kernel("triton_poi_fused__to_copy_3", 3000, 2000),  # overlaps the first
        kernel("triton_per_fused_native_layer_norm_1", 6000, 1000),
        kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 8000, 2000),
        kernel("cudaLaunchKernel", 0, 5, "cuda_runtime"),
        kernel("cuLaunchKernelEx", 9, 5, "cuda_driver"),
        kernel("cudaGraphLaunch", 20, 5, "cuda_runtime"),
        kernel("cudaDeviceSynchronize", 30, 5, "cuda_runtime"),
    ]
    found = kernels.summarized(trace, 2)
    assert found["idle_share"] == pytest.approx(0.2) and found["ms_per_update"] == pytest.approx(5.0)
    assert (found["kernels"], found["launches"], found["graph_launches"]) == (2, 1, 0.5)
    assert {kind: row["ms"] for kind, row in found["kinds"].items()} == {
        "matmul": 2.0, "copies and casts": 1.0, "optimizer": 1.0, "compiled": 0.5,
    }  # fmt: skip
    assert found["ms_in_long_gaps"] == pytest.approx(1.0) and found["ms_in_short_gaps"] == 0
    assert [gap["before"][:12] for gap in found["gaps"]] == ["triton_per_f", "multi_tensor"]
    assert "idle 20.0%" in kernels.text(found) and "gap 1.000 at 6.0" in kernels.text(found)


# ---- products -------------------------------------------------------------------------------------------------------


def test_the_products_of_an_update_have_its_operations() -> None:
    layers = products.TASKS["sft-64"]
    shape = sft.MODELS["1.24b"]
    tokens = np.full(1, 20_867)
    attention = shape.operations(tokens, tokens)[0] - 6.0 * (shape.body + shape.head) * tokens[0]
    assert sum(each.operations for each in layers) == pytest.approx(shape.operations(tokens, tokens)[0] - attention)
    for each in (*layers, *products.TASKS["lora"], *products.TASKS["whisper"]):
        assert each.joined().operations == each.operations


def test_products_are_computed_apart_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, ...]] = []
    product = torch.mm

    def counted(a: Any, b: Any) -> Any:
        found.append((*a.shape, b.shape[1]))
        return product(a, b)

    monkeypatch.setattr(torch, "mm", counted)
    layers = products.Layers(rows=6, inputs=4, outputs=(3, 2), times=1)
    products.Products([layers], "cpu").run()
    assert found == [(6, 4, 3), (6, 3, 4), (3, 6, 4), (6, 4, 2), (2, 6, 4)]  # the second input gradient is added
    found.clear()
    products.Products([products.Layers(6, 4, (3,), 2, frozen=True).joined()], "cpu").run()
    assert found == [(6, 4, 3), (6, 3, 4)] * 2
