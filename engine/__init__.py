"""The language model on its device."""
