"""What checks of dialect ``cocaine`` say to a worker, and ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from etlstage.messages import Run
from etlstage.protocol.cocaine import CocaineSession, CocaineVersion
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import Opened
from etlstage.stage.stage import Stage
from etlstage.testing.check.subject import Subject
from etlstage.testing.conversation import WorkerUnderTest

__all__ = (
    "as_expected",
    "begun",
    "dialect_of",
    "runs_of",
    "version_of",
    "whole",
    "with_dialect",
)


def dialect_of(subject: Subject) -> CocaineDialect:
    """Return what its worker speaks."""
    assert isinstance(subject.dialect, CocaineDialect)
    return subject.dialect


def with_dialect(subject: Subject, dialect: CocaineDialect) -> Stage:
    """Return its stage with other settings of the dialect."""
    return replace(subject.stage, dialect=dialect)


def version_of(worker: WorkerUnderTest) -> CocaineVersion:
    """Return the version that a worker was found to speak."""
    assert isinstance(worker.session, CocaineSession)
    return worker.session.version


def runs_of(subject: Subject, count: int) -> list[Run]:
    """Return so many exchanges: of a message each."""
    return [[message] for message in subject.messages(count)]


def begun(subject: Subject, number: int, messages: Run) -> Opened:
    """Return what opens a session, and leaves it open."""
    return whole(subject, number, messages)._replace(ended=False)


def whole(subject: Subject, number: int, messages: Run) -> Opened:
    """Return a session that ends with its chunks."""
    return Opened(number, messages, each=False)


async def as_expected(
    subject: Subject, worker: WorkerUnderTest, runs: Sequence[Run], how: str
) -> None:
    """Assert that the replies are those that each would get alone."""
    replies = await worker.replies()
    await subject.settle(worker)
    if difference := await subject.differs(runs, replies):
        worker.fail(f"{difference}, {how}")
