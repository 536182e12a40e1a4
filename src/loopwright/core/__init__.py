"""The training loop and other code without a framework: standard library and numpy only."""
