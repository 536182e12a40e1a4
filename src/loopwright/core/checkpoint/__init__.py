"""Checkpoints on disk: publish, find, verify, prune. Knows files, not tensors."""
