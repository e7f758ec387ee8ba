"""
Dialect ``kcl``: record processors of the Kinesis Client Library.

Source: the protocol of its multi-language daemon and, where the document and daemons
differ, what daemons and clients do. Each line is a JSON object; one action at a time is
in flight, and a record is done once a checkpoint covers it.
"""

from __future__ import annotations

from etlstage.protocol.kcl.checkpoint import ShardPosition as ShardPosition
from etlstage.protocol.kcl.lines import Version as Version
from etlstage.protocol.kcl.processor import ProcessorSession as ProcessorSession
from etlstage.protocol.kcl.session import KclSession as KclSession

__all__ = ("KclSession", "ProcessorSession", "ShardPosition", "Version")
