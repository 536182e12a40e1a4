"""The loss of a Keras model, and the items it counts."""
