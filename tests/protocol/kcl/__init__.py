"""Tests of dialect ``kcl``."""
