"""The report of a run: a page with charts, and the same numbers in a terminal."""
