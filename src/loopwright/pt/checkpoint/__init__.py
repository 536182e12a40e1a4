"""Checkpoints: tensors, shards, weights, rank state, saving and resuming."""
