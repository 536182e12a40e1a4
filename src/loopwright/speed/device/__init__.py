"""Reducing time on the device's critical path: prefetching, gradient clipping, FP8 linear layers."""
