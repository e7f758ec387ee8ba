"""Gazette's package message, held to what the real one does."""
