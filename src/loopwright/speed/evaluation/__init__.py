"""Layouts of evaluation and prediction: their proof, their plan, and the samples of several batches together."""
