"""One run at a time in an output folder, and which run that is."""
