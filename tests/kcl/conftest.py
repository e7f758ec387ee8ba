from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import pytest

import etlstage
from etlstage.protocol.events import Assignment
from etlstage.protocol.kcl.lines import Version
from etlstage.protocol.kcl.session import KclSession
from tests.kcl.client import CURRENT, OLD, downloaded
from tests.kcl.driver import Driver, driven

Sample: TypeAlias = Callable[..., AbstractContextManager[Driver]]
_ROOT = Path(etlstage.__file__).parent.parent


@pytest.fixture
def current() -> Sample:
    """Return a function that starts the sample of the current client."""
    return _sample(CURRENT, Version.V2)


@pytest.fixture
def old() -> Sample:
    """Return a function that starts the sample of the client for old daemons."""
    return _sample(OLD, Version.V1)


@pytest.fixture
def script(tmp_path: Path) -> Sample:
    """Return a function that starts a processor from its source."""

    def start(
        source: str, version: Version = Version.V2, client: str = ""
    ) -> AbstractContextManager[Driver]:
        file = tmp_path / "processor.py"
        file.write_text(source)
        paths = [os.fspath(_ROOT), *([str(downloaded(client))] if client else [])]
        return driven(
            KclSession(Assignment("shardId-000000000000"), version),
            [sys.executable, str(file)],
            PYTHONPATH=":".join(paths),
        )

    return start


def _sample(client: str, version: Version) -> Sample:
    def start(position: object = None) -> AbstractContextManager[Driver]:
        folder = downloaded(client)
        sample = folder / "samples" / "sample_kclpy_app.py"
        return driven(
            KclSession(Assignment("shardId-000000000000", position), version),
            [sys.executable, str(sample)],
            PYTHONPATH=str(folder),
        )

    return start
