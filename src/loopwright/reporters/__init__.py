"""Where numbers are sent, one file each, found by name through `registry.py`."""
