"""The loss: targets, what it is the mean of, one micro-batch forward and backward, out of memory, incidents."""
