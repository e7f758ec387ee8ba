"""What reaches the executors before a job does."""
