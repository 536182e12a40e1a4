"""The argument `debug`: the first infinite value of a model is shown, and XLA's counters are printed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from loopwright import DebugUnderflowOverflow, ModelError, Trainer, TrainingArguments
from loopwright.pt.device_traits import KINDS, Kind


class Growing(nn.Module):
    """Its second layer overflows from the third forward pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)
        self.calls = 0

    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        self.calls += 1
        factor = 1e30 if self.calls > 2 else 1.0
        y = self.second(self.first(x) * factor * factor)
        return {"loss": (y - labels).square().mean(), "logits": y}


def data() -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(2, generator=g), "labels": torch.randn(1, generator=g)} for _ in range(8)]


def trainer(model: nn.Module, **options: Any) -> Trainer:
    options = {"per_device_train_batch_size": 2, "max_steps": 4, "save_strategy": "no", "use_cpu": True,
               "disable_tqdm": True, "report_to": [], **options}  # fmt: skip
    return Trainer(model, TrainingArguments("run", **options), train_dataset=data(), eval_dataset=data())


def test_an_overflow_stops_training_and_is_shown(capsys: Any) -> None:
    made = trainer(Growing(), debug="underflow_overflow")
    with pytest.raises(ModelError, match="debug: second has an infinite or NaN value in forward pass 2"):
        made.train()
    printed = capsys.readouterr().out
    assert "input[0] has infs" in printed and "Detected inf/nan during batch_number=2" in printed
    assert printed.index("Starting batch number=1") < printed.rindex("second Linear")
    assert made.state.global_step == 2
    assert not any(module._forward_hooks for module in made.model.modules())  # removed after training


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_without_overflow_is_the_run_without_the_check(accumulation: int) -> None:
    results = []
    for debug in ("", "underflow_overflow"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 1))
        model.forward = lambda x, labels, m=model: {"loss": (m[0](x) - labels).square().mean()}
        made = trainer(model, debug=debug, speed="off", gradient_accumulation_steps=accumulation)
        made.train()
        results.append([p.detach().clone() for p in made.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))


@pytest.mark.parametrize("options", [{}, {"max_frames_to_save": 3}, {"trace_batch_nums": [1]}], ids=str)
def test_the_report_is_that_of_transformers(options: dict[str, Any], capsys: Any) -> None:
    transformers = pytest.importorskip("transformers.debug_utils")
    texts = []
    for cls in (transformers.DebugUnderflowOverflow, DebugUnderflowOverflow):
        model = chain()
        cls(model, **options)
        model(torch.ones(1, 2))
        model(torch.ones(1, 2) * 2)
        if "trace_batch_nums" not in options:
            with torch.no_grad():
                model[1][0].weight.fill_(1e38)
            with pytest.raises(ValueError, match="inf"):
                model(torch.full((1, 2), 1e30))
        texts.append(capsys.readouterr().out.split())
    assert texts[0] == texts[1] and texts[0]


def test_abort_after_batch_num_stops() -> None:
    model = chain()
    DebugUnderflowOverflow(model, trace_batch_nums=[], abort_after_batch_num=0)
    with pytest.raises(ValueError, match="abort_after_batch_num=0"):
        model(torch.ones(1, 2))


def test_odd_values_of_modules_are_shown_or_named(capsys: Any) -> None:
    class Odd(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return {"a": (None, "text", [args[0]]), "b": kwargs["mask"]}

    model = Odd()
    DebugUnderflowOverflow(model, trace_batch_nums=[0])
    small = torch.ones(2).to(torch.float8_e4m3fn)
    model(torch.zeros(0), torch.tensor([True]), torch.ones(2, dtype=torch.complex64), small, mask=torch.tensor([3]))
    printed = capsys.readouterr().out
    for line in ("no values input[0]", "1.00e+00 1.00e+00 input[1]", "1.00e+00 1.00e+00 input[3]",
                 "3.00e+00 3.00e+00 input[mask]", "None output[a][0]", "not a tensor output[a][1]",
                 "no values output[a][2][0]"):  # fmt: skip
        assert line in printed


def test_the_counters_of_a_device_are_printed_after_an_evaluation(monkeypatch: Any, capsys: Any, caplog: Any) -> None:
    trainer(Growing(), debug="tpu_metrics_debug").evaluate()
    assert "debug='tpu_metrics_debug' has no effect on cpu" in caplog.text
    monkeypatch.setitem(KINDS, "cpu", Kind(metrics=lambda: "Metric: CompileTime"))
    trainer(Growing(), debug="tpu_metrics_debug").evaluate()
    assert capsys.readouterr().out.count("Metric: CompileTime") == 1
