"""What a stage reports about itself, and how."""
