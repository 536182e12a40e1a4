"""Tasks of the command line: what a configuration may say about each, and how its model and data are made."""
