"""``etlstage check``: does a worker keep to the protocol."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import anyio
import structlog

from etlstage.cli.failure import FAILED
from etlstage.cli.junit import XmlCase, junit, write
from etlstage.cli.screen import Screen
from etlstage.cli.signals import interruptible
from etlstage.cli.subject import Options, Program, program_of
from etlstage.errors import ConfigError
from etlstage.messages import counted
from etlstage.supervisor.process import command_line
from etlstage.testing.check.suite import (
    Finding,
    Subject,
    Verdict,
    check_worker,
    summary,
)

__all__ = ("check", "drop", "lines_of")


def check(
    words: Sequence[str],
    options: Options,
    *,
    sample: Path | None,
    timeout: float,
    junit_file: Path | None,
    as_json: bool,
) -> int:
    """
    Make all checks of a worker; return the exit code.

    Args:
        words: Its command; or with a stage, the file that has it.
        options: What is said of it.
        sample: Messages that it can process, one a line.
        timeout: How long it may take for anything, in seconds.
        junit_file: Where the findings go as JUnit's XML.
        as_json: Whether they are printed as one JSON object.

    Raises:
        ConfigError: If anything in the command line, or in the file, is wrong.
        WorkerStartFailed: If the program can't be run.

    """
    structlog.configure(processors=[drop])
    program = program_of(words, options)
    subject = Subject(
        program.stage,
        sample=lines_of(sample) if sample is not None else (),
        ranges=program.ranges,
        timeout=timeout,
    )
    screen = Screen()

    def show(finding: Finding) -> None:
        for line in () if as_json or finding.blocked else finding.lines():
            screen.tell(program.shown(line))

    async def main() -> list[Finding]:
        return await check_worker(subject, found=show)

    with interruptible():
        findings = anyio.run(main)
    command = program.secrets.conceal(command_line(program.stage))
    if as_json:
        plain = program.secrets.concealed(_plain(command, findings))
        screen.tell(json.dumps(plain, indent=2))
    else:
        blocked = [finding for finding in findings if finding.blocked]
        if blocked:
            others = counted(len(blocked), "other")
            screen.tell(f"-      {others}: {blocked[0].reason}")
        screen.tell(summary(findings))
    if junit_file is not None:
        cases = [_case(finding, program) for finding in findings]
        write(junit_file, junit(f"check: {command}", cases))
    failed = any(finding.verdict is Verdict.FAILED for finding in findings)
    return FAILED if failed else 0


def lines_of(file: Path) -> list[bytes]:
    """
    Return the messages of a file, one a line.

    Raises:
        ConfigError: If it can't be read, or has none.

    """
    try:
        *lines, rest = file.read_bytes().split(b"\n")
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise ConfigError(f"{file} can't be read: {said}") from None
    messages = [*lines, *([rest] if rest else [])]
    if not messages:
        raise ConfigError(f"{file} has no messages; write one a line")
    return messages


def drop(*_: object) -> str:
    """Log nothing: what a worker did is told in the findings."""
    raise structlog.DropEvent


def _plain(command: str, findings: Sequence[Finding]) -> dict[str, object]:
    return {
        "command": command,
        "passed": all(finding.verdict is not Verdict.FAILED for finding in findings),
        "checks": [
            {
                "name": finding.check.name,
                "verdict": finding.verdict.value,
                "meaning": finding.check.meaning,
                "reason": finding.reason,
                "transcript": finding.transcript.splitlines(),
                "seconds": round(finding.seconds, 3),
            }
            for finding in findings
        ],
    }


def _case(finding: Finding, program: Program) -> XmlCase:
    case = XmlCase(finding.check.name, finding.seconds)
    text = program.secrets.conceal("\n".join(finding.lines()))
    match finding.verdict:
        case Verdict.FAILED:
            reason = program.secrets.conceal(finding.reason)
            return case._replace(failures=[(reason, text)])
        case Verdict.NOT_APPLICABLE:
            return case._replace(skipped=finding.reason)
        case Verdict.ADVICE:
            return case._replace(said=text)
        case Verdict.PASSED:
            return case
