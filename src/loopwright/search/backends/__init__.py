"""What suggests values: Optuna, Ray Tune, W&B, and loopwright's own grid and random search."""
