"""``etlstage pipe``: a program as a supervised filter, from stdin to stdout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from etlstage.cli.closing import show_report
from etlstage.cli.logs import configure
from etlstage.cli.run import exit_code, watch
from etlstage.cli.screen import Screen
from etlstage.cli.signals import Signals
from etlstage.cli.subject import Options, program_of
from etlstage.cli.verbosity import Verbosity
from etlstage.errors import ConfigError
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.descriptor import DescriptorSink, DescriptorSource
from etlstage.pipeline.pipeline import Pipeline

__all__ = ("pipe",)

_STDIN, _STDOUT = 0, 1


def pipe(
    command: Sequence[str],
    options: Options,
    signals: Signals,
    *,
    file: Path | None = None,
    separator: bytes = b"\n",
    values: Sequence[str] = (),
    dead_letters: Path | None = None,
    verbosity: Verbosity,
) -> int:
    """
    Pass the messages of stdin through workers to stdout; return the exit code.

    Args:
        command: Of the worker.
        options: What the command line says of it.
        signals: What the run obeys, once it has begun.
        file: What is read in place of stdin.
        separator: What stands behind each message, on both sides.
        values: Keys of the stage that are set, each as in ``timeout.message=10s``.
        dead_letters: Folder of the messages that it can't process; None: the first
            ends the run.
        verbosity: How much is logged, and whether the ledger is shown, on stderr.

    Raises:
        ConfigError: If anything in the command line is wrong.
        KeyboardInterrupt: By a signal before the run has begun.

    """
    stage = replace(program_of(command, options, values).stage, name="worker")
    letters = None
    if dead_letters is not None:
        letters = DeadLetters(dead_letters, pipeline="pipe")
    err = Screen(stderr=True)
    configure(err, verbosity)
    with ExitStack() as stack:
        descriptor = _STDIN if file is None else _opened(file, stack)
        pipeline = Pipeline(
            name="pipe",
            source=DescriptorSource(
                descriptor,
                separator,
                max_message=stage.max_message,
                name="stdin" if file is None else str(file),
            ),
            stages=[stage],
            sink=DescriptorSink(_STDOUT, separator),
            dead_letters=letters,
        )
        signals.begin()
        report = watch(pipeline, signals, err, verbosity)
    if not verbosity.quiet:
        show_report(report, err)
    return exit_code(report, debug=verbosity.debug)


def _opened(file: Path, stack: ExitStack) -> int:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise ConfigError(f"{file} can't be read: {said}") from None
    stack.callback(os.close, descriptor)
    return descriptor
