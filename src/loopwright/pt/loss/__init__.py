"""The loss: targets, its denominator, forward and backward of a micro-batch, out of memory, incidents."""
