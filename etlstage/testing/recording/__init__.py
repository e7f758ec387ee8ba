"""Conversations with workers: recorded, stored in files, replayed and compared."""
