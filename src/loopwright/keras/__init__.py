"""Keras, whatever computes: what the trainers of TensorFlow and JAX share. Imports neither of them."""
