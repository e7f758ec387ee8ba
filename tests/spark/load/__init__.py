"""What loads what tasks have staged."""
