"""Compiling the blocks of a model, and the compile cache."""
