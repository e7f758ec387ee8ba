"""A pipeline to start from: a worker in each of three languages, data and tests."""
