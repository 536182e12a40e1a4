"""Puts loopwright's classes in the place of transformers' own, so that code written for those trains here.

import loopwright.compat; loopwright.compat.install()        as the first line of a script
with loopwright.compat.installed(): ...                      for a part of it
loopwright run script.py ...                                 without a change to the script
"""

from __future__ import annotations

from .installation import install, installed, is_installed, uninstall

__all__ = ["install", "installed", "is_installed", "uninstall"]
