"""After a run of run.py: Keras on JAX fed by a tf.data pipeline, and by the same samples in a list; losses of both."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.keras_on_jax import run


def losses(folder: str, data: Any) -> list[float]:
    from loopwright import JAXTrainer, JAXTrainingArguments
    from tests.contract.frameworks import QUIET, TensorFlow

    options = {**QUIET, "train_sampling_strategy": "sequential", "save_strategy": "no", "num_train_epochs": 2}
    trainer = JAXTrainer(TensorFlow().net(), JAXTrainingArguments(folder, **options), data)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main(folder: str, result: str) -> None:
    import tensorflow as tf

    from tests.contract.frameworks import rows

    samples = rows(10)
    columns = {name: [row[name] for row in samples] for name in samples[0]}
    found = [losses(folder, samples), losses(folder, tf.data.Dataset.from_tensor_slices(columns))]
    with open(result, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    run.main(*sys.argv[1:5])
    main(f"{sys.argv[1]}-pipeline", f"{sys.argv[2]}.pipeline")
