"""An adversary: losses, models, data, callbacks and hooks that try to be trained wrongly, against a loop by hand."""
