"""The verdict on a run: what costs it most, and what to do about it, in one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean

from ..core.checkpoint.ownership.run_id import FAILED, FINISHED, INTERRUPTED
from ..core.measure.ledger import COMPILING, DATA, EVALUATION, LOST, PREPARING, PROVING, RESTARTS, SAVING, UPDATES
from .folder import RunView
from .series import Series

ENOUGH_SECONDS = 2.0
"""Shares of a shorter run mean nothing."""
PADDED = 0.7
GROWN = 1.5
"""The factor above its first values at which a training loss has risen."""
RISEN = 1.02
"""The factor above its lowest value at which an evaluation loss has risen."""


def verdict(run: RunView) -> list[str]:
    """Findings, the most important first; at least one."""
    found = [*_ended(run), *_numbers(run), *_time(run), *_padding(run)]
    return found or [_healthy(run)]


def _ended(run: RunView) -> Iterator[str]:
    if run.incidents:
        mark = run.incidents[-1]
        yield f"Step {mark['step']:,}: {mark['text']}."
    if run.status == "killed":
        yield f"The run was killed after step {run.step:,}: the same command resumes it from its last checkpoint."
    elif run.status == FAILED:
        yield f"The run failed with an error after step {run.step:,}."
    elif run.status == INTERRUPTED:
        yield f"The run was interrupted after step {run.step:,}: the same command resumes it."


def _numbers(run: RunView) -> Iterator[str]:
    for name, (step, value) in run.metrics.not_finite.items():
        if name.endswith("loss"):
            yield f"{name} is {value} since step {step:,}: lower learning_rate, or check the data."
    total = run.metrics.nonfinite_steps
    if total:
        yield f"{total:,} steps had a loss or gradients that are not finite: lower learning_rate, or check the data."
    if (grown := _grown(run.metrics.curves.get("loss"))) is not None:
        yield f"The loss has risen from {grown[0]:.4g} to {grown[1]:.4g}: lower learning_rate, or check the data."
    curve = run.metrics.curves.get("eval_loss")
    if curve is not None and (rising := _rising(curve)) is not None:
        step, low = rising
        yield (
            f"The evaluation loss has risen since step {step:,} ({low:.4g}): train shorter, or keep the best model "
            "with load_best_model_at_end."
        )


def _grown(curve: Series | None) -> tuple[float, float] | None:
    """The means of the first and the last tenth of a loss, if the last one is much larger."""
    values = [] if curve is None else [value for value in curve.ys if value is not None]
    tenth = len(values) // 10
    if not tenth:
        return None
    first, last = mean(values[:tenth]), mean(values[-tenth:])
    return (first, last) if last > GROWN * first > 0 else None


def _rising(curve: Series) -> tuple[int, float] | None:
    """The place and value of the minimum, if the last three values are above it."""
    points = [(value, step) for step, value in zip(curve.xs, curve.ys, strict=True) if value is not None]
    if len(points) < 4:
        return None
    low, step = min(points)
    later = [value for value, place in points[-3:] if place > step]
    return (int(step), low) if len(later) == 3 and all(value > RISEN * low for value in later) and low > 0 else None


ADVICE: tuple[tuple[tuple[str, ...], float, str, Callable[[RunView], str]], ...] = (
    (
        (RESTARTS, LOST),
        0.15,
        "went to restarts and to work that was lost",
        lambda run: "lower save_steps, so that less is repeated",
    ),
    ((DATA,), 0.15, "waited for data", lambda run: _loading(run)),
    (
        (EVALUATION,),
        0.3,
        "was spent on evaluation",
        lambda run: "raise eval_steps or per_device_eval_batch_size, or evaluate on fewer samples",
    ),
    ((SAVING,), 0.15, "was spent on checkpoints", lambda run: _checkpoints(run)),
    ((COMPILING,), 0.3, "was spent on compiling", lambda run: "train longer, or turn torch_compile off"),
    ((PROVING,), 0.3, "was spent on proving accelerations", lambda run: 'train longer, or set speed="off"'),
    ((PREPARING,), 0.5, "was spent on preparing the run", lambda run: "this share falls as the run gets longer"),
)
"""Parts of the time ledger, the share at which they are reported, what happened, and what to do."""


def _time(run: RunView) -> Iterator[str]:
    wall, seconds = run.wall, run.seconds
    if wall < ENOUGH_SECONDS:
        return
    shares = [(sum(seconds[part] for part in parts) / wall, row) for row in ADVICE for parts in row[:1]]
    for share, (_, limit, what, advice) in sorted(shares, key=lambda each: -each[0]):
        if share >= limit:
            yield f"{share:.0%} of the time {what}: {advice(run)}."


def _loading(run: RunView) -> str:
    workers = run.facts.get("values", {}).get("dataloader_num_workers")
    return "raise dataloader_num_workers" + ("" if workers is None else f" (it is {workers})")


def _checkpoints(run: RunView) -> str:
    if run.facts.get("values", {}).get("async_save") is False:
        return "raise save_steps, or set async_save=True"
    return "raise save_steps"


def _padding(run: RunView) -> Iterator[str]:
    share = run.last("useful_token_share")
    if share is not None and share < PADDED:
        yield (
            f"{1 - share:.0%} of the computed tokens are padding: set "
            'train_sampling_strategy="group_by_length", or batch_packing.'
        )


def _healthy(run: RunView) -> str:
    loss = run.metrics.curves.get("loss")
    values = [] if loss is None else [value for value in loss.ys if value is not None]
    change = f"; the loss went from {values[0]:.4g} to {values[-1]:.4g}" if len(values) > 1 else ""
    if run.wall < ENOUGH_SECONDS:
        state = "finished" if run.status == FINISHED else "too short to judge"
        return f"{'The run is ' + state if state != 'finished' else 'The run has finished'}{change}."
    return f"No problem found: {run.seconds[UPDATES] / run.wall:.0%} of the time went into updates{change}."
