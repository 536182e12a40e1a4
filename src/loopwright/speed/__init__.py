"""Accelerations, and the proof that each of them does not change results."""
