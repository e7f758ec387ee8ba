"""``etlstage check``: check that a worker follows the protocol."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from etlstage.cli.failure import FAILED
from etlstage.cli.junit import XmlCase, junit, write
from etlstage.cli.options import (
    Batch,
    Dialect,
    Json,
    JunitFile,
    Kind,
    Markers,
    Mode,
    Offsets,
    Sample,
    StageName,
    Timeout,
    Words,
)
from etlstage.cli.screen import Screen
from etlstage.cli.signals import run_interruptible
from etlstage.cli.subject import Options, Program, lines_of, program_of, silence
from etlstage.messages import counted
from etlstage.supervisor.process import command_line
from etlstage.testing.check.suite import (
    Finding,
    Subject,
    Verdict,
    check_worker,
    known_checks,
    summary,
)

__all__ = ("main",)


def _list(wanted: bool) -> None:
    """List all checks, and whom they are for."""
    if not wanted:
        return
    screen = Screen()
    for whose, checks in known_checks():
        screen.tell(f"{whose}:")
        for check in checks:
            screen.tell(f"  {check.name}")
            screen.tell(f"      {check.purpose}")
    raise typer.Exit


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
    sample: Sample = None,
    timeout: Timeout = 5.0,
    junit_file: JunitFile = None,
    as_json: Json = False,
    listed: Annotated[
        bool,
        typer.Option("--list", callback=_list, is_eager=True, help="List all checks."),
    ] = False,
) -> int:
    """
    Check that a worker, in any language, follows the protocol.

    The worker is started about twenty times, with messages that it must answer or
    refuse. Run a load worker only where it can do no harm.
    """
    silence()
    options = Options(kind, batch, mode, offsets, markers, stage, dialect)
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

    findings = run_interruptible(partial(check_worker, subject, found=show))
    command = program.secrets.conceal(command_line(program.stage))
    if as_json:
        plain = program.secrets.concealed(_plain(command, findings))
        screen.tell(json.dumps(plain, indent=2))
    else:
        blocked = [finding for finding in findings if finding.blocked]
        if blocked:
            others = counted(len(blocked), "other")
            screen.tell(f"-      {others} not run: {blocked[0].reason}")
        screen.tell(summary(findings))
    if junit_file is not None:
        cases = [_case(finding, program) for finding in findings]
        write(junit_file, junit(f"check: {command}", cases))
    failed = any(finding.verdict is Verdict.FAILED for finding in findings)
    return FAILED if failed else 0


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
            return case._replace(printed=text)
        case Verdict.PASSED:
            return case
