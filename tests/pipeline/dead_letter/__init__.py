"""Messages that are kept aside for good."""
