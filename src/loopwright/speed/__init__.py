"""Accelerations and the proof that each of them leaves the result as it was."""
