"""``etlstage try``: show what a worker replies to a few messages."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import anyio
import typer

from etlstage.cli.failure import FAILED
from etlstage.cli.options import (
    Batch,
    Dialect,
    Kind,
    Markers,
    Mode,
    Offsets,
    StageName,
    Timeout,
    Words,
)
from etlstage.cli.screen import Screen
from etlstage.cli.signals import run_interruptible
from etlstage.cli.streams import check_stdin
from etlstage.cli.subject import (
    Options,
    Program,
    lines_of,
    messages_of,
    program_of,
    silence,
)
from etlstage.config.end import Site
from etlstage.config.lookup import StageFile
from etlstage.config.variant import here
from etlstage.errors import ConfigError
from etlstage.messages import Run, StageKind
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.protocol.base import Shape
from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.telemetry.terminal import harmless
from etlstage.testing.check.speaking import blame_a_buffer
from etlstage.testing.conversation import WorkerMisbehaved, WorkerUnderTest
from etlstage.testing.dialect import kit_of
from etlstage.testing.replies import Reply
from etlstage.testing.transcript import Channel

__all__ = ("main",)


_OUTPUTS = 20  # that are shown of an extraction


def main(
    words: Words,
    *,
    kind: Kind = None,
    batch: Batch = None,
    mode: Mode = None,
    offsets: Offsets = None,
    markers: Markers = None,
    dialect: Dialect = None,
    stage: StageName = None,
    sample: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Messages, one per line; default: stdin, or the pipeline's messages.",
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Maximum number of messages to send."),
    ] = 5,
    timeout: Timeout = 5.0,
) -> int:
    """Send a few messages to a worker, and show its replies."""
    silence()
    options = Options(kind, batch, mode, offsets, markers, stage, dialect)
    program = program_of(words, options)
    spoken = program.stage.dialect
    if spoken.shape is Shape.COMMITTED:
        raise ConfigError(
            f"a worker of dialect {spoken.name} commits, and has no replies that can be"
            f" tried; see etlstage check --dialect {spoken.name}, and etlstage"
            f" {spoken.name} simulate"
        )
    screen = Screen()

    async def attempt() -> int:
        messages = _messages(words, options, program, sample)
        if options.stage is not None:
            # The stages that make them have ended before the worker is started.
            some: list[bytes] = []
            async with aclosing(messages):
                async for message in messages:
                    some.append(message)
                    if len(some) == limit:
                        break
            messages = _all(some)
        async with aclosing(messages):
            return await _converse(program, messages, limit, timeout, screen)

    return run_interruptible(attempt)


async def _converse(
    program: Program,
    messages: AsyncIterator[bytes],
    limit: int,
    timeout: float,  # noqa: ASYNC109 - of each wait, in the worker under test
    screen: Screen,
) -> int:
    stage = program.stage
    try:
        async with WorkerUnderTest(stage, timeout=timeout) as worker:
            if stage.dialect.shape is Shape.STREAM:
                _show(worker, 0, screen)
                for output in (await worker.outputs())[:_OUTPUTS]:
                    screen.tell(f"output  {kit_of(stage.dialect).shown(output)}")
                return await worker.exited()
            shown = tried = 0
            batch: list[bytes] = []
            async for message in messages:
                tried += 1
                batch.append(message)
                if stage.dialect.shape.batches and tried < limit:
                    continue
                shown = await _ask(worker, batch, shown, screen)
                batch = []
                if tried >= limit:
                    break
            if batch:
                await _ask(worker, batch, shown, screen)
            if not tried:
                raise ConfigError("there is no message to try")
            await worker.close()
    except WorkerMisbehaved as error:
        for line in f"FAIL   {error}".splitlines():
            screen.tell(program.shown(line))
        return FAILED
    return 0


async def _ask(worker: WorkerUnderTest, run: Run, shown: int, screen: Screen) -> int:
    """Send a run, and show it with its replies; return how much was shown so far."""
    try:
        replies = await worker.exchange(run)
    except WorkerMisbehaved as error:
        await blame_a_buffer(worker, error)
    shown = _show(worker, shown, screen)
    for reply in replies:
        screen.tell(f"        {harmless(_shown(reply))}")
    return shown


def _show(worker: WorkerUnderTest, shown: int, screen: Screen) -> int:
    for line in worker.transcript.shown(worker.stage.dialect, shown).splitlines():
        if not line[12:].startswith(Channel.EVENT):
            screen.tell(harmless(line[12:]))
    return len(worker.transcript)


def _shown(reply: Reply) -> str:
    if reply.refused is not None:
        return f"refused: {reply.refused or 'no reason given'}"
    count = len(reply.outputs)
    return f"{count} output{'' if count == 1 else 's'}"


# --- where messages come from ---------------------------------------------------------


def _messages(
    words: Sequence[str], options: Options, program: Program, sample: Path | None
) -> AsyncGenerator[bytes, None]:
    if program.stage.kind is StageKind.EXTRACT and sample is None:
        return _all([b'{"start": 0, "end": 10}' if program.ranges else b""])
    if sample is not None:
        return _all(lines_of(sample))
    if options.stage is not None:
        return _inputs(Path(words[0]), Path(words[0]).resolve().parent, options.stage)
    return _typed()


async def _all(messages: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    for message in messages:
        yield message


async def _typed() -> AsyncGenerator[bytes, None]:
    """Yield the lines of stdin, each as soon as it is complete."""
    check_stdin("pass --sample FILE")
    if sys.stdin.isatty():
        Screen(stderr=True).tell("type messages, one per line; Ctrl-D ends the input")
    while line := await anyio.to_thread.run_sync(
        sys.stdin.buffer.readline, abandon_on_cancel=True
    ):
        yield line.removesuffix(b"\n")


async def _inputs(file: Path, folder: Path, name: str) -> AsyncGenerator[bytes, None]:
    """Yield what would reach a stage: extracted messages, after earlier stages."""
    found = StageFile.read(file)
    keys = here(found.keys)
    site = Site(keys, folder, DeadLetters(folder, pipeline=keys.name))
    try:
        _, *others = found.stages.items()
        once = replace(keys.extract, every=None)
        source = messages_of(keys.extract.end.source(once, site))
        before = []
        for other, (_, stage) in others:
            if other == name:
                break
            assert stage is not None
            before.append(stage)
        async with aclosing(source):
            async for message in source:
                for output in await _passed(before, message):
                    yield output
    finally:
        if site.shared is not None:
            site.shared.stop()


async def _passed(stages: Sequence[Stage], message: bytes) -> list[bytes]:
    messages = [message]
    for stage in stages:
        async with AsyncSupervisor(stage) as supervisor:
            results = await supervisor.submit(messages)
        messages = [output for result in results for output in result.outputs]
    return messages
