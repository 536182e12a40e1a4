"""Hyper-parameter search: spaces, trials in processes of their own, and the backends that choose the values."""
