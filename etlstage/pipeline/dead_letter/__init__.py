"""Dead letters: messages that could not be processed, kept with their context."""
