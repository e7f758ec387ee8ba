"""Tests of the dialect ``marker``."""
