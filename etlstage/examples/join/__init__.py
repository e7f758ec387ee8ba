"""A notebook that joins two tables and asks a worker about their rows."""
