"""Sharing on the Hub."""

from __future__ import annotations

from dataclasses import dataclass

from .field import Group, arg
from .names import HubStrategy


@dataclass
class HubArgs(Group):
    """Sharing on the Hub."""

    title = "Hub"

    push_to_hub: bool = arg(False, "Push the model to the Hub when it is saved.", ranks="any")
    hub_token: str | None = arg(None, "The token to push with.", repr=False, ranks="any")
    hub_private_repo: bool | None = arg(None, "Make a new repository private.", ranks="any")
    hub_model_id: str | None = arg(None, "The repository to push to.", ranks="any")
    hub_strategy: HubStrategy | str = arg(
        "every_save", "What to push and when: end, every_save, checkpoint or all_checkpoints.", ranks="any"
    )
    hub_always_push: bool = arg(False, "Push even while an earlier push is in progress.", ranks="any")
    hub_revision: str | None = arg(None, "The branch to push to.", ranks="any")
