"""How much memory training takes, how many tokens fit, what is recomputed."""
