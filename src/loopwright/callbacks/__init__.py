"""Callbacks that come with the trainer, one file each."""
