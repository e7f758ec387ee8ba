"""The supervisor, with real workers and in memory."""
