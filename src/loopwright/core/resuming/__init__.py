"""How a run begins: from the start, or from a checkpoint of an earlier run."""
