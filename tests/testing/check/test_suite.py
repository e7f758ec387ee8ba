"""What the checks find in workers that are given messages."""

from __future__ import annotations

import sys
from signal import SIGSEGV
from uuid import uuid4

import pytest

from etlstage.errors import ConfigError, WorkerStartFailed
from etlstage.messages import StageKind
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, ReplyContract, Stage
from etlstage.testing import ScriptedLaunch, ScriptedWorker, run_virtually
from etlstage.testing.check import (
    Subject,
    Verdict,
    assert_conforms,
    check_worker,
)
from etlstage.testing.check.suite import Check, Finding
from etlstage.testing.scripted import Script
from tests.testing.check import answerers
from tests.testing.check.answerers import (
    asks_until,
    batched,
    each,
    echo,
    lines,
    makes,
)
from tests.testing.check.checked import checked, failures, said, scripted


def python(program: str) -> tuple[str, ...]:
    """Return the command of a worker in Python."""
    return (sys.executable, "-c", program)


ECHO = "import sys\nfor line in sys.stdin.buffer:\n sys.stdout.buffer.write(line + b'\\0'); sys.stdout.flush()"


PLANTED = [
    (each(answerers.has_no_eop), "answers", "has 1 reply outstanding"),
    (
        answerers.greets,
        "writes nothing unsolicited",
        "wrote unsolicited output: ready<EOM>",
    ),
    (
        each(answerers.has_no_eop_without_output),
        "accepts an empty message",
        "has 1 reply outstanding",
    ),
    (
        answerers.takes_text,
        "accepts bytes that are no text",
        "exited with status 1",
    ),
    (answerers.has_a_short_buffer, "accepts a long message", "status 1"),
    (answerers.takes_reads_for_messages, "handles input byte by byte", "wrote"),
    (
        answerers.takes_the_first_of_a_read,
        "accepts many messages at once",
        "has 299 replies outstanding",
    ),
    (
        answerers.answers_the_last_first,
        "accepts many messages at once",
        "gave its replies in a different order",
    ),
    (
        answerers.dies_at_the_100th,
        "accepts many messages at once",
        "exited with status 3",
    ),
    (answerers.ignores_the_end, "ends", "did not exit"),
    (
        answerers.ends_with(-SIGSEGV),
        "ends",
        "was killed by SIGSEGV when its stdin ended",
    ),
]


@pytest.mark.parametrize(("script", "name", "reason"), PLANTED)
def test_planted_bug_is_found(script: Script, name: str, reason: str) -> None:
    """The check about it fails (issue 12)."""
    assert reason in failures(scripted(script))[name]


def test_load_worker_that_ends_badly_is_found() -> None:
    """A run with it fails; that of a transform worker does not (issue 26)."""
    fate = "exited with status 3 when its stdin ended"
    script = answerers.ends_with(3)
    reason = failures(scripted(script, kind=StageKind.LOAD, only=["ends"]))["ends"]
    assert reason == f"the worker {fate}, expected status 0 from a load worker"
    findings = scripted(script, only=["ends"])
    assert failures(findings) == {}
    assert said(findings, Verdict.ADVICE)["ends"] == f"it {fate}"


def test_worker_that_collects_its_replies_in_a_buffer_is_found() -> None:
    """The reason names the remedy (issue 12)."""
    program = r'awk "{ printf \"%s\n%c\", \$0, 0 }"'
    findings = checked(["sh", "-c", program], timeout=2)
    reason = failures(findings)["answers"]
    assert "replied only when its stdin was closed: flush stdout" in reason


def test_worker_that_takes_long_to_start_is_not_taken_for_one_that_buffers() -> None:
    """It has read nothing yet; the reason names the remedy."""
    reason = failures(checked(["tail", "-f", "/dev/null"], timeout=1))["answers"]
    assert reason == (
        "the worker has read nothing within 1 s: if it needs longer to start, set"
        " --timeout 6"
    )


def test_worker_that_hangs_within_its_input_is_not_taken_for_one_that_starts() -> None:
    """It has read a byte, so it has started."""
    program = "dd bs=1 count=1 of=/dev/null 2>/dev/null; tail -f /dev/null"
    reason = failures(checked(["sh", "-c", program], timeout=1))["answers"]
    assert "to start" not in reason
    assert "timed out after 1 seconds" in reason


def test_failure_shows_what_went_both_ways_with_the_markers_by_name() -> None:
    """It also states what a worker should do (issue 12)."""
    (finding,) = (
        item
        for item in scripted(each(answerers.has_no_eop_without_output))
        if item.check.name == "accepts an empty message"
    )
    shown = finding.lines()
    assert shown[0].startswith(
        "FAIL   accepts an empty message: the worker has 1 reply outstanding"
    )
    assert shown[1] == f"       {finding.check.meaning}"
    assert shown[2].startswith("         command: ")
    assert shown[3].endswith("stdin   <EOM>")


def test_markers_that_a_worker_does_not_read_are_advice() -> None:
    """The worker is made for the default ones (issue 12)."""
    findings = scripted(lines(lambda line: [line + b"\n\0"]))
    assert failures(findings) == {}
    advice = said(findings, Verdict.ADVICE)
    name = "reads its markers from the environment"
    assert "markers other than the default ones" in advice[name]
    skipped = said(findings, Verdict.NOT_APPLICABLE)
    assert "accepts markers of several bytes" in skipped


def test_marker_that_is_read_in_parts_is_found() -> None:
    """The worker looks for EOM in each read by itself (issue 12)."""
    assert list(failures(scripted(answerers.cuts_markers))) == [
        "accepts markers of several bytes"
    ]


def test_chosen_markers_are_those_of_all_checks() -> None:
    """No others are tried then (issue 12)."""
    markers = Markers(b"<m>", b"<p>", b"<b>", b"<n>", b"<r>")
    findings = scripted(lines(lambda line: [line + b"\n\0"]), markers=markers)
    assert "has 1 reply outstanding" in failures(findings)["answers"]
    findings = scripted(echo, markers=markers)
    assert failures(findings) == {}
    skipped = said(findings, Verdict.NOT_APPLICABLE)
    assert (
        skipped["accepts markers of several bytes"]
        == "its stage sets markers of its own"
    )


def test_counting_worker_keeps_to_the_protocol() -> None:
    """It may reply with anything; that it counts is reported (issue 12)."""
    findings = scripted(answerers.keeps_state)
    assert failures(findings) == {}
    assert (
        "depends on earlier messages"
        in said(findings, Verdict.ADVICE)["keeps no state"]
    )


def test_worker_that_knows_a_message_again_is_reported() -> None:
    """It replies to a repeated message in another way (issue 12)."""

    async def remember(worker: ScriptedWorker) -> None:
        seen: set[bytes] = set()
        async for message in worker.messages():
            await worker.reply(*([] if message in seen else [message]))
            seen.add(message)

    findings = scripted(remember)
    assert failures(findings) == {}
    assert "comes again" in said(findings, Verdict.ADVICE)["keeps no state"]


def test_random_worker_keeps_to_the_protocol() -> None:
    """Its replies can't be compared; that is reported (issue 12)."""
    findings = scripted(makes(lambda _: [uuid4().bytes.hex().encode()]))
    assert failures(findings) == {}
    advice = said(findings, Verdict.ADVICE)
    assert "in another process" in advice["replies the same again"]


def test_refusing_worker_goes_on() -> None:
    """A refusal is no failure, and one without a reason is reported (issue 12)."""

    async def refuse(worker: ScriptedWorker, message: bytes) -> None:
        await (worker.reply(message) if message else worker.refuse(""))

    findings = scripted(each(refuse))
    assert failures(findings) == {}
    advice = said(findings, Verdict.ADVICE)
    assert advice["continues after a refusal"] == "it gives no reason for a refusal"


def test_worker_that_refuses_what_it_can_process_is_found() -> None:
    """Only a sample is known to be processable (issue 12)."""

    async def refuse(worker: ScriptedWorker, _: bytes) -> None:
        await worker.refuse("no")

    name = "continues after a refusal"
    findings = scripted(each(refuse), sample=[b"a", b"b"])
    assert "refuses all messages of the sample" in failures(findings)[name]
    findings = scripted(each(refuse))
    assert failures(findings) == {}
    assert "refuses all test words" in said(findings, Verdict.ADVICE)[name]


def test_worker_that_does_not_keep_its_contract_is_found() -> None:
    """Only for a sample it is known what a reply must be (issue 26)."""

    async def number(worker: ScriptedWorker, message: bytes) -> None:
        await (worker.reply(message) if message != b"no" else worker.refuse("no"))

    name, stage = "keeps its contract", {"expect": ReplyContract(json=True)}
    sample = [b"1", b"no", b"a"]
    findings = scripted(each(number), stage=stage, sample=sample)
    assert failures(findings)[name].endswith(
        "gave reply number 3, which breaks expect.json: output 1 is not a JSON document"
    )
    assert failures(scripted(each(number), stage=stage, sample=[b"1"])) == {}
    reasons = said(scripted(each(number), stage=stage), Verdict.NOT_APPLICABLE)
    assert reasons[name] == "only for a sample is it known what a reply must be"


@pytest.mark.parametrize(
    "contract", [ReplyContract(stateless=True), ReplyContract(order_free=True)]
)
def test_worker_that_keeps_state_against_its_contract_is_found(
    contract: ReplyContract,
) -> None:
    """It is a failure only if the stage promises something else (issue 26)."""

    async def count(worker: ScriptedWorker) -> None:
        number = 0
        async for _ in worker.messages():
            number += 1
            await worker.reply(b"%d" % number)

    name, stage = "keeps its contract", {"expect": contract}
    sample = [b"a", b"b"]
    assert failures(scripted(count, sample=sample)) == {}
    found = failures(scripted(count, stage=stage, sample=sample))
    assert list(found) == [name]
    assert found[name].startswith("gave [b")
    assert failures(scripted(echo, stage=stage, sample=sample)) == {}


def test_worker_that_refuses_by_mood_is_reported() -> None:
    """A refusal should be permanent (issue 12)."""
    first: list[int] = []

    async def refuse_first(worker: ScriptedWorker, message: bytes) -> None:
        first.append(worker.pid)
        if len(first) == 1:
            await worker.refuse("not now")
        else:
            await worker.reply(message)

    findings = scripted(each(refuse_first))
    assert failures(findings) == {}
    advice = said(findings, Verdict.ADVICE)["continues after a refusal"]
    assert advice == "it refused a message first, and answered the same message later"


def test_worker_that_refuses_nothing_is_not_asked_to_go_on() -> None:
    """There is no refusal to go on after (issue 12)."""
    findings = scripted(echo)
    assert failures(findings) == said(findings, Verdict.ADVICE) == {}
    skipped = said(findings, Verdict.NOT_APPLICABLE)
    assert "has refused nothing" in skipped["continues after a refusal"]


def test_worker_of_one_language_may_die_of_another() -> None:
    """With a sample of what it can process, that is advice (issue 12)."""
    take_objects = makes(lambda message: [message[message.index(b"{") :]])
    findings = scripted(take_objects, sample=[b"{1", b"{2", b"{3"])
    assert failures(findings) == {}
    assert (
        "refusing it costs"
        in said(findings, Verdict.ADVICE)["accepts an empty message"]
    )
    assert "answers" in failures(scripted(take_objects))


def test_worker_that_is_silent_about_what_it_can_not_process_fails() -> None:
    """A sample excuses workers that die, and no others (issue 12)."""
    findings = scripted(each(answerers.has_no_eop_without_output), sample=[b"a", b"b"])
    assert list(failures(findings)) == ["accepts an empty message"]


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.BATCH_SUPERVISOR])
@pytest.mark.parametrize("sample", [[b"", b"abc"], [b""]])
def test_sample_may_begin_with_an_empty_message(
    mode: Mode, sample: list[bytes]
) -> None:
    """Only a message that is not empty can be given in part (issue 26)."""
    script = echo if mode is Mode.SINGLE else answerers.echo_batches
    findings = scripted(script, mode=mode, sample=sample)
    assert failures(findings) == {}
    assert "ends in the middle" not in said(findings, Verdict.ADVICE)


def test_half_a_message_at_the_end_is_none() -> None:
    """A supervisor that was killed has left it (issue 12)."""

    async def take_all(worker: ScriptedWorker) -> None:
        rest = b""
        while data := await worker.read():
            *whole, rest = (rest + data).split(b"\n")
            for message in whole:
                await worker.reply(message)
        if rest:
            await worker.reply(rest)

    advice = said(scripted(take_all), Verdict.ADVICE)
    assert "unterminated last message" in advice["ends in the middle"]


def test_batches_are_checked() -> None:
    """This worker does not answer an empty batch (issue 12)."""
    answer_some = batched(lambda batch: batch or None)
    findings = scripted(answer_some, mode=Mode.BATCH_SUPERVISOR)
    assert list(failures(findings)) == ["accepts an empty batch"]


def test_batch_that_is_full_is_checked() -> None:
    """This worker answers a full batch twice (issue 12)."""
    answer_at_100 = batched(
        lambda batch: batch, lambda batch: batch if len(batch) >= 100 else None
    )
    findings = scripted(answer_at_100, mode=Mode.BATCH_SUPERVISOR)
    assert "accepts batches of any size" in failures(findings)


def test_batch_that_never_fills_is_advice() -> None:
    """The supervisor ends the batch of a worker that asks forever (issue 12)."""

    async def ask_on(worker: ScriptedWorker) -> None:
        batch = b""
        while data := await worker.read():
            batch += data
            if batch.endswith(b"\x17"):
                await worker.write(batch[:-1] + b"\0")
                batch = b""
            elif batch.endswith(b"\n"):
                await worker.write(b"\x05")

    name = "asks until its batch is full"
    findings = scripted(ask_on, mode=Mode.BATCH_WORKER)
    assert failures(findings) == {}
    assert "more than 500" in said(findings, Verdict.ADVICE)[name]


@pytest.mark.parametrize("size", [1, 3])
def test_worker_that_asks_after_a_full_batch_is_reported(size: int) -> None:
    """Its stage has to declare that, and the size of its batch (issue 26)."""
    name = "asks until its batch is full"
    findings = scripted(asks_until(size, b"\x05"), mode=Mode.BATCH_WORKER)
    assert failures(findings) == {}
    assert said(findings, Verdict.ADVICE)[name] == (
        "it writes BNC after the message that fills its batch: leave that out, or set"
        f" dialect.bnc_after_last: true and batch.size: {size}"
    )


def test_worker_that_declares_its_last_request_passes() -> None:
    """So does one that writes none after a full batch (issue 26)."""
    name = "asks until its batch is full"
    declared = MarkerDialect(mode=Mode.BATCH_WORKER, bnc_after_last=True)
    script, stage = asks_until(3, b"\x05"), {"batch": BatchPolicy(size=3)}
    findings = scripted(script, dialect=declared, stage=stage, only=[name])
    assert said(findings, Verdict.PASSED).keys() == {"answers", name}
    script = asks_until(3, b"")
    findings = scripted(script, mode=Mode.BATCH_WORKER, only=[name])
    assert said(findings, Verdict.PASSED).keys() == {"answers", name}


def test_load_worker_with_outputs_is_reported() -> None:
    """Nothing reads its outputs (issue 12)."""
    name = "load workers output nothing"
    findings = scripted(echo, kind=StageKind.LOAD)
    assert failures(findings) == {}
    assert "12 messages" in said(findings, Verdict.ADVICE)[name]
    skipped = said(scripted(echo), Verdict.NOT_APPLICABLE)
    assert skipped[name] == "for load workers"


def test_findings_are_reported_in_order_as_they_come() -> None:
    """The order does not depend on which is ready first (issue 12)."""
    told: list[str] = []
    stage = Stage(name="w", worker=("w",))

    async def main() -> list[str]:
        findings = await check_worker(
            Subject(stage, launch=ScriptedLaunch(echo)),
            found=lambda finding: told.append(finding.check.name),
        )
        return [finding.check.name for finding in findings]

    names = run_virtually(main)
    assert told == names


def test_workers_that_may_disturb_each_other_run_alone() -> None:
    """Load workers share a target; transform workers run three at once (issue 12)."""
    most: list[int] = []

    async def count(worker: ScriptedWorker) -> int | None:
        most.append(len(launch.running))
        return await echo(worker)

    launch = ScriptedLaunch(count)
    for kind, expected in ((StageKind.TRANSFORM, 3), (StageKind.LOAD, 1)):
        most.clear()
        checked(["w"], kind=kind, launch=launch)
        assert max(most) == expected


def test_error_in_one_of_several_checks_is_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is raised with its cause, not in a group (issue 26)."""

    async def fail(check: Check, *_: object) -> Finding:
        if check.gate:
            return Finding(check, Verdict.PASSED)
        raise OSError("it broke") from LookupError()

    monkeypatch.setattr("etlstage.testing.check.suite._make", fail)
    with pytest.raises(OSError, match="it broke") as caught:
        scripted(echo)
    assert isinstance(caught.value.__cause__, LookupError)


def test_any_timeout_can_be_waited_for() -> None:
    """However long it is, the checks are the same (issue 26)."""
    findings = scripted(echo, timeout=1.7e308)
    assert [finding.verdict for finding in findings] == [
        finding.verdict for finding in scripted(echo)
    ]


def test_sample_that_can_not_be_sent_is_refused() -> None:
    """The error names the message (issue 12)."""
    with pytest.raises(ConfigError, match=r"message 2 of the sample: .*marker"):
        scripted(echo, sample=[b"a", b"b\0"])
    with pytest.raises(ConfigError, match="for workers that are given messages"):
        scripted(echo, kind=StageKind.EXTRACT, mode=Mode.PLAIN, sample=[b"a"])


def test_program_that_does_not_exist_is_no_finding() -> None:
    """There is no worker to be checked (issue 12)."""
    with pytest.raises(WorkerStartFailed, match="there is no program"):
        checked(["no-such-program"])


def test_one_call_checks_a_worker_in_a_suite() -> None:
    """It passes, or raises all that ``etlstage check`` prints (issue 12)."""
    assert_conforms(python(ECHO), timeout=10)
    command = python("exit(7)")
    with pytest.raises(AssertionError) as caught:
        assert_conforms(command)
    text = str(caught.value)
    assert text.startswith("23 checks: 1 failed, 22 not applicable\nFAIL   answers: ")
    assert "exited with status 7" in text
    assert "command: " in text
    stage = Stage(name="w", worker=command, dialect=MarkerDialect())
    with pytest.raises(AssertionError, match="status 7"):
        assert_conforms(stage)
