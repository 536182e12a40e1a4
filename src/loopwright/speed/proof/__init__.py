"""Proofs that an acceleration does not change results: before it is enabled, and during training."""
