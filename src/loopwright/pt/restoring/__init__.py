"""Computations that leave no change behind: what a model, a trainer and a loss refer to is restored."""
