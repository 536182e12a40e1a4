"""Parts of `loopwright drill`: its training process, the faults, the results."""
