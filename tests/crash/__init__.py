"""Check that each message is loaded once, whatever is killed, and whenever."""
