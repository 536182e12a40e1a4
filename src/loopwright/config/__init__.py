"""Configurations of the command line: reading them with their places, and making trainers of them."""

from .building import build_trainer
from .config import Config
from .loading import load_config

__all__ = ["Config", "build_trainer", "load_config"]
