"""What a stage is."""
