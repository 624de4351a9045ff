"""A run: its processes, its files, and its words to the user."""
