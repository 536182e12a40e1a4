"""How many graphs a run compiles: each situation has a length of its own, so that none profits from another."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from loopwright.xla import runtime
from tests.neuron.weighted import WeightedLossTrainer
from tests.xla.runs import trainer

FIRST_LENGTH = 41
EVERYTHING = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_steps": 1}


def mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss as users write it for `compute_loss_func`, which is told how many targets there are."""
    logits = outputs["logits"]
    total = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def right(prediction: Any) -> dict[str, float]:
    return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


SITUATIONS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "llama": (2, "llama", {}),
    "bert": (2, "bert", {}),
    "bert with metrics": (2, "bert", {"compute_metrics": right}),
    "a module of one's own": (2, "own", {}),
    "a module with dropout and metrics": (2, "dropped", {"compute_metrics": right}),
    "a module without clipping": (2, "own", {"max_grad_norm": 0.0}),
    "sgd": (3, "own", {"optim": "sgd"}),
    "syncfree": (3, "own", {"optim": "adamw_torch_xla"}),
    "warming up": (3, "own", {"warmup_steps": 2}),
    "a loss of one's own": (3, "own", {"compute_loss_func": mean}),
    "the weighted loss": (3, "bert", {"cls": WeightedLossTrainer}),
    "non-finite updates": (3, "own", {"on_nonfinite": "skip"}),
}
"""How many graphs at most: a step of training, one of evaluation, and in some cases one more."""


@pytest.mark.parametrize("situation", SITUATIONS)
def test_training_evaluating_and_saving_need_few_graphs(situation: str, tmp_path: Any) -> None:
    allowed, name, options = SITUATIONS[situation]
    length = FIRST_LENGTH + list(SITUATIONS).index(situation)
    run = trainer(name, tmp_path, static_lengths=[length], **EVERYTHING, **options)
    before = runtime.graphs()
    run.train()
    graphs = runtime.graphs() - before
    assert 2 <= graphs <= allowed <= 3
    assert len([log for log in run.state.log_history if "eval_loss" in log]) == 2
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    run.train(resume_from_checkpoint=True)
    assert runtime.graphs() - before == graphs
