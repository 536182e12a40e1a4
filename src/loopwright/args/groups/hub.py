"""Sharing on the Hub."""

from __future__ import annotations

from dataclasses import dataclass

from ..field import Group, arg
from ..names import HubStrategy


@dataclass
class HubArgs(Group):
    """Sharing on the Hub."""

    title = "Hub"

    push_to_hub: bool = arg(
        False, "Push to the Hub: what save_model() writes, and checkpoints as hub_strategy sets. See the page hub."
    )
    hub_token: str | None = arg(
        None, "The token to push with; by default that of `hf auth login` or HF_TOKEN.", repr=False, ranks="any"
    )
    hub_private_repo: bool | None = arg(
        None, "Make a new repository private; an existing one is unchanged.", ranks="any"
    )
    hub_model_id: str | None = arg(
        None, "The repository: owner/name, or a name; by default the name of the output folder.", ranks="any"
    )
    hub_strategy: HubStrategy | str = arg(
        "every_save",
        "What to push of a save: end (nothing), every_save (the model), checkpoint or all_checkpoints (also the "
        "checkpoint).",
    )
    hub_always_push: bool = arg(
        False, "Push every save in turn; by default a newer one takes the place of one that waits.", ranks="any"
    )
    hub_revision: str | None = arg(None, "The branch to push to, created if it does not exist.", ranks="any")
