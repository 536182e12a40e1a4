"""What a checkpoint holds: tensors, shards, weights, rank state, and how a run is saved and resumed."""
