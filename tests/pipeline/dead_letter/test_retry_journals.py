"""A retry into journals that is killed loads each letter once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import anyio
import pytest

from etlstage.config.build import pipeline_from_yaml
from etlstage.config.build_retry import Retries
from etlstage.errors import SinkFailed
from etlstage.pipeline.dead_letter.files import FOLDER
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.retry import Retry, Settled
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.folder import JOURNALS
from etlstage.pipeline.journal_sink import JournalSink
from tests.pipeline.test_journal import committed
from tests.pipeline.test_loading import Stopped

pytestmark = pytest.mark.process

STAGE = """\
from pathlib import Path
from etlstage import worker

def answer(message):
    if message.startswith(b"b") and not Path("mended").exists():
        raise worker.Refuse("not b")
    yield message

worker.transform(answer)
"""
MESSAGES = [f"{letter}{n}" for n in range(20) for letter in "ab"]
FILE = """\
name: p
delivery: exactly-once
state: state
extract: {files: {path: in.txt, format: text}}
transform:
  - name: t
    worker: {command: [python, stage.py]}
    on_error: {budget: 100%}
    DURABLE
load: LOAD
"""
END: tuple[str, str, str] = ("", "{journal: {path: out}}", "out")
EDGE: tuple[str, str, str] = (
    "durable: true",
    "{files: {path: out, format: text}}",
    f"state/edge-t/{JOURNALS}",
)


def letters(state: Path) -> list[DeadLetter]:
    """Return the letters that are left."""
    found = Settled(state / FOLDER).letters("t")
    return [letter for letter in found if isinstance(letter, DeadLetter)]


def size(journals: Path) -> int:
    """Return the bytes in all segments."""
    return sum(path.stat().st_size for path in journals.rglob("*.log"))


@pytest.mark.parametrize("end", [END, EDGE], ids=["end", "edge"])
@pytest.mark.parametrize("step", ["written", "noted", "performed"])
def test_retry_into_journals_that_is_killed_is_not_repeated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: tuple[str, str, str],
    step: Literal["written", "noted", "performed"],
) -> None:
    """Readers see each message once, wherever the retry is killed (issue 24)."""

    async def stop(_: JournalSink, note: str = "") -> None:
        raise Stopped

    durable, load, journals = end
    (tmp_path / "in.txt").write_text("".join(f"{m}\n" for m in MESSAGES))
    (tmp_path / "stage.py").write_text(STAGE)
    file, state = tmp_path / "p.yaml", tmp_path / "state"
    file.write_text(FILE.replace("DURABLE", durable).replace("LOAD", load))
    assert anyio.run(pipeline_from_yaml(file).run).error is None
    (tmp_path / "mended").touch()
    assert len(letters(state)) == 20

    with Delivery(state) as delivery, monkeypatch.context() as patched:
        part = Retries.of_file(file)[0]
        assert not part.recover(1, delivery)
        if step != "performed":
            killed = "commit" if step == "written" else "perform"
            patched.setattr(JournalSink, killed, stop)
        report = anyio.run(part.pipeline(Retry(letters(state), 1), delivery).run)
        assert (report.status == "done") == (step == "performed")
        # It is killed here.

    with Delivery(state) as delivery:
        part = Retries.of_file(file)[0]
        assert part.recover(1, delivery) == (step != "written")
        before = size(tmp_path / journals)
        assert not part.recover(2, delivery)
        assert size(tmp_path / journals) == before
        if step == "written":
            retry = Retry(letters(state), 1)
            report = anyio.run(part.pipeline(retry, delivery).run)
            assert report.status == "done", report.error
            retry.record(state)
    assert (letters(state), Settled(state / FOLDER).next) == ([], 2)

    if durable:
        report = anyio.run(pipeline_from_yaml(file).run)
        assert report.status == "done", report.error
        loaded = [
            line
            for path in (tmp_path / "out").glob("*.txt")
            for line in path.read_text().splitlines()
        ]
    else:
        loaded = [message.decode() for message in committed(tmp_path / journals)]
    assert Counter(loaded) == Counter(MESSAGES)


def test_damaged_note_of_a_retry_is_named(tmp_path: Path) -> None:
    """It is not taken for a retry that was not committed (issue 24)."""
    (tmp_path / "in.txt").write_text("a\nb\n")
    (tmp_path / "stage.py").write_text(STAGE)
    file, state = tmp_path / "p.yaml", tmp_path / "state"
    file.write_text(FILE.replace("DURABLE", "").replace("LOAD", END[1]))
    assert anyio.run(pipeline_from_yaml(file).run).error is None
    (tmp_path / "mended").touch()
    with Delivery(state) as delivery:
        part = Retries.of_file(file)[0]
        anyio.run(part.pipeline(Retry(letters(state), 1), delivery).run)
        (note,) = (tmp_path / "out" / "notes").iterdir()
        note.write_text("[1, ")
        with pytest.raises(SinkFailed, match=f"notes/{note.name} is damaged"):
            Retries.of_file(file)[0].recover(1, delivery)
