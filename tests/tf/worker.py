"""One worker process of a MultiWorkerMirroredStrategy run: trains, evaluates, writes its numbers down."""

from __future__ import annotations

import json
import os
import sys


def main(folder: str, result: str) -> None:
    from loopwright import TFTrainer, TFTrainingArguments
    from tests.contract.frameworks import QUIET, TensorFlow, rows

    args = TFTrainingArguments(
        folder, **{**QUIET, "per_device_train_batch_size": int(os.environ["SIZE"]), "max_steps": 5, "save_steps": 2,
                   "eval_strategy": "steps", "eval_steps": 5, "max_grad_norm": 0.5, "ddp_timeout": 60,
                   "gradient_accumulation_steps": 2, "per_device_eval_batch_size": int(os.environ["SIZE"]),
                   "load_best_model_at_end": True, "save_total_limit": 1,
                   "learning_rate": float(os.environ.get("RATE", "0.01"))},
    )  # fmt: skip
    with args.strategy.scope():
        model = TensorFlow().net()
    trainer = TFTrainer(
        model, args, rows(int(os.environ.get("ROWS", "14"))), rows(7), lambda each: {"n": len(each.predictions)}
    )
    resumed = os.environ.get("RESUME")
    trainer.train(resume_from_checkpoint=resumed or None)
    numbers = {
        "replicas": args.n_replicas,
        "world": [args.process_index, args.world_size],
        "loss": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "norm": [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row],
        "eval": [[row["eval_loss"], row["eval_n"]] for row in trainer.state.log_history if "eval_loss" in row],
        "predictions": trainer.predict(rows(5)).predictions.tolist(),
        "weights": [float(variable.numpy().sum()) for variable in model.trainable_variables],
    }
    with open(result, "w", encoding="utf-8") as file:
        json.dump(numbers, file)


if __name__ == "__main__":
    main(*sys.argv[1:3])
