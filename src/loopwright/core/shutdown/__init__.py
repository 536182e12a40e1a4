"""How a run is stopped: signals, Ctrl-C, a lost terminal, a dead parent; it saves and exits."""
