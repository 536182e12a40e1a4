"""Optimizers and schedules of Keras."""
