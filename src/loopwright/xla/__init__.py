"""Lazy torch_xla: operations are noted, and computed by one compiled graph at the end of a step."""
