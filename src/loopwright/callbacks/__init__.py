"""Built-in callbacks, one file each."""
