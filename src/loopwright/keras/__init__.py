"""Code shared by the TensorFlow and JAX trainers of Keras models. Imports neither TensorFlow nor JAX."""
