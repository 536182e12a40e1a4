"""Evaluation without a framework: the loop, its entry points, predictions, metrics."""
