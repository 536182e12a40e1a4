"""Arguments that are dictionaries or lists: their forms and checks."""
