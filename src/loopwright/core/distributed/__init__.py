"""What the ranks of a run compare: arguments, code and data before training, positions during it."""
