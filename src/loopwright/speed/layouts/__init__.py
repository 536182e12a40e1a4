"""Layouts of an update's samples in micro-batches that reduce the computation spent on padding."""
