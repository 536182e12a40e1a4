"""Which accelerations a run gets, and why."""
