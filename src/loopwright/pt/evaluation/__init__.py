"""Evaluation and prediction with PyTorch."""
