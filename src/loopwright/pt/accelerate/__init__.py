"""What scripts expect of accelerate: `trainer.accelerator` and its state."""
