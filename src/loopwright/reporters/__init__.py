"""Reporters, which send metrics to trackers: one file each, found by name in `registry.py`."""
