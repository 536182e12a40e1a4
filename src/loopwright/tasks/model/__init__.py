"""The models of tasks: loaded or built, with adapters, or of the user's own class."""
