"""Attention over rows that hold several documents."""
