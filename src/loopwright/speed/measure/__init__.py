"""Counting operations, device peaks, and where the time of an update goes."""
