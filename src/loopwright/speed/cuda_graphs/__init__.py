"""Micro-batches as CUDA graphs."""
