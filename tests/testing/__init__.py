"""Tests of the testing kit, and of supervision by means of the kit."""
