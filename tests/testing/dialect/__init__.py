"""What tests know of each dialect."""
