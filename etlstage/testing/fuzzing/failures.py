"""
Cases that have failed, stored to be played again.

Each has two files below ``.etlstage/failures``: the case as JSON, and a recording of
its conversation, for ``etlstage replay FILE``.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio

from etlstage.errors import ConfigError, os_reason
from etlstage.messages import StageKind
from etlstage.pipeline.secret import Secrets
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.protocol.registry import dialect_from_plain
from etlstage.stage import BatchPolicy, Stage
from etlstage.testing.fuzzing.oracle import (
    Case,
    CaseFailed,
    FailureKind,
    Oracles,
    converse,
    end,
    judge,
)
from etlstage.testing.fuzzing.steps import UnderTest, under_test
from etlstage.testing.recording.recording import RecordedLaunch, Recording
from etlstage.testing.transcript import Entry
from etlstage.transport import LaunchRequest, launch_worker

__all__ = ("FOLDER", "Failure", "FailureOrigin", "Failures")

FOLDER: Final = Path(".etlstage", "failures")
_VERSION: Final = 1
_UNREADABLE: Final = (
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a file that is not a kept case raises where it is interpreted."""
_DRIVERS: Final = {Mode.BATCH_SUPERVISOR: "supervisor", Mode.BATCH_WORKER: "worker"}


class FailureOrigin(NamedTuple):
    """Where a worker is specified: on the command line, or in a pipeline file."""

    words: tuple[str, ...]
    """The command of the worker; or the pipeline file."""
    stage: str | None = None
    """Name of the stage in the pipeline file; None: ``words`` is a command."""

    def __str__(self) -> str:
        command = shlex.join(self.words)
        return command if self.stage is None else f"{command} --stage {self.stage}"


@dataclass(frozen=True)
class Failure:
    """A case that has failed."""

    stage: Stage
    """Command and dialect."""
    origin: FailureOrigin
    case: Case
    oracles: Oracles
    kind: FailureKind
    """How the worker failed."""
    timeout: float = 5.0
    path: Path = FOLDER
    """The file of the case; the recording is beside it."""

    @property
    def recording(self) -> Path:
        """The file with the recorded conversation."""
        return self.path.with_suffix(".rec")

    async def play(self, times: int = 1) -> CaseFailed | None:
        """Play the case to fresh processes; return its failure, if it failed."""
        stage = self.case.on(self.stage)

        def start() -> UnderTest:
            return under_test(stage, timeout=self.timeout)

        for _ in range(times):
            try:
                await judge(start, self.case, self.oracles)
            except CaseFailed as failed:
                return failed
        return None

    def written(self) -> Iterator[str]:
        """Yield a numbered line for each step, with equal ones in a row as one line."""
        *lines, last = self.case.written(self.case.on(self.stage).dialect)
        number = 1
        for line, same in groupby(lines):
            end = number + len([*same]) - 1
            yield f"{number}-{end}. {line}" if end > number else f"{number}. {line}"
            number = end + 1
        yield f"{number}. {last}"

    def program(self) -> Iterator[str]:
        """Yield the lines of a program that reproduces the failure."""
        case, dialect = self.case, self.stage.dialect
        (*words,), name = self.origin
        given, more = self.oracles.given, ""
        if self.timeout != Failure.timeout:
            given = {"timeout": self.timeout, **given}
        if name is not None:
            yield "from etlstage.config.lookup import stage_from_yaml"
            worker = f"stage_from_yaml({words[0]!r}, {name!r})"
        elif self._of_command:
            worker, given = repr(words), {**self._more, **given}
        else:
            yield "from etlstage import Stage"
            yield "from etlstage.messages import StageKind"
            yield "from etlstage.protocol.registry import dialect_from_plain"
            usual = type(dialect)().plain()
            own = {k: v for k, v in dialect.plain().items() if v != usual.get(k)}
            worker = "stage"
            if self.stage.batch != BatchPolicy():
                yield "from etlstage.stage import BatchPolicy"
                more = f", batch=BatchPolicy(size={self.stage.batch.size})"
        yield from case.imports()
        yield ""
        if worker == "stage":
            yield f"dialect = dialect_from_plain({ {'name': dialect.name, **own} })"
            kind = f"StageKind.{self.stage.kind.name}"
            yield f"command = {tuple(words)}"
            yield f"stage = Stage(name='worker', kind={kind}, worker=command, dialect=dialect{more})"
        options = "".join(f", {name}={value!r}" for name, value in given.items())
        yield f"verify({worker}, {case!r}{options})"

    @property
    def _of_command(self) -> bool:
        """Whether :func:`verify` makes the same stage of the command alone."""
        stage, dialect = self.stage, self.stage.dialect
        if not isinstance(dialect, MarkerDialect):
            return False
        usual = MarkerDialect(mode=dialect.mode)
        made = replace(stage, dialect=usual, batch=BatchPolicy())
        return self.case.on(made) == self.case.on(stage)

    @property
    def _more(self) -> dict[str, object]:
        dialect = self.stage.dialect
        assert isinstance(dialect, MarkerDialect)
        more: dict[str, object] = {}
        if dialect.mode in _DRIVERS:
            more["batch"] = _DRIVERS[dialect.mode]
        if self.stage.kind is StageKind.LOAD:
            more["kind"] = self.stage.kind.value
        return more

    def drop(self) -> None:
        """Delete its files."""
        self.path.unlink(missing_ok=True)
        self.recording.unlink(missing_ok=True)


class Failures:
    """
    The failed cases that are stored in a folder.

    Args:
        folder: The folder; created when the first case is stored.
        find: Returns the stage of a given name in a pipeline file.

    """

    def __init__(
        self, folder: Path = FOLDER, *, find: Callable[[str, str], Stage]
    ) -> None:
        self._folder = folder
        self._find = find

    def __iter__(self) -> Iterator[Path]:
        """Yield the files of all cases."""
        return iter(sorted(self._folder.glob("*.json")))

    def read(self, path: Path) -> Failure:
        """Return the case in a file; raise ConfigError if it can't be read."""
        return self._made(path, *_read(path))

    def of(
        self, wanted: FailureOrigin, skipped: Callable[[ConfigError], None]
    ) -> Iterator[Failure]:
        """Yield the cases of one worker; call ``skipped`` for each unreadable file."""
        for path in self:
            try:
                plain, origin = _read(path)
                kept = self._made(path, plain, origin) if wanted == origin else None
            except ConfigError as error:
                skipped(error)
            else:
                if kept is not None:
                    yield kept

    def keep(self, failure: Failure, secrets: Secrets) -> Failure:
        """
        Store a case, play it once more, and store the recording of that.

        Args:
            failure: The case.
            secrets: Secrets to conceal in the recorded command.

        Raises:
            ConfigError: If the folder can't be written.

        """
        words, name = failure.origin
        worker: dict[str, object] = {"file": words[0], "stage": name}
        if name is None:
            worker = {
                "command": words,
                "kind": failure.stage.kind.value,
                "dialect": failure.stage.dialect.plain(),
                "batch": asdict(failure.stage.batch),
            }
        plain = {
            "version": _VERSION,
            "worker": worker,
            "found": failure.kind.label,
            "timeout": failure.timeout,
            "case": failure.case.to_plain(),
            "oracles": asdict(failure.oracles),
        }
        text = json.dumps(plain, indent=2) + "\n"
        number = hashlib.sha256(text.encode()).hexdigest()[:8]
        kept = replace(
            failure, path=self._folder / f"{failure.kind.label}-{number}.json"
        )
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            kept.path.write_text(text, encoding="utf-8")
            kept.recording.unlink(missing_ok=True)
            anyio.run(_record, kept, secrets).save(kept.recording)
        except OSError as error:
            why = os_reason(error)
            raise ConfigError(f"{self._folder} can't be written: {why}") from None
        return kept

    def _made(
        self, path: Path, plain: Mapping[str, Any], origin: FailureOrigin
    ) -> Failure:
        worker = plain["worker"]
        with _readable(path):
            if origin.stage is not None:
                stage = self._find(origin.words[0], origin.stage)
            else:
                stage = Stage(
                    name="worker",
                    kind=StageKind(worker["kind"]),
                    worker=origin.words,
                    dialect=dialect_from_plain(worker["dialect"]),
                    batch=BatchPolicy(**worker.get("batch", {})),
                )
            return Failure(
                stage,
                origin,
                Case.from_plain(plain["case"]),
                Oracles(**plain["oracles"]),
                {kind.label: kind for kind in FailureKind}[plain["found"]],
                plain["timeout"],
                path,
            )


def _read(path: Path) -> tuple[dict[str, Any], FailureOrigin]:
    with _readable(path):
        plain = json.loads(path.read_bytes())
        assert plain["version"] == _VERSION, "unsupported version"
        worker = plain["worker"]
        if "stage" in worker:
            return plain, FailureOrigin((worker["file"],), worker["stage"])
        return plain, FailureOrigin(tuple(worker["command"]))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except _UNREADABLE as error:
        raise ConfigError(f"{path} is not a kept case: {error!r}") from None


class _Notes:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.exit: int | None = None
        self.stopped = False

    def add(self, entry: Entry, /) -> None:
        self.entries.append(entry)

    def end(self, exit_: int | None, /, *, stopped: bool) -> None:
        self.exit, self.stopped = exit_, stopped


async def _record(failure: Failure, secrets: Secrets) -> Recording:
    notes = _Notes()

    def begin(_request: LaunchRequest) -> _Notes:
        return notes

    stage = failure.case.on(failure.stage)
    launch = RecordedLaunch(launch_worker, begin)
    with suppress(CaseFailed):
        async with under_test(stage, launch=launch, timeout=failure.timeout) as worker:
            await converse(worker, failure.case.steps)
            await end(worker)
    return Recording(
        stage=stage.name,
        kind=stage.kind,
        dialect=stage.dialect,
        command=tuple(map(secrets.conceal, stage.program.command)),
        entries=tuple(notes.entries),
        exit=notes.exit,
        stopped=notes.stopped,
    )
