"""Tests of the testing kit, and by it of supervision."""
