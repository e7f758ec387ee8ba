"""Tests of journals as a data source of Spark."""
