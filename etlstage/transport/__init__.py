"""Bytes to and from a worker."""

from __future__ import annotations

from etlstage.transport.process import Process as Process

__all__ = ("Process",)
