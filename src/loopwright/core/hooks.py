"""Hooks: what the library uses of a trainer, that is of its user."""

from __future__ import annotations

from typing import Any

Hooks = Any
