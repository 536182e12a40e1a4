"""Micro-batches as recorded CUDA graphs."""
