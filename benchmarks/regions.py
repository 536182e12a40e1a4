"""Regions without padding on one GPU: GPT-2 124M and ViT-base, as written, compiled per block, and as one region.

    python benchmarks/regions.py --out regions.json --seconds 150 [--arms gpt2-default,vit-default]

Every arm is a process of its own; the file is written after each, so that a run that is stopped keeps what it has.
Arms that would not fit into the seconds are left out, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SKIPPED, READY, MEASURED = 34, 24, 30
"""Updates before the measured ones, in which the plan is made, graphs are captured and compared; the update after which
training counts as ready."""
ARMS = (
    "gpt2-default", "vit-default", "gpt2-off", "vit-off", "gpt2-short", "gpt2-blocks", "gpt2-hand", "vit-hand",
)  # fmt: skip
"""In the order of their importance."""


# ---- tasks ----------------------------------------------------------------------------------------------------------


def model_and_data(task: str, device: str) -> tuple[Any, list[dict[str, Any]], int]:
    """The model, its samples and the samples of an update; the same weights and samples each time."""
    import torch
    import transformers

    torch.manual_seed(42)
    small = device == "cpu"
    if task == "gpt2":
        config = transformers.GPT2Config(**({"n_layer": 2, "n_embd": 64, "n_head": 2} if small else {}))
        with torch.device(device):
            model = transformers.GPT2LMHeadModel(config)
        length, batch = (32, 2) if small else (1024, 16)
        rows = torch.randint(0, config.vocab_size, (256, length))
        return model, [{"input_ids": row, "labels": row} for row in rows], batch
    tiny = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(num_labels=1000, **(tiny if small else {}))
    with torch.device(device):
        model = transformers.ViTForImageClassification(config)
    images, batch = torch.randn(16 if small else 256, 3, 224, 224), 2 if small else 64
    labels = torch.randint(0, 1000, (len(images),))
    return model, [{"pixel_values": a, "labels": b} for a, b in zip(images, labels, strict=True)], batch


# ---- watching -------------------------------------------------------------------------------------------------------


class Clock:
    """Times of updates: when training was ready, and the milliseconds of the measured ones; then one is profiled."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device, self.updates = torch, device, 0
        self.begun = time.perf_counter()
        self.ready = self.started = self.ms = 0.0
        self.profile: dict[str, Any] = {}
        self._profiler: Any = None

    def wait(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def update_done(self) -> bool:
        """Whether all is measured."""
        self.updates += 1
        if self.updates == READY:
            self.wait()
            self.ready = time.perf_counter() - self.begun
        if self.updates == SKIPPED:
            self.wait()
            self.started = time.perf_counter()
        if self.updates == SKIPPED + MEASURED:
            self.wait()
            self.ms = 1000 * (time.perf_counter() - self.started) / MEASURED
        if self.updates == SKIPPED + MEASURED + 1:
            self.wait()
            kinds = self.torch.profiler.ProfilerActivity
            self._profiler = self.torch.profiler.profile(
                activities=[kinds.CPU, *([kinds.CUDA] if self.device != "cpu" else [])]
            )
            self._profiler.__enter__()
        if self.updates == SKIPPED + MEASURED + 2:
            self.wait()
            self._profiler.__exit__(None, None, None)
            self.profile = summary(self._profiler, self.ms)
            return True
        return False

    def numbers(self) -> dict[str, Any]:
        peak = 0.0 if self.device == "cpu" else self.torch.cuda.max_memory_allocated() / 2**30
        return {"ms": round(self.ms, 2), "ready_s": round(self.ready, 1), "peak_gib": round(peak, 2),
                "profile": self.profile}  # fmt: skip


def summary(profiler: Any, ms: float) -> dict[str, Any]:
    """Kernel time, idle time, launches and casts of the profiled update."""
    kernels: dict[str, list[float]] = {}
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset", "ProfilerStep")):
            found = kernels.setdefault(event.name, [0, 0.0])
            found[0] += 1
            found[1] += event.time_range.elapsed_us() / 1000
    total = sum(spent for _, spent in kernels.values())

    def share(*words: str) -> dict[str, float]:
        chosen = [value for name, value in kernels.items() if any(word in name.lower() for word in words)]
        return {"launches": sum(int(count) for count, _ in chosen), "ms": round(sum(spent for _, spent in chosen), 2)}

    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:18]
    return {
        "kernel_ms": round(total, 2),
        "idle_ms": round(ms - total, 2),
        "launches": sum(int(count) for count, _ in kernels.values()),
        "copies_and_casts": share("copy_kernel", "bfloat16_copy", "to_copy"),
        "products": share("gemm", "cutlass", "nvjet", "xmma"),
        "attention": share("flash", "fmha", "attention", "sdpa"),
        "optimizer": share("multi_tensor", "adam"),
        "triton": share("triton"),
        "longest": [[name[:110], int(count), round(spent, 2)] for name, (count, spent) in longest],
    }


# ---- arms -----------------------------------------------------------------------------------------------------------


def with_trainer(task: str, arm: str, device: str) -> dict[str, Any]:
    import loopwright

    model, data, batch = model_and_data(task, device)
    updates = {"short": 1000}.get(arm, 100_000)
    options: dict[str, Any] = {"off": {"speed": "off"}, "blocks": {"torch_compile": True}}.get(arm, {})
    clock = Clock(device)

    class Watching(loopwright.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = clock.update_done()

    trainer = loopwright.Trainer(
        model,
        loopwright.TrainingArguments(
            tempfile.mkdtemp(), per_device_train_batch_size=batch, max_steps=updates, bf16=True, report_to="none",
            logging_strategy="no", save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
            use_cpu=device == "cpu", **options,
        ),
        train_dataset=data,
        callbacks=[Watching()],
    )  # fmt: skip
    clock.begun = time.perf_counter()
    trainer.train()
    report = trainer.speed_report().as_dict()
    compiled = {} if trainer.compiled is None else trainer.compiled.figures()
    losses = trainer._loopwright.run.meter.losses[: SKIPPED + MEASURED]
    plan = [f"{'on' if row['on'] else 'off'} {row['name']}: {row['reason']}" for row in report["choices"]]
    return {**clock.numbers(), "losses": losses, "compiled": compiled, "report": report, "plan": plan}


def by_hand(task: str, arm: str, device: str) -> dict[str, Any]:
    """A loop as a good engineer writes it: the whole model compiled, fused AdamW, pinned batches."""
    import torch

    model, data, batch = model_and_data(task, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=device != "cpu")
    compiled, clock = torch.compile(model), Clock(device)
    loader = torch.utils.data.DataLoader(
        data, batch_size=batch, shuffle=True, pin_memory=device != "cpu", num_workers=2, persistent_workers=True
    )
    model.train()
    losses: list[Any] = []
    while True:
        for inputs in loader:
            inputs = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = compiled(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            if clock.update_done():
                return {**clock.numbers(), "losses": torch.stack(losses).tolist()[: SKIPPED + MEASURED]}


# ---- all of them ----------------------------------------------------------------------------------------------------


def compared(results: dict[str, Any]) -> None:
    """Add to each arm the largest relative difference of its losses from those of the arm as written."""
    for name, result in results.items():
        plain = results.get(f"{name.partition('-')[0]}-off", {}).get("losses")
        if plain and result.get("losses"):
            pairs = zip(result["losses"], plain, strict=False)
            result["losses_differ"] = max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(Path(os.environ.get("OUT", ".")) / "regions.json"))
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        task, _, arm = options.one.partition("-")
        run = by_hand if arm == "hand" else with_trainer
        print("RESULT " + json.dumps(run(task, arm, options.device)))
        return
    begun, results = time.monotonic(), {}
    for name in options.arms.split(","):
        left = options.seconds - (time.monotonic() - begun)
        results[name] = one_arm(name, options.device, left) if left > 25 else {"left_out": "no time left"}
        compared(results)
        shown = {key: value for key, value in results[name].items() if key not in ("losses", "report", "profile")}
        print(name, f"{time.monotonic() - begun:.0f} s", json.dumps(shown), flush=True)
        print("   ", json.dumps(results[name].get("profile", {})), flush=True)
        Path(options.out).write_text(json.dumps(results, indent=1))


def one_arm(name: str, device: str, seconds: float) -> dict[str, Any]:
    """The result of an arm in a process of its own, or its error."""
    cache = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp()}
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, "--device", device],
            capture_output=True, text=True, timeout=seconds, env=cache, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return {"error": f"not done after {seconds:.0f} s", "tail": str(error.stdout or "")[-500:]}
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[-1][7:]) if found else {"error": (done.stderr or done.stdout)[-1500:]}


if __name__ == "__main__":
    main()
