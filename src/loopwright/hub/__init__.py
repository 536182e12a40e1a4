"""The Hub: pushing checkpoints and models, model cards, and resuming from a pushed checkpoint."""
