"""Tests of dialect ``kcl`` with real processors."""
