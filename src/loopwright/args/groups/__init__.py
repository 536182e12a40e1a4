"""The arguments: one dataclass per theme."""
