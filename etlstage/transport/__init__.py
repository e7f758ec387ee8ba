"""Bytes to and from a worker."""

from __future__ import annotations

from etlstage.transport.launcher import Terms as Terms
from etlstage.transport.launcher import TermsRefused as TermsRefused
from etlstage.transport.process import Process as Process

__all__ = ("Process", "Terms", "TermsRefused")
