"""What reaches the executors."""
