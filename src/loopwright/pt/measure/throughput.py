"""The speed of a run: live numbers and the speed report."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from ...core.measure.ledger import COMPILING
from ...core.measure.pacing import Pacing
from ...core.measure.throughput import Interval, ThroughputMeter
from ...core.update import Update
from ...notices import logger
from ...speed.compile.compile_time import CompileTime
from ...speed.measure.flops import Operations, count_operations
from ...speed.measure.peaks import device_name, device_peak
from ...speed.measure.step_timing import StepTimer, TimeSplit, next_sample
from ...speed.measure.sustained import sustained_operations
from ...speed.report import SpeedReport, report_of
from ..devices import memory_figures
from ..loss.targets import predicts_next_token
from ..part import TorchPart
from .memory_metrics import host_peak

GIB = 2**30


class TorchPacing(TorchPart, Pacing):
    """The throughput of a run, and the breakdown of its time."""

    operations: Operations | None = None
    """The model's FLOPs per token; counted at the first log point if the device's peak is known."""
    _counted: torch.nn.Module | None = None
    _compile_time: CompileTime | None = None

    def speed_report(self) -> SpeedReport:
        """The accelerations in use with their reasons, and the speed of training; print it, or use `as_dict()`."""
        split, plan = self.run.time_split or TimeSplit(), self.run.speed_plan or {}
        return report_of(
            {**plan, "choices": [*plan.get("choices", ()), *self.internals.fast_evaluation.choices()]},
            numbers=self.run.pace.whole(),
            checks={} if self.run.speed is None else self.run.speed.checks,
            split=split.shares(),
            sampled_updates=split.updates,
            update_seconds=split.seconds() or None,
            device=device_name(self.device) or self.device.type,
            number_format=self.number_format(),
        )

    def make_meter(self) -> ThroughputMeter:
        peak, sustained = device_peak(self.device, self.number_format()), self._sustained()
        self.run.work.squares = self.run.work.keeps_sample = peak is not None or sustained is not None
        if self._counted is not self.model:  # not the model whose FLOPs were counted
            self.operations = None if self._counted is not None else self.operations
            self._counted = None
        self.follow_compiler()
        self.run.time_split = TimeSplit()
        self.run.step_timer, self.run.step_timer_at = None, next_sample(self.state.global_step)
        return ThroughputMeter(
            peak_operations=peak,
            sustained_operations=sustained,
            operations=self._operations_of,
            peak_memory=self._peak_memory_gib,
            recompiles=recompiles if self.strategy.guard is None else self.strategy.guard.count,
        )

    def _sustained(self) -> float | None:
        """FLOPs per second of matrix products measured now, if requested."""
        if not self.args.measure_matmul:
            return None
        found = sustained_operations(self.device, self.number_format())
        if found is None:
            self.notices.warn_once(
                f"measure_matmul: matrix products cannot be timed on {self.device}; MFU is relative to the data sheet "
                "only"
            )
        return found

    def live_numbers(self) -> dict[str, float]:
        if self.run.time_split is not None:
            self.run.time_split.read()
        if self.run.work.sample is not None:
            with self.run.pace.left_out():
                self._count_operations()
        return super().live_numbers()

    def toggle_step_timing(self, update: Update) -> None:
        step = self.state.global_step
        if self.run.step_timer is None:
            try:
                self.run.step_timer = StepTimer(self.device, self.trainer.model_wrapped)
                self.run.step_timer_at = step + 1
            except (RuntimeError, NotImplementedError, TypeError) as error:
                self.run.step_timer_at = -1
                logger.info(f"step timing is not available: {self.device} has no timed events: {error}")
            return
        self.run.step_timer.end(micro_batches=len(update.batches), waited=self.run.pace.last_wait)
        assert self.run.time_split is not None
        self.run.time_split.add(self.run.step_timer)
        self.run.step_timer, self.run.step_timer_at = None, next_sample(step)

    def follow_compiler(self) -> None:
        """Count the time of compiling in the time ledger, once torch's compiler is in use."""
        if self._compile_time is None:
            switch = self.run.ledger.switch
            self._compile_time = CompileTime(lambda: switch(COMPILING), switch)
        self._compile_time.follow()

    def close(self) -> None:
        if self._compile_time is not None:
            self._compile_time.leave()
            self._compile_time = None
        if self.run.step_timer is not None:
            self.run.step_timer.detach()
            self.run.step_timer = None

    def _operations_of(self, interval: Interval) -> float | None:
        if self.operations is None or not math.isfinite(interval.real_tokens):
            return None
        squared = interval.squared_lengths
        if not math.isfinite(squared):  # unknown lengths are assumed equal
            squared = interval.real_tokens**2 / max(interval.samples, 1)
        return self.operations.of(interval.real_tokens, squared)

    def _count_operations(self) -> None:
        """Count the FLOPs of one small forward, once; without it, the MFU is unknown and training continues."""
        sample, self.run.work.sample = self.run.work.sample, None
        self.run.work.keeps_sample = False
        if self.operations is not None:
            return
        self._counted = self.model
        try:
            self.operations = count_operations(
                self._plain_forward,
                self.model,
                sample,
                self.internals.data.input_name(),
                causal=predicts_next_token(self.model),
            )
        except Exception as error:  # user code; a missing number must not stop training
            logger.info(f"MFU is unknown, since the FLOPs of the model could not be counted: {error}")

    def _plain_forward(self, inputs: dict[str, Any]) -> Any:
        with self.trainer.compute_loss_context_manager():
            return self.model(**self.internals.loss.for_model(self.trainer._prepare_inputs(inputs)))

    def number_format(self) -> str:
        """The dtype of the model's matrix products, in the names of the table of peaks."""
        if self.args.bf16 or self.args.fp16:
            return "bf16" if self.args.bf16 else "fp16"
        weights = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        found = next(weights, torch.float32)
        if found in (torch.bfloat16, torch.float16):
            return "bf16" if found is torch.bfloat16 else "fp16"
        return "tf32" if self.device.type != "cpu" and torch.get_float32_matmul_precision() != "highest" else "fp32"

    def _peak_memory_gib(self) -> float | None:
        """Peak memory: the device's own count, or that of the process."""
        if self.device.type == "cpu":
            return host_peak() / GIB
        peak = memory_figures(self.device).get("peak")
        return None if peak is None else peak / GIB


def recompiles() -> int | None:
    """Number of recompilations by torch in this process; None before the first compilation."""
    frames = sys.modules.get("torch._dynamo.convert_frame")  # not imported here, which would take seconds
    compiled = getattr(frames, "FRAME_COMPILE_COUNTER", None)
    return sum(count - 1 for count in compiled.values() if count > 1) if compiled else None
