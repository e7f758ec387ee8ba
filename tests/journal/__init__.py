"""Logs in a folder, and in memory."""
