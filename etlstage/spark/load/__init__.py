"""Loading what executors have staged."""
