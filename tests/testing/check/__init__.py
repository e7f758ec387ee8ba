"""Tests of ``etlstage check`` on workers with known properties."""
