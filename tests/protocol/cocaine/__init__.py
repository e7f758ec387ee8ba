"""Tests of dialect ``cocaine``."""
