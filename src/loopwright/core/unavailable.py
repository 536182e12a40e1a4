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

    def hyperparameter_search(self) -> NoReturn:
        """Search for good arguments (not available yet)."""
        self._not_yet("hyperparameter_search", "create a trainer for each set of arguments")
