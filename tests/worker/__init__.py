"""Workers made with the SDK, run as processes."""
