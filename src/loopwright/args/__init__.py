"""Training arguments: one small dataclass per theme, one flat class that inherits them, and the rules between them."""
