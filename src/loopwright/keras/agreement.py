"""What the workers of a Keras run must have in common: data, model, optimizer and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..core.distributed.agreement import Agreement, Description
from ..core.distributed.description import described, name_of
from .hooks import KerasHooks
from .strategy import as_host


class KerasAgreement(Agreement):
    """Compares the workers of a run."""

    trainer: KerasHooks
    packages = ("loopwright", "keras", "tensorflow", "jax", "numpy")

    def data(self) -> Description:
        sets = {"train_dataset": self.trainer.train_dataset, "eval_dataset": self.trainer.eval_dataset}
        return Description({key: text for name, each in sets.items() for key, text in _described_data(name, each)})

    def plan(self) -> dict[str, str]:
        shapes = {
            f"trainable variable {index}": f"{each.dtype} {tuple(each.shape)}"
            for index, each in enumerate(self.model.trainable_variables)
        }
        return {**super().plan(), "model": name_of(type(self.model)), **shapes}

    def optimizer(self) -> dict[str, str]:
        optimizer, schedule = self.trainer.optimizer, self.trainer.lr_scheduler
        found = {"optimizer": name_of(type(optimizer)), "scheduler": name_of(type(schedule))}
        for key, value in optimizer.get_config().items():
            if key != "name":
                found[f"{key} of the optimizer"] = described(value)
        for key, value in getattr(schedule, "__dict__", {}).items():
            if not key.startswith("_"):
                found[f"scheduler.{key}"] = described(value)
        return found

    def weights(self) -> dict[str, str]:
        """Hashes of the trainable variables, by number: Keras' names depend on what else a worker has built."""
        contents = [as_host(each).tobytes() for each in self.model.trainable_variables]
        return {
            f"trainable weight {index}": f"of hash {hashlib.sha256(each).hexdigest()[:16]}"
            for index, each in enumerate(contents)
        }


def _described_data(name: str, dataset: Any) -> Iterator[tuple[str, str]]:
    yield name, "missing" if dataset is None else name_of(type(dataset))
    if isinstance(dataset, Mapping):
        yield f"{name}.keys()", described(sorted(map(str, dataset)))
    elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        yield f"len({name})", str(len(dataset))
