"""Compiling the blocks of a model, and the cache of what was compiled."""
