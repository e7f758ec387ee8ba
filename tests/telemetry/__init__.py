"""What a stage tells about itself, and how it is told."""
