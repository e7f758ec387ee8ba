"""
``etlstage test``: the tests of a pipeline file, with nothing loaded for real.

Each stage in turn is given all outputs of the stage before. A test is about what a
worker does with messages, not about the machine: each stage has one worker, restarts
hardly wait, and every message that can't be processed becomes a dead letter, however
many there are. Rows are those of the pipeline's two ends; if an end needs Spark, it
runs on this machine.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import anyio.to_thread

from etlstage.cli import junit as xml
from etlstage.cli.failure import FAILED
from etlstage.cli.logs import configure
from etlstage.cli.options import (
    Debug,
    File,
    JunitFile,
    Overlays,
    Values,
    Verbosity,
    changes_of,
)
from etlstage.cli.screen import Screen
from etlstage.cli.signals import interruptible, run_interruptible
from etlstage.cli.subject import messages_of, silence
from etlstage.config.build import hidden_texts
from etlstage.config.case import Items, LetterKeys, MessageText, flat
from etlstage.config.document import Document
from etlstage.config.end import Site
from etlstage.config.loader import LoadedCase, cases_of, load
from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
from etlstage.config.stages import StageKeys, stage_of
from etlstage.config.variant import here, lenient
from etlstage.errors import ConfigError, EtlstageError, os_reason
from etlstage.messages import StageKind, counted
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.secret import Secrets
from etlstage.pipeline.worker_source import WorkerSource
from etlstage.stage import PoolPolicy, Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.telemetry.terminal import harmless
from etlstage.transport.watchdog import scratch

__all__ = ("main",)


class CaseResult(NamedTuple):
    """The outcome of a test."""

    case: LoadedCase
    failures: Sequence[CaseFailure]
    seconds: float


def main(
    file: File,
    *,
    overlays: Overlays = None,
    values: Values = None,
    junit: JunitFile = None,
    debug: Debug = False,
) -> int:
    """Run the tests in a pipeline file, and in the file of tests beside it."""
    keys, document = load(file, changes_of(overlays, values))
    cases = cases_of(keys, document)
    if not cases:
        raise ConfigError(f"{file}: has no tests; write them under the key tests")
    screen = Screen()
    outcomes = []
    with interruptible(), scratch("test") as folder, _rows(keys) as rows:
        secrets = _secrets(keys, document, cases, folder)
        if debug:
            configure(Screen(stderr=True), Verbosity(debug=True), secrets=secrets)
        else:
            silence()
        for i, case in enumerate(cases):
            (own := folder / str(i)).mkdir()
            trial = CaseRun(keys, document, case, own, rows=rows)
            outcomes.append(_outcome(trial, case, secrets))
            for line in _lines(outcomes[-1]):
                screen.print(line, soft_wrap=True, highlight=False, markup=False)
    failed = sum(1 for outcome in outcomes if outcome.failures)
    total = f"{counted(len(outcomes), 'test')}: {len(outcomes) - failed} passed"
    screen.print(f"{total}, {failed} failed" if failed else total, highlight=False)
    if junit is not None:
        xml.write(junit, xml.junit(str(file), [*map(_case, outcomes)]))
    return FAILED if failed else 0


def _secrets(
    keys: PipelineKeys, document: Document, cases: Sequence[LoadedCase], folder: Path
) -> Secrets:
    """Return what must not be shown of the pipeline and of its tests."""
    hidden = hidden_texts(keys, document)
    for i, case in enumerate(cases):
        env = _env(case, folder / str(i))
        variables = {value: f"${name}" for name, value in env.items()}
        hidden = {**variables, **hidden, **case.document.hidden}
    return Secrets(hidden)


@contextmanager
def _rows(keys: PipelineKeys) -> Iterator[RowEnds]:
    rows = RowEnds(keys)
    try:
        yield rows
    finally:
        rows.stop()


def _outcome(trial: CaseRun, case: LoadedCase, secrets: Secrets) -> CaseResult:
    began = time.monotonic()
    failures = [
        failure._replace(
            what=secrets.conceal(failure.what),
            lines=tuple(map(secrets.conceal, failure.lines)),
        )
        for failure in run_interruptible(trial.run)
    ]
    return CaseResult(case, failures, time.monotonic() - began)


def _lines(outcome: CaseResult) -> Iterator[str]:
    verdict = "FAIL" if outcome.failures else "ok  "
    yield f"{verdict} {outcome.case.keys.name} ({outcome.seconds:.2f} s)"
    for failure in outcome.failures:
        yield f"     {failure.where}: {harmless(failure.what)}"
        yield from (f"       {harmless(line)}" for line in failure.lines)


def _case(outcome: CaseResult) -> xml.XmlCase:
    failures = [
        (failure.what, "\n".join((f"{failure.where}: {failure.what}", *failure.lines)))
        for failure in outcome.failures
    ]
    return xml.XmlCase(outcome.case.keys.name, outcome.seconds, failures)


# --- one test -------------------------------------------------------------------------

DELAY: Final = 0.001  # seconds before a restart
SHOWN: Final = 20  # lines of a difference


class CaseFailure(NamedTuple):
    """A difference from what a test expects."""

    where: str
    """File, line and column of the expectation."""
    what: str
    lines: tuple[str, ...] = ()
    """The difference: expected lines with ``-``, actual lines with ``+``."""


class Letter(NamedTuple):
    """A message that could not be processed."""

    message: bytes
    error: str


class CaseRun:
    """
    One run of a test.

    Args:
        keys: The pipeline.
        document: Its file.
        case: The test.
        folder: A folder for this test alone.
        rows: Makes messages of rows, and rows of messages.

    """

    def __init__(
        self,
        keys: PipelineKeys,
        document: Document,
        case: LoadedCase,
        folder: Path,
        *,
        rows: RowEnds,
    ) -> None:
        self._keys = keys
        self._rows = rows
        self._loaded: list[bytes] = []
        self._folder = document.folder
        self._case = case
        self._own = folder
        wanted = case.keys
        self._stages = [
            stage for _, stage in keys.stages() if wanted.stage in (None, stage.name)
        ]
        if wanted.stage is None and wanted.input is not None:
            del self._stages[0]
        loads = wanted.files or wanted.output_rows is not None
        if wanted.stage is None and not loads:
            del self._stages[-1]
        self._letters: list[Letter] = []

    async def run(self) -> list[CaseFailure]:
        """Run the test and return its failures; none if it has passed."""
        wanted = self._case.keys
        try:
            if wanted.input_rows is not None or wanted.output_rows is not None:
                await self._rows.start()
            with anyio.fail_after(wanted.timeout):
                batches = await self._outputs()
        except TimeoutError:
            return [self._failure("", f"took more than {wanted.timeout:g} s")]
        except EtlstageError as error:
            return [self._failure("", str(error))]
        return [
            *self._wrong_output(batches),
            *self._wrong_rows(),
            *self._wrong_letters(),
            *self._files(),
        ]

    async def _outputs(self) -> list[list[bytes]]:
        given = self._case.keys.input
        batches = [[]] if given is None else _batches(given)
        for keys in self._stages:
            if isinstance(keys, ExtractKeys) and keys.end.rows:
                rows = [row.data for row in self._case.keys.input_rows or ()]
                batches = [await self._rows.extracted(keys, rows, self._own)]
                continue
            if isinstance(keys, LoadKeys) and keys.end.rows:
                messages = [message for batch in batches for message in batch]
                self._loaded, letters = await self._rows.loaded(
                    keys, messages, self._own
                )
                self._letters += [Letter(x.message, x.error) for x in letters]
                continue
            stage = self._prepared(keys)
            if stage.kind is StageKind.EXTRACT:
                batches = [await self._extracted(stage)]
                continue
            made = await self._processed(stage, batches)
            # A load worker's output is discarded; its input is kept for comparison.
            batches = batches if stage.kind is StageKind.LOAD else made
        return batches

    def _prepared(self, keys: StageKeys) -> Stage:
        stage, case = stage_of(keys, self._folder), self._case.keys
        env = _env(self._case, self._own)
        restart = replace(stage.restart, delay=DELAY, max_delay=DELAY)
        stage = replace(
            stage,
            worker=replace(stage.program, env={**stage.program.env, **env}),
            restart=restart,
        )
        if stage.kind is StageKind.EXTRACT:
            return stage
        stage = replace(stage, workers=PoolPolicy())
        longest = max(map(len, _batches(case.input or ())), default=0)
        if _is_nested(case.input) and longest:
            stage = replace(stage, batch=replace(stage.batch, size=longest))
        return stage

    async def _extracted(self, stage: Stage) -> list[bytes]:
        source = WorkerSource(stage, offsets=self._keys.extract.offsets)
        return [message async for message in messages_of(source)]

    async def _processed(
        self, stage: Stage, batches: list[list[bytes]]
    ) -> list[list[bytes]]:
        made: list[list[bytes]] = []
        async with AsyncSupervisor(stage) as supervisor:
            for batch in batches:
                results = await supervisor.submit(batch)
                made.append([output for r in results for output in r.outputs])
                self._letters += [
                    Letter(r.message, str(r.error)) for r in results if r.error
                ]
        if (doubt := supervisor.doubt) is not None:
            raise doubt
        return made

    # --- what is wrong --------------------------------------------------------------

    def _wrong_output(self, batches: list[list[bytes]]) -> Iterator[CaseFailure]:
        wanted = self._case.keys.output
        if wanted is None:
            return
        if not _is_nested(wanted):
            made = [message for batch in batches for message in batch]
            yield from self._different("output", list(flat(wanted)), made)
            return
        for i, (expected, made) in enumerate(zip(wanted, batches, strict=True), 1):
            assert not isinstance(expected, MessageText)
            yield from self._different("output", expected, made, f" of batch {i}")

    def _different(
        self, key: str, wanted: Sequence[MessageText], made: list[bytes], what: str = ""
    ) -> Iterator[CaseFailure]:
        same = [w.matches(m) for w, m in zip(wanted, made, strict=False)]
        if len(wanted) == len(made) and all(same):
            return
        # Matching messages are shown as the test writes them: only others differ.
        found = [
            str(wanted[i]) if i < len(same) and same[i] else _shown(message)
            for i, message in enumerate(made)
        ]
        yield self._failure(key, f"{key}{what} differs", _diff(map(str, wanted), found))

    def _wrong_rows(self) -> Iterator[CaseFailure]:
        wanted = self._case.keys.output_rows
        if wanted is None:
            return
        # A row is a JSON object, even if it is written as text.
        as_json = [w._replace(form="json") if w.form == "text" else w for w in wanted]
        pairs = _pairs(as_json, self._loaded)
        met = set(pairs.values())
        lines = [f"- {row}" for i, row in enumerate(wanted) if i not in met]
        rows = enumerate(self._loaded)
        lines += [f"+ {_shown(row)}" for i, row in rows if i not in pairs]
        if lines:
            yield self._failure("output_rows", "rows differ", lines)

    def _wrong_letters(self) -> Iterator[CaseFailure]:
        wanted, letters = self._case.keys.dead_letters, self._letters
        fits = (_fits(w, x) for w, x in zip(wanted, letters, strict=False))
        if len(wanted) == len(letters) and all(fits):
            return
        expected = [f"{w.message or '(any)'}: {w.reason or '(any)'}" for w in wanted]
        found = [f"{_shown(x.message)}: {x.error}" for x in letters]
        lines = [f"- {line}" for line in expected] + [f"+ {line}" for line in found]
        yield self._failure("dead_letters", "dead letters differ", lines)

    def _files(self) -> Iterator[CaseFailure]:
        for name, wanted in self._case.keys.files.items():
            try:
                made = (self._own / name).read_bytes()
            except OSError as error:
                yield self._failure("files", f"file {name}: {os_reason(error)}")
                continue
            if not wanted.matches(made):
                lines = _diff(str(wanted).splitlines(), _shown(made).splitlines())
                yield self._failure("files", f"file {name} differs", lines)

    def _failure(self, key: str, what: str, lines: Sequence[str] = ()) -> CaseFailure:
        if len(lines) > SHOWN:
            lines = [*lines[:SHOWN], f"... and {len(lines) - SHOWN} more lines"]
        return CaseFailure(self._case.where(key), what, tuple(lines))


def _env(case: LoadedCase, folder: Path) -> dict[str, str]:
    """Return the variables of a test that has this folder."""
    env = case.keys.env.items()
    return {name: value.replace("{folder}", str(folder)) for name, value in env}


def _batches(items: Items) -> list[list[bytes]]:
    if not _is_nested(items):
        return [[item.data for item in flat(items)]]
    return [[one.data for one in flat([item])] for item in items]


def _is_nested(items: Items | None) -> bool:
    return bool(items) and not isinstance((items or ())[0], MessageText)


def _pairs(wanted: Sequence[MessageText], rows: Sequence[bytes]) -> dict[int, int]:
    """
    Return which row meets which expectation, by index: as many as possible.

    A row is reassigned if the expectation that has it can have another one.
    """
    pairs: dict[int, int] = {}
    fixed: set[int] = set()  # rows that can't be reassigned
    for new in range(len(wanted)):
        tried = set(fixed)
        queue: list[tuple[int, dict[int, int]]] = [(new, {})]
        for one, moved in queue:
            fits = wanted[one].matches
            free = (i for i, row in enumerate(rows) if i not in pairs and fits(row))
            if (found := next(free, None)) is not None:
                pairs |= {**moved, found: one}
                break
            taken = [i for i in pairs if i not in tried and fits(rows[i])]
            tried.update(taken)
            queue += [(pairs[i], {**moved, i: one}) for i in taken]
        else:
            fixed = tried
    return pairs


def _fits(wanted: LetterKeys, letter: Letter) -> bool:
    message = wanted.message is None or wanted.message.matches(letter.message)
    return message and re.search(wanted.reason, letter.error) is not None


def _diff(wanted: Iterator[str] | Sequence[str], made: Sequence[str]) -> list[str]:
    """Return the lines of both; a leading sign marks those that only one has."""
    lines = difflib.ndiff(list(wanted), list(made))
    return [line for line in lines if not line.startswith("?")]


def _shown(message: bytes) -> str:
    try:
        return message.decode()
    except UnicodeDecodeError:
        return repr(message)


# --- rows -----------------------------------------------------------------------------


class RowEnds:
    """
    One Spark session for all tests that have rows; started with the first.

    Args:
        keys: The pipeline; its setting of where the session runs is ignored.

    """

    def __init__(self, keys: PipelineKeys) -> None:
        self._keys = here(keys)
        self._site: Site | None = None

    async def start(self) -> None:
        """Start the session if an end needs one; test timeouts do not cover it."""
        ends = self._keys.extract.end, self._keys.load.end
        if any(end.rows and end.needs_spark for end in ends):
            site = self._at(Path.cwd())
            await anyio.to_thread.run_sync(lambda: site.session().start())

    def stop(self) -> None:
        """Stop the session, if there is one."""
        if self._site is not None and self._site.shared is not None:
            self._site.shared.stop()

    async def extracted(
        self, keys: ExtractKeys, rows: Sequence[bytes], folder: Path
    ) -> list[bytes]:
        """
        Return the messages that rows become.

        Args:
            keys: The extract stage; its input is replaced.
            rows: JSON objects.
            folder: Where the rows may be written.

        """
        path = folder / "rows.json"
        path.write_bytes(b"".join(row.replace(b"\n", b" ") + b"\n" for row in rows))
        source = keys.end.reading(path).source(keys, self._at(folder))
        return [message async for message in messages_of(source)]

    async def loaded(
        self, keys: LoadKeys, messages: list[bytes], folder: Path
    ) -> tuple[list[bytes], list[DeadLetter]]:
        """
        Return the rows that messages become, and dead letters for those that don't fit.

        Args:
            keys: The load stage; its output is replaced.
            messages: The messages to load.
            folder: Where the stage may write.

        """
        end = keys.end.writing(folder)
        keys = replace(lenient(keys), end=end)
        letters = DeadLetters(folder / "state", pipeline="test")
        site = self._at(folder, letters)
        async with end.sink(keys, site) as sink:
            await sink.write(messages)
            await sink.finish()
        await letters.sync()
        try:
            rows = await anyio.to_thread.run_sync(end.rows_in, folder, site)
            return rows, list(letters.letters())
        finally:
            letters.close()

    def _at(self, folder: Path, letters: DeadLetters | None = None) -> Site:
        """Return the site that an end is given; all sites share one session."""
        letters = letters or DeadLetters(folder / "state", pipeline="test")
        shared = self._site.shared if self._site is not None else None
        self._site = Site(self._keys, folder, letters, shared=shared)
        return self._site
