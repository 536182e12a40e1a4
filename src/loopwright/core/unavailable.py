"""Methods of transformers' Trainer that are not available yet."""

from __future__ import annotations

from typing import NoReturn

from ..errors import NotAvailable
from ..notices import Notices
from .hooks import HookUser


class Unavailable(HookUser):
    """Each raises an error that names it and what to do instead."""

    notices: Notices

    def _not_yet(self, what: str, instead: str) -> NoReturn:
        raise NotAvailable(f"{what}() is not available yet; {instead}")

    def push_to_hub(self) -> NoReturn:
        """Push the model to a hub (not available yet)."""
        self._not_yet("push_to_hub", "upload the folder of save_model()")

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the hub repository (not available yet)."""
        self._not_yet("init_hf_repo", "create it with huggingface_hub")

    def create_model_card(self) -> None:
        """Write a model card (not available yet; warns instead of raising, because scripts call it last)."""
        self.notices.warn_once("create_model_card is not available yet; no README.md was written")
