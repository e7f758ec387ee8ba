"""Bytes to and from a worker."""

from __future__ import annotations

from etlstage.transport.base import Child as Child
from etlstage.transport.base import Launch as Launch
from etlstage.transport.base import LaunchRequest as LaunchRequest
from etlstage.transport.base import Readable as Readable
from etlstage.transport.base import Wire as Wire
from etlstage.transport.launcher import LaunchTerms as LaunchTerms
from etlstage.transport.launcher import TermsRefused as TermsRefused
from etlstage.transport.process import launch_over_pipes as launch_over_pipes
from etlstage.transport.socket import launch_over_socket as launch_over_socket
from etlstage.transport.socket import launch_worker as launch_worker

__all__ = (
    "Child",
    "Launch",
    "LaunchRequest",
    "LaunchTerms",
    "Readable",
    "TermsRefused",
    "Wire",
    "launch_over_pipes",
    "launch_over_socket",
    "launch_worker",
)
