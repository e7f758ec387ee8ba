"""Special runs: of a part of a pipeline, recorded, or with faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from etlstage.cli.failure import complain, naming
from etlstage.cli.screen import Screen
from etlstage.cli.streams import check_stdout
from etlstage.config.build import WHOLE, Only, pipeline_from_here
from etlstage.config.fault import StageFaultKeys
from etlstage.config.reading import Changes
from etlstage.config.variant import DryRun
from etlstage.errors import ConfigError
from etlstage.messages import counted
from etlstage.pipeline.descriptor import DescriptorSink
from etlstage.pipeline.interfaces import Output
from etlstage.pipeline.runner import Runner
from etlstage.telemetry import Meter
from etlstage.transport import Launch, launch_worker
from etlstage.transport.watchdog import scratch

if TYPE_CHECKING:
    from etlstage.cli.faults import InjectedFaults
    from etlstage.testing.recording.recording import RecordingFolder

__all__ = ("Printed", "Trial")


class Trial:
    """
    A run that is recorded, limited or made to fail; only such a run needs testing code.

    Args:
        record: Folder for the conversations with its workers, or None.
        limit: Maximum bytes of each recorded conversation.
        seed: Seed for faults in the file that have a probability; None: faults are not
            allowed.
        most: Maximum number of messages to extract; None: all.
        until: The stage whose messages are printed, in place of being loaded; None:
            everything is loaded.
        only: The part to run of a pipeline with durable edges.

    Raises:
        ConfigError: If nothing can be recorded in that folder, or both ``until`` and
            ``only`` are given.

    """

    def __init__(
        self,
        record: Path | None = None,
        limit: int = 0,
        *,
        seed: int | None = None,
        most: int | None = None,
        until: str | None = None,
        only: Only = WHOLE,
    ) -> None:
        if until is not None and only != WHOLE:
            raise ConfigError(
                "--until keeps nothing at durable edges, so it can't be combined with"
                " --only-before and --only-behind"
            )
        self.until: str | None = until
        self._only = only
        self._most = most
        self._recordings: RecordingFolder | None = None
        self._faults: InjectedFaults | None = None
        # Imported only for the few runs that need it.
        if record is not None:
            self._recordings = _recording_folder(record, limit)
        if seed is not None:
            from etlstage.cli.faults import InjectedFaults

            self._faults = InjectedFaults(seed)

    def build(
        self, file: Path, changes: Changes, meter: Meter | None, stack: ExitStack
    ) -> Runner:
        """
        Build the pipeline of a file; see :func:`pipeline_from_here`.

        Args:
            file: The pipeline.
            changes: What is laid over it.
            meter: Where to count what happens in its stages.
            stack: Closed after the run.

        """
        special = self._recordings is not None or self._faults is not None
        pipeline = pipeline_from_here(
            file,
            changes,
            meter=meter,
            launch=self._launch if special else None,
            faults=self._faults is not None,
            trial=self._printing(stack),
            limit=self._most,
            only=self._only,
        )
        if self._recordings is not None:
            self._recordings.secrets = pipeline.secrets
        return pipeline

    def _printing(self, stack: ExitStack) -> DryRun | None:
        if self.until is None:
            return None
        check_stdout()
        state = stack.enter_context(scratch("until"))
        return DryRun("local", state, Printed(), self.until)

    def tell(self) -> None:
        """Report what was recorded, and what faults led to."""
        if self._faults is not None:
            self._faults.tell()
        if self._recordings is not None:
            _tell_recordings(self._recordings)

    def report(self) -> dict[str, object]:
        """Return what it adds to the closing report."""
        return {} if self._faults is None else {"faults": self._faults.report()}

    def _launch(
        self, keys: Sequence[StageFaultKeys], dialects: Mapping[str, str]
    ) -> Launch:
        launch: Launch = launch_worker
        if self._faults is not None:
            launch = self._faults.launch(launch, keys, dialects)
        if self._recordings is not None:
            from etlstage.testing.recording.recording import RecordedLaunch

            launch = RecordedLaunch(launch, self._recordings)
        return launch


def _recording_folder(path: Path, limit: int) -> RecordingFolder:
    """
    Return the folder for the conversations of a run.

    Args:
        path: The folder; made if it does not exist.
        limit: Maximum bytes of a recorded conversation.

    Raises:
        ConfigError: If it can't be made, or holds recordings.

    """
    from etlstage.testing.recording.recording import RecordingFolder

    with naming(f"--record {path}"):
        folder = RecordingFolder(path, limit=limit)
        if any(path.glob("*.rec")):
            raise ConfigError(
                f"--record {path}: holds recordings of another run; remove them, or name"
                " another folder"
            )
    return folder


def _tell_recordings(folder: RecordingFolder) -> None:
    """Report how many recordings there are, and which are not complete."""
    for problem in folder.problems:
        complain(problem)
    line = f"{counted(folder.count, 'conversation')} recorded in {folder.path}"
    Screen().print(line, soft_wrap=True, highlight=False, markup=False)


class Printed(DescriptorSink):
    """Prints messages on stdout, one per line, for a human."""

    def __init__(self) -> None:
        super().__init__(1, exact=False)

    def landed(self) -> str:
        """Return how many were printed, for a human."""
        return f"{counted(self.account.done, 'message')} printed; nothing is loaded"

    def output(self) -> Output:
        """Return stdout, the only output."""
        return Output("stdout", "-")
