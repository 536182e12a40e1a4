"""From datasets to batches: loaders, order, shards, packing, columns, static shapes, collators."""
