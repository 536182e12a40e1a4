"""Optimizers, schedulers, learning rates."""
