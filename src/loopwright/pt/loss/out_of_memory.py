"""Detecting out-of-memory errors, as the proofs of accelerations do."""

from ...speed.memory.out_of_memory import is_out_of_memory

__all__ = ["is_out_of_memory"]
