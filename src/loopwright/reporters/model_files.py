"""Files of a model for trackers that store them."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from ..errors import OutputError
from ..notices import logger

PATIENCE = 600.0
"""Seconds until a checkpoint that is saved in the background must exist."""


def wait_for(path: str | os.PathLike[str], seconds: float = PATIENCE) -> None:
    """Wait until a file or folder exists: a checkpoint appears when its background save is complete."""
    end = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > end:
            raise OutputError(f"{path} did not appear in {seconds:.0f} s, so it is not sent; check its disk")
        time.sleep(0.2)


def saved_model(model: Any, processing_class: Any) -> str | None:
    """A temporary folder with the model's files; None, with a warning, for a model that cannot save itself."""
    if not callable(getattr(model, "save_pretrained", None)):
        logger.warning(f"{type(model).__name__} has no method save_pretrained, so its final files are not sent")
        return None
    folder = tempfile.mkdtemp(prefix="model-")
    model.save_pretrained(folder)
    if callable(getattr(processing_class, "save_pretrained", None)):
        processing_class.save_pretrained(folder)
    return str(Path(folder))
