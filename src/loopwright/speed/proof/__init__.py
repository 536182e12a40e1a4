"""The proof that an acceleration changes no result: before it is switched on, and on every later update."""
