"""From datasets to batches."""
