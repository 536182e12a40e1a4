"""The data of tasks: rows of files, images, sounds, classes."""
