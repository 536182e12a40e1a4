"""The memory of training: how many tokens fit, and what is recomputed."""
