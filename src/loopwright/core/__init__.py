"""The loop and everything that needs no framework: standard library and numpy only."""
