"""Model options switched on before training, and changes of a model during training."""
