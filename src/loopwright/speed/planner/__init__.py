"""Choosing the accelerations of a run, with reasons."""
