"""Counting operations, peak rates of devices, and where the time of an update is spent."""
