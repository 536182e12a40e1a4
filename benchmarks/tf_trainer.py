"""TFTrainer beside `model.fit` and a hand-written tf.function loop: time per update, and what `fit` gets wrong.

    python benchmarks/tf_trainer.py [--models mlp transformer] [--rounds 5] [--only speed|promises] [--json FILE]

Times are of the arms in turn, round after round, in one process; the best round counts. What goes wrong is run live:
a restart in the middle of an epoch, clipping and accumulation on two replicas, two worker processes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from loopwright import TFTrainer, TFTrainingArguments, TrainerCallback

WARM, MEASURED = 20, 60
RATE = 1e-3


# ---- models and data ------------------------------------------------------------------------------------------------


def mlp() -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(10)])


def transformer() -> Any:
    keras.utils.set_random_seed(0)
    tokens = keras.Input((32,), dtype="int32")
    x = keras.layers.Embedding(256, 64)(tokens)
    for _ in range(2):
        seen = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 16)(seen, seen, use_causal_mask=True)
        hidden = keras.layers.Dense(128, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(64)(hidden)
    return keras.Model(tokens, keras.layers.Dense(256)(x))


def vectors(n: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(n, 32)).astype("f"), random.integers(0, 10, n).astype("i4")


def sentences(n: int) -> tuple[Any, Any]:
    ids = np.random.default_rng(0).integers(0, 256, (n, 33)).astype("i4")
    return ids[:, :-1], ids[:, 1:]


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], Any], int]] = {
    "mlp": (mlp, vectors, 32),
    "transformer": (transformer, sentences, 16),
}


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# ---- the arms -------------------------------------------------------------------------------------------------------


def with_fit(make: Any, data: Any, batch: int, *, jit_compile: Any = "auto") -> float:
    model = make()
    optimizer = keras.optimizers.AdamW(RATE, global_clipnorm=1.0)
    model.compile(loss=loss(), optimizer=optimizer, jit_compile=jit_compile)
    marks: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            marks.append(time.perf_counter())

    model.fit(*data, batch_size=batch, verbose=0, callbacks=[Clock()])
    return (marks[WARM + MEASURED - 1] - marks[WARM - 1]) / MEASURED


def with_loop(make: Any, data: Any, batch: int) -> float:
    """What a careful person writes: shuffled batches, clipping, AdamW, a falling learning rate."""
    model, optimizer, function = make(), keras.optimizers.AdamW(RATE), loss()
    optimizer.build(model.trainable_variables)
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function(reduce_retracing=True)
    def step(x: Any, y: Any, rate: Any) -> Any:
        optimizer.learning_rate.assign(rate)
        with tf.GradientTape() as tape:
            found = function(y, model(x, training=True))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(found, variables), 1.0)
        optimizer.apply(gradients, model.trainable_variables)
        return found

    order, losses, marks = np.random.default_rng(0).permutation(len(data[0])), [], []
    for index in range(WARM + MEASURED):
        chosen = order[index * batch : (index + 1) * batch]
        losses.append(step(data[0][chosen], data[1][chosen], np.float32(RATE * (1 - index / 100))))
        marks.append(time.perf_counter())
    return (marks[WARM + MEASURED - 1] - marks[WARM - 1]) / MEASURED


class Clock(TrainerCallback):
    """Notes the time at the end of every update."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.marks.append(time.perf_counter())


def with_trainer(make: Any, data: Any, batch: int, *, xla: bool = False) -> float:
    model, clock = make(), Clock()
    model.compile(loss=loss())
    with tempfile.TemporaryDirectory() as folder:
        args = TFTrainingArguments(
            folder, per_device_train_batch_size=batch, num_train_epochs=1, learning_rate=RATE, save_strategy="no",
            disable_tqdm=True, logging_strategy="no", report_to=[], use_cpu=True, xla=xla,
        )  # fmt: skip
        TFTrainer(model, args, data, callbacks=[clock]).train()
    return (clock.marks[WARM + MEASURED - 1] - clock.marks[WARM - 1]) / MEASURED


ARMS = {
    "fit": with_fit,
    "fit, no XLA": partial(with_fit, jit_compile=False),
    "loop": with_loop,
    "TFTrainer": with_trainer,
    "TFTrainer, XLA": partial(with_trainer, xla=True),
}
"""`fit` compiles with XLA by itself wherever it can; the loop and the trainer do so when they are asked to."""


def speed(models: list[str], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in models:
        make, data_of, batch = MODELS[name]
        data = data_of(batch * (WARM + MEASURED))
        times: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for _ in range(rounds):
            for arm, run in ARMS.items():
                times[arm].append(run(make, data, batch) * 1e3)
        found[name] = {arm: {"ms": min(each), "all_ms": each} for arm, each in times.items()}
    return found


# ---- what fit gets wrong --------------------------------------------------------------------------------------------


def small() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(10)])


class Stop(keras.callbacks.Callback):
    """Ends the run in the middle of an epoch, as a crash would."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 11:
            raise KeyboardInterrupt


def restart_of_fit(folder: str) -> dict[str, Any]:
    """32 updates in two epochs, stopped after 12 and started again; BackupAndRestore saves every 10 batches."""
    x, y = vectors(128)
    backup = keras.callbacks.BackupAndRestore(folder, save_freq=10)
    for stop in ([Stop()], []):
        model = small()
        model.compile(loss=loss(), optimizer=keras.optimizers.AdamW(RATE))
        try:
            model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[backup, *stop])
        except KeyboardInterrupt:
            pass
    whole = small()
    whole.compile(loss=loss(), optimizer=keras.optimizers.AdamW(RATE))
    whole.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return {"updates": int(model.optimizer.iterations), "of": 32, "weights_differ_by": difference(model, whole)}


def difference(one: Any, other: Any) -> float:
    pairs = zip(one.trainable_variables, other.trainable_variables, strict=True)
    return float(max(np.abs(a.numpy() - b.numpy()).max() for a, b in pairs))


def trained(folder: str, *, strategy: Any = None, resume: str | None = None, **options: Any) -> Any:
    given = {"per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": RATE, "save_strategy": "no",
             "disable_tqdm": True, "report_to": [], "use_cpu": True, "logging_steps": 1}  # fmt: skip
    args = TFTrainingArguments(folder, **{**given, **options})
    if strategy is not None:
        args.strategy = strategy
    with args.strategy.scope():
        model = small()
        model.compile(loss=loss())
    trainer = TFTrainer(model, args, vectors(128))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def restart_of_trainer(folder: str) -> dict[str, Any]:
    whole = trained(folder, save_strategy="steps", save_steps=10)
    again = trained(folder, resume=f"{folder}/checkpoint-10")
    updates = int(again.optimizer.iterations)
    return {"updates": updates, "of": 32, "weights_differ_by": difference(again.model, whole.model)}


def clipped(replicas: Any, *, accumulation: int | None = None) -> Any:
    x, y = vectors(128)
    options = {"gradient_accumulation_steps": accumulation} if accumulation else {}
    with replicas.scope() if replicas is not None else tf.device("CPU:0"):
        model = small()
        optimizer = keras.optimizers.AdamW(1e-2, global_clipnorm=0.1, **options)
        model.compile(loss=loss(), optimizer=optimizer)
    model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    return model


def failing(run: Callable[[], Any]) -> str | float:
    try:
        return run()
    except Exception as error:
        plain = re.sub(r"\x1b\[\d+m", "", str(error))  # Keras writes in bold
        return f"{type(error).__name__}: {' '.join(plain.split())[:160]}"


def on_replicas(folder: str) -> dict[str, Any]:
    """The same run on one and on two replicas: how far the weights are apart."""
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    base = {"num_train_epochs": 1, "learning_rate": 1e-2, "max_grad_norm": 0.1, "lr_scheduler_type": "constant"}
    one = trained(folder, per_device_train_batch_size=16, **base)
    both = trained(folder, strategy=two, per_device_train_batch_size=8, **base)
    cut = trained(folder, strategy=two, per_device_train_batch_size=2, gradient_accumulation_steps=4, **base)
    return {
        "clipping": {
            "fit": failing(lambda: difference(clipped(None), clipped(two))),
            "TFTrainer": difference(one.model, both.model),
        },
        "accumulation": {
            "fit": failing(lambda: difference(clipped(two, accumulation=4), clipped(None, accumulation=4))),
            "TFTrainer": difference(one.model, cut.model),
        },
    }


def worker(arm: str) -> None:
    """One of two processes of a multi-worker run."""
    if arm == "TFTrainer":
        with tempfile.TemporaryDirectory() as folder:
            print("loss", trained(folder, num_train_epochs=1, per_device_train_batch_size=8).state.log_history[0])
        return
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = small()
        model.compile(loss=loss(), optimizer=keras.optimizers.AdamW(RATE))
    data = tf.data.Dataset.from_tensor_slices(vectors(128)).batch(16)
    print("loss", model.fit(data, epochs=1, verbose=0).history)


def on_workers(arm: str) -> str:
    """Two processes on this machine: what they print, or how they fail."""
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    workers = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    processes = []
    for rank in range(2):
        cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(cluster), "CUDA_VISIBLE_DEVICES": "-1"}
        command = [sys.executable, __file__, "--worker", arm]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        outputs = [each.communicate(timeout=200) for each in processes]
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        for each in processes:
            each.kill()
    if all(each.returncode == 0 for each in processes):
        return "trains: " + outputs[0][0].strip().splitlines()[-1][:80]
    return "fails: " + next(err for _, err in outputs if err.strip()).strip().splitlines()[-1][:160]


def promises() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return {
            "restart in mid-epoch": {
                "fit": restart_of_fit(f"{folder}/backup"), "TFTrainer": restart_of_trainer(f"{folder}/run"),
            },
            **on_replicas(f"{folder}/replicas"),
            "two workers": {"fit": on_workers("fit"), "TFTrainer": on_workers("TFTrainer")},
        }  # fmt: skip


# ---- output ---------------------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    lines = []
    if "speed" in results:
        lines.append(f"{'model':<14}{'arm':<16}{'ms/update':>12}{'of fit':>8}")
        for model, arms in results["speed"].items():
            for arm, values in arms.items():
                ratio = values["ms"] / arms["fit"]["ms"]
                lines.append(f"{model:<14}{arm:<16}{values['ms']:>12.3f}{ratio:>8.2f}")
    for name, arms in results.get("promises", {}).items():
        lines += [f"{name}:", *(f"  {arm:<10} {value}" for arm, value in arms.items())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("speed", "promises"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.worker:
        worker(options.worker)
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    results: dict[str, Any] = {}
    if options.only != "promises":
        results["speed"] = speed(options.models, options.rounds)
    if options.only != "speed":
        results["promises"] = promises()
    print(table(results))
    if options.json:
        sys.path.append(str(Path(__file__).parent))
        from machine import described

        versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**described(), "also": versions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
