"""Models compiled as one region: the run is the run without, and what differs is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import loopwright.speed.planner.choice as choosing
import loopwright.speed.planner.cost as cost
import loopwright.speed.planner.decision as decision
import loopwright.speed.planner.planner as planning
import loopwright.speed.planner.regions as regions
from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.pt.acceleration import Acceleration
from loopwright.pt.model.options import compile_key
from loopwright.speed.attention.needless_masks import without_needless_masks
from loopwright.speed.compile.cache import cache_file
from loopwright.speed.compile.region import BLOCKS, MODEL
from loopwright.speed.cuda_graphs.contexts import autocast_without_cache
from loopwright.speed.planner.regions import REGION
from tests.speed.architectures import build
from tests.speed.test_graphing import Recorder

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Regions on a CPU, without inductor, however short the run and however fast they are."""
    torch._dynamo.reset()
    monkeypatch.setattr(regions, "COMPILING_DEVICES", ("cpu",))
    monkeypatch.setattr(regions, "FASTER", 1e9)
    monkeypatch.setattr(cost, "MARGIN", 0.0)
    monkeypatch.setattr(Acceleration, "region_backend", "aot_eager")
    yield
    torch._dynamo.reset()


def gpt2(vocabulary: int = 50) -> Any:
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=vocabulary, n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
        )
    )


def texts(count: int = 64, *, mask: bool = True) -> list[dict[str, Tensor]]:
    made = torch.randint(0, 50, (count, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row, **({"attention_mask": torch.ones_like(row)} if mask else {})}
            for row in made]  # fmt: skip


class Net(nn.Module):
    """A model of images with a loss of its own."""

    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        self.between = nn.BatchNorm2d(4) if batch_norm else nn.Dropout(0.3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.between(torch.relu(self.first(pixel_values)))
        logits = self.last(x.mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def vit() -> Any:
    torch.manual_seed(5)
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def images(count: int = 64) -> list[dict[str, Tensor]]:
    made = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return [{"pixel_values": image, "labels": torch.tensor(i % 5)} for i, image in enumerate(made)]


def train(model: nn.Module, data: Any, folder: Any, *, resume: Any = None, callbacks: Any = (), **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, **options,
    }  # fmt: skip
    trainer = Trainer(
        model, TrainingArguments(str(folder), **arguments), train_dataset=data, callbacks=list(callbacks)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def choice(trainer: Any) -> Any:
    return next(each for each in trainer._loopwright.run.speed.plan.choices if each.name == REGION)


def equal(a: Any, b: Any) -> bool:
    mine, theirs = a.model.state_dict(), b.model.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


# ---- the same run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "data"),
    [(gpt2, texts()), pytest.param(gpt2, texts(mask=False), marks=pytest.mark.grid), (Net, images()),
     (lambda: Net(batch_norm=True), images()),
     pytest.param(lambda: build("bert", "class", layers=2), None, marks=pytest.mark.grid)],
    ids=["gpt2", "gpt2 without mask", "images", "batch norm", "bert"],
)  # fmt: skip
def test_a_run_with_a_region_is_the_run_without(make: Any, data: Any, tmp_path: Any) -> None:
    """With dropout: the region draws the numbers that the model draws."""
    if data is None:
        data = [{"input_ids": row["input_ids"] % 20, "labels": torch.tensor(i % 2)} for i, row in enumerate(texts())]
    plain = train(make(), data, tmp_path / "a", speed="off", gradient_accumulation_steps=2)
    fast = train(make(), data, tmp_path / "b", gradient_accumulation_steps=2)
    assert fast._loopwright.run.speed.plan.region == (MODEL if isinstance(fast.model, Net) else BLOCKS), choice(fast)
    assert losses(fast) == pytest.approx(losses(plain), rel=1e-5)
    assert fast.compiled.figures()["compilations"] == 1, fast.compiled.figures()["reasons"]
    assert not any(call.others for call in fast.compiled.calls)
    assert all(call.times >= 2 * 4 for call in fast.compiled.calls), "from the third update on"


def test_with_the_fused_loss_blocks_are_compiled_for_their_shapes(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(choosing, "LARGE_VOCABULARY", 10)
    monkeypatch.setitem(decision.WORTH_SECONDS, "cpu", 0.0)
    plain = train(gpt2(), texts(), tmp_path / "a", speed="off")
    fast = train(gpt2(), texts(), tmp_path / "b", speed="max")
    plan = fast._loopwright.run.speed.plan
    assert plan.linear_loss and plan.region == BLOCKS, plan.lines()
    assert losses(fast) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.parametrize("make", [Net, "vit"])
def test_graphs_replay_compiled_code(make: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """Images, whose cost does not follow from their shapes: it is counted."""
    class WithoutCache(Recorder):
        """A replay as a graph runs: without autocast's cache, on which compiled code depends."""

        def __call__(self, function: Any) -> Any:
            def run() -> Tensor:
                with autocast_without_cache():
                    return function()

            return super().__call__(run)

    recorder = WithoutCache()
    monkeypatch.setattr(Acceleration, "graph_recorder", recorder)
    monkeypatch.setattr(planning, "LOOKS", 3)
    monkeypatch.setitem(decision.WORTH_SECONDS, "cpu", 0.0)
    monkeypatch.setitem(cost.HOST_SECONDS, "cpu", 1.0)
    make = vit if make == "vit" else make
    plain = train(make(), images(), tmp_path / "a", speed="off", bf16=True)
    fast = train(make(), images(), tmp_path / "b", bf16=True)
    plan = fast._loopwright.run.speed.plan
    assert plan.graphed and plan.region, plan.lines()
    assert recorder.recorded == 1 and recorder.replays == 4 + 2
    assert losses(fast) == pytest.approx(losses(plain), rel=1e-3)
    assert fast.compiled.figures()["compilations"] == 1, fast.compiled.figures()["reasons"]


def test_a_resumed_run_makes_the_same_choice_to_the_last_bit(tmp_path: Any) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = train(Net(), images(), tmp_path, **options)
    assert whole._loopwright.run.speed.plan.region == MODEL
    for start in (2, 4):  # before and after the choice
        torch._dynamo.reset()
        rest = train(Net(), images(), tmp_path, resume=str(tmp_path / f"checkpoint-{start}"), **options)
        assert rest._loopwright.run.speed.plan.region == MODEL and equal(whole, rest)


def test_a_resumed_run_does_not_measure_again(tmp_path: Any, monkeypatch: Any) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    train(Net(), images(), tmp_path, **options)
    monkeypatch.setattr(regions, "FASTER", 0.0)  # a measurement would refuse it
    rest = train(Net(), images(), tmp_path, resume=str(tmp_path / "checkpoint-4"), **options)
    assert rest._loopwright.run.speed.plan.region == MODEL


def test_the_last_batch_of_an_epoch_and_evaluation_run_as_written(tmp_path: Any) -> None:
    data = texts(22)
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 8, "speed": "auto"}
    trainer = Trainer(
        gpt2(),
        TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, report_to="none", use_cpu=True, disable_tqdm=True, **options
        ),
        train_dataset=data, eval_dataset=data[:6],
    )  # fmt: skip
    trainer.train()
    assert all(call.others == 1 for call in trainer.compiled.calls) and trainer.compiled.figures()["compilations"] == 1


# ---- decisions ------------------------------------------------------------------------------------------------------


def test_a_region_that_is_not_faster_is_not_used(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(regions, "FASTER", 0.0)
    trainer = train(Net(), images(), tmp_path)
    assert not choice(trainer).is_on and "it is not faster" in choice(trainer).reason
    assert trainer.model._compiled_call_impl is None


def test_full_determinism_asks_no_clock(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(regions, "FASTER", 0.0)
    trainer = train(Net(), images(), tmp_path, full_determinism=True)
    assert choice(trainer).is_on and "ms_compiled" not in choice(trainer).numbers
    torch.use_deterministic_algorithms(False)


def test_short_runs_and_many_shapes_are_not_compiled(tmp_path: Any, monkeypatch: Any) -> None:
    data = [{"input_ids": row["input_ids"][: 5 + i // 4], "labels": row["labels"][: 5 + i // 4]}
            for i, row in enumerate(texts(24))]  # fmt: skip
    many = train(gpt2(), data, tmp_path / "a", speed="auto", train_sampling_strategy="sequential")
    assert "many shapes" in choice(many).reason
    monkeypatch.setattr(cost, "MARGIN", 1e9)
    short = train(gpt2(), texts(), tmp_path / "b")
    assert "too short" in choice(short).reason and short.compiled is None


# ---- what is refused ------------------------------------------------------------------------------------------------


def wrong(what: str) -> Any:
    """A compiler whose code is wrong in one place."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def spoiled(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            outputs = list(graph(*args))
            places = [i for i, out in enumerate(outputs) if isinstance(out, Tensor) and out.is_floating_point()]
            outputs[places[0]] = outputs[places[0]] * 1.01
            return outputs

        return make_boxed_func(run)

    def right(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph)

    compilers = (spoiled, right) if what == "forward" else (right, spoiled)
    return aot_autograd(fw_compiler=compilers[0], bw_compiler=compilers[1])


@pytest.mark.parametrize(("what", "word"), [("forward", "differs"), ("backward", "gradient")])
@pytest.mark.parametrize("kind", [pytest.param("texts", marks=pytest.mark.grid), "images"])
def test_a_wrong_kernel_is_refused(what: str, word: str, kind: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Acceleration, "region_backend", staticmethod(wrong(what)))
    make, data = (gpt2, texts()) if kind == "texts" else (Net, images())
    plain = train(make(), data, tmp_path / "a", speed="off")
    trainer = train(make(), data, tmp_path / "b")
    assert not choice(trainer).is_on and word in choice(trainer).reason
    assert equal(trainer, plain) and trainer.model._compiled_call_impl is None


class Breaking(Net):
    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if float(pixel_values.sum()) > 1e9:  # reads a value: no region
            labels = labels + 1
        return super().forward(pixel_values, labels)


def test_a_model_that_is_not_one_graph_is_refused_with_the_reason(tmp_path: Any) -> None:
    trainer = train(Breaking(), images(), tmp_path)
    assert not choice(trainer).is_on and "data-dependent" in choice(trainer).reason


def test_a_hook_registered_during_training_is_called(tmp_path: Any) -> None:
    seen: list[int] = []

    class Hooks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 4:
                model.last.register_forward_hook(lambda *_: seen.append(state.global_step))

    trainer = train(Net(), images(), tmp_path, callbacks=[Hooks()])
    assert len(seen) >= 2 and trainer.model._compiled_call_impl is None


def test_a_region_that_later_differs_is_switched_off(tmp_path: Any, monkeypatch: Any, caplog: Any) -> None:
    factor = [1.0]

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            outputs = graph(*args)
            return [out * factor[0] if i == 0 else out for i, out in enumerate(outputs)]

        return run

    class Spoils(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            factor[0] = 1.5 if state.global_step == 6 else factor[0]

    monkeypatch.setattr(Acceleration, "region_backend", staticmethod(backend))
    trainer = train(Net(), images(), tmp_path, max_steps=14, callbacks=[Spoils()])
    assert not choice(trainer).is_on and trainer.model._compiled_call_impl is None
    assert "compiled code is switched off" in caplog.text


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_causal_attention_gets_no_mask_while_it_is_traced() -> None:
    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.kwargs) for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
        return graph

    model, row = gpt2(), texts()[0]["input_ids"][None]
    with without_needless_masks():
        torch.compile(model, backend=backend, fullgraph=True)(input_ids=row, labels=row)
    assert len(seen) == 2 and all("'attn_mask': None" in each and "'is_causal': True" in each for each in seen)


def test_attention_to_all_patches_gets_no_mask_while_it_is_traced() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.kwargs) for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
        return graph

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **small))
    with without_needless_masks():
        torch.compile(model, backend=backend)(pixel_values=torch.ones(1, 3, 16, 16))
    assert len(seen) == 2 and all("'attn_mask': None" in each for each in seen)


def test_masks_that_mask_something_are_made() -> None:
    import transformers.masking_utils as masking

    before = masking._ignore_causal_mask_sdpa, masking._ignore_bidirectional_mask_sdpa
    padding = torch.tensor([[True, False]])
    with without_needless_masks():
        causal, all_seen = masking._ignore_causal_mask_sdpa, masking._ignore_bidirectional_mask_sdpa
        assert causal(None, 4, 4, 0, 0, None) and causal(None, 4, 4, 0, 0, 5) and all_seen(None, 4, None)
        assert not causal(None, 4, 4, 0, 0, 3) and not all_seen(None, 4, 3), "a window"
        assert not causal(padding, 2, 2, 0, 0, None) and not all_seen(padding, 2, None), "padding"
        assert not causal(None, 2, 4, 2, 0, None), "a cache"
    assert (masking._ignore_causal_mask_sdpa, masking._ignore_bidirectional_mask_sdpa) == before


def test_work_is_counted_not_timed() -> None:
    layer, device = nn.Linear(64, 32), torch.device("cpu")
    x = torch.ones(16, 64)

    def run() -> None:
        torch.autograd.grad(torch.relu(layer(x)).sum(), list(layer.parameters()))

    one, two = (cost.count_work(run, device) for _ in range(2))
    assert one == two and one.launches >= 4 and 0 < one.product_seconds < one.device_seconds
    assert one.seconds("cuda", compiled=True) < one.seconds("cuda", compiled=False)


@pytest.mark.parametrize(("seconds", "pays"), [(10, False), (100, True)])
def test_a_run_of_a_hundred_seconds_is_compiled(seconds: int, pays: bool, monkeypatch: Any) -> None:
    """The operators of GPT-2 124M, 16 x 1,024 tokens in bf16 on one H200: 76 ms as written, 44 as one region."""
    monkeypatch.setattr(cost, "MARGIN", 1.25)
    work = cost.Work(launches=1000, device_seconds=0.0757, product_seconds=0.0223, plain_bytes=1.33e11)
    times = seconds / work.seconds("cuda", compiled=False)
    assert cost.pays_to_compile(work, times=times, kind="cuda", warm=False) is pays
    assert cost.pays_to_compile(work, times=times / 3, kind="cuda", warm=True) is pays


def test_a_warm_cache_lets_a_short_run_compile(tmp_path: Any, monkeypatch: Any) -> None:
    """The estimate knows that the code is there; with full_determinism the choice does not depend on it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cost, "WARM", 0.0)
    monkeypatch.setattr(cost, "MARGIN", 1e9)
    cold = train(Net(), images(), tmp_path / "a")
    assert "too short" in choice(cold).reason
    path = cache_file(compile_key(cold.model, cold.args))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not believed, so it is compiled again")
    assert choice(train(Net(), images(), tmp_path / "b")).is_on
    fixed = train(Net(), images(), tmp_path / "c", full_determinism=True)
    assert "too short" in choice(fixed).reason
    torch.use_deterministic_algorithms(False)


@pytest.mark.grid
def test_with_inductor_and_its_cache(tmp_path: Any) -> None:
    """The real compiler, in two processes: the second finds the code of the first."""
    script = (
        "import sys, torch\n"
        "import loopwright.speed.planner.cost as cost, loopwright.speed.planner.regions as regions\n"
        "from tests.speed.test_regions import Net, choice, images, losses, train\n"
        "regions.COMPILING_DEVICES, regions.FASTER, cost.MARGIN = ('cpu',), 1e9, 0.0\n"
        "plain = train(Net(), images(), sys.argv[1] + '/a', speed='off')\n"
        "fast = train(Net(), images(), sys.argv[1] + '/b')\n"
        "assert choice(fast).is_on, choice(fast).reason\n"
        "assert all(abs(a - b) < 1e-5 for a, b in zip(losses(fast), losses(plain)))\n"
        "from torch._dynamo.utils import counters\n"
        "print('HITS', counters['inductor']['fxgraph_cache_hit'], counters['aot_autograd']['autograd_cache_hit'])\n"
    )
    found = []
    for time in ("first", "second"):
        environment = {
            **os.environ, "XDG_CACHE_HOME": str(tmp_path / "home"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / time),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / f"run-{time}")], env=environment, capture_output=True,
            text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found.append([int(word) for word in done.stdout.rpartition("HITS ")[2].split()])
    assert found[0] == [0, 0] and sum(found[1]) > 0
