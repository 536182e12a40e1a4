"""How the samples of an update are laid out in micro-batches, so that little is computed for padding."""
