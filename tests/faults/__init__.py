"""Training under faults: kills, full disks, damaged files and signals."""
