"""Training processes that are killed, filled up, damaged and signalled, and what is left of them."""
