"""How long tests wait for other processes."""

from typing import Final

HANG: Final = 25.0
"""
Seconds that are enough on a shared machine.

Less than a stage's deadlines for a start and a commit: a test that waits for one fails.
"""
