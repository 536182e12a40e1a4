"""The user's code: what a constructor is given, calling overrides, notes on their errors."""
