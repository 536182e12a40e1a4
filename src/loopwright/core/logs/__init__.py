"""What a run shows and records: log history, lines of the console, reports on non-finite updates."""
