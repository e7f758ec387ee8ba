"""
Check whether a worker, in any language, keeps to the protocol.

``suite.py`` defines checks and runs them, ``speaking.py`` has those of workers that are
given messages, ``extracting.py`` those of workers that extract, and a module with the
name of a dialect those of that dialect.
"""

from __future__ import annotations

from etlstage.testing.check.suite import Check as Check
from etlstage.testing.check.suite import Finding as Finding
from etlstage.testing.check.suite import Subject as Subject
from etlstage.testing.check.suite import Verdict as Verdict
from etlstage.testing.check.suite import assert_conforms as assert_conforms
from etlstage.testing.check.suite import check_worker as check_worker

__all__ = (
    "Check",
    "Finding",
    "Subject",
    "Verdict",
    "assert_conforms",
    "check_worker",
)
