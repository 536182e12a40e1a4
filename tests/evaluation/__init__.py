"""Evaluation: exact numbers, flat memory, every argument, the best model, metric objects, generation."""
