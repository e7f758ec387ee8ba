"""Conversations with workers: recorded, kept in files, played again, compared."""
