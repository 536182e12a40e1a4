"""Checkpoints on disk: publish, find, verify, prune. Works on files, not tensors."""
