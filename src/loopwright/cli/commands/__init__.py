"""The commands of the tool: one module each, named as the command."""
