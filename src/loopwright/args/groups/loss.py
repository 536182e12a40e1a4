"""What the loss is made of."""

from __future__ import annotations

from dataclasses import dataclass

from ..field import Group, arg, between, non_negative


@dataclass
class LossArgs(Group):
    """What the loss is made of."""

    title = "Loss and regularisation"

    label_smoothing_factor: float = arg(
        0.0, "Label smoothing: fraction of the target's weight given to all classes.", check=between(0, 1)
    )
    neftune_noise_alpha: float | None = arg(
        None, "Scale of the NEFTune noise added to embeddings in training.", check=non_negative
    )
    average_tokens_across_devices: bool = arg(
        True, "Divide by the items of all ranks, so that the loss does not depend on how samples are distributed."
    )
    on_nonfinite: str = arg(
        "continue",
        "When loss or gradients are NaN or infinite: raise, skip that step, or continue. The first one is reported.",
        choices=("raise", "skip", "continue"),
    )
    on_spike: str | None = arg(
        None, "When the loss spikes: rollback to the last good checkpoint.", choices=("rollback",)
    )
