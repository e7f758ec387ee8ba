"""Dead letters: messages that a stage could not process."""
