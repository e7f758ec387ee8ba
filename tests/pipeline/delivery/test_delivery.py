from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import BinaryIO

import pytest

from etlstage.errors import StateUnusable
from etlstage.pipeline.delivery.delivery import Delivery, take_over
from etlstage.pipeline.delivery.holder import LOCK
from etlstage.pipeline.delivery.record import CommitRecord


def test_state_directory_is_held_by_one_run(tmp_path: Path) -> None:
    """A second run's error names the holder; once released it is free (issue 10)."""
    folder = tmp_path / "a" / "state"
    with (
        Delivery(folder),
        pytest.raises(StateUnusable) as caught,
        Delivery(folder),
    ):
        pass
    assert re.fullmatch(
        rf"another run uses the state directory {folder} \(pid {os.getpid()} on"
        rf" {socket.gethostname()}, since \d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00\):"
        r" wait until it has ended, shut it out with 'etlstage state take-over', or set"
        r" another state",
        str(caught.value),
    )
    with Delivery(folder):
        pass
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", ["", "x", "[" * 5000, '{"pid": "me"}'])
def test_holder_who_can_not_be_read_is_left_out(tmp_path: Path, text: str) -> None:
    """The content of the lock file decides nothing."""
    with Delivery(tmp_path):
        (tmp_path / LOCK).write_text(text)
        with (
            pytest.raises(StateUnusable, match=f"directory {tmp_path}: wait until"),
            Delivery(tmp_path),
        ):
            pass


def test_shorter_holder_replaces_a_longer_one(tmp_path: Path) -> None:
    """Nothing is left of the longer one."""
    (tmp_path / LOCK).write_text("x" * 1000)
    with Delivery(tmp_path):
        assert (tmp_path / LOCK).read_text().endswith('"}')
        assert (tmp_path / LOCK).read_text().startswith('{"pid": ')


def test_lock_is_not_for_workers(tmp_path: Path) -> None:
    """A worker that outlives us must not keep the lock (issue 10)."""
    with Delivery(tmp_path):
        held = [
            int(fd)
            for fd in os.listdir("/proc/self/fd")
            if os.path.realpath(f"/proc/self/fd/{fd}") == str(tmp_path / LOCK)
        ]
        assert [os.get_inheritable(fd) for fd in held] == [False]


def test_state_directory_that_can_not_be_ours(tmp_path: Path) -> None:
    """The error has the folder and the reason; the folder is not locked."""
    (tmp_path / "state").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, why in ("state", "not a directory"), ("open", "others may write to"):
        with (
            pytest.raises(StateUnusable, match=f"directory {tmp_path}/{name}: {why}"),
            Delivery(tmp_path / name),
        ):
            pass
    (tmp_path / LOCK).symlink_to(tmp_path / "other")
    with pytest.raises(StateUnusable, match="symbolic links"), Delivery(tmp_path):
        pass
    assert not (tmp_path / "other").exists()


def begun(folder: Path, *, exactly_once: bool = True, run: str = "r1") -> Delivery:
    """Return a delivery that was entered and has begun a run."""
    delivery = Delivery(folder, exactly_once=exactly_once)
    with delivery:
        delivery.begin(run, stages=["e", "l"], letters={"e": 7})
    return delivery


def test_commit_counts_epochs(tmp_path: Path) -> None:
    """It reports its steps; the record in memory equals the stored one (issue 14)."""
    delivery = begun(tmp_path)
    steps: list[str] = []
    delivery.at = steps.append
    delivery.keep(delivery.next(5, accounts={"e": [1], "l": [2]}, letters={"l": 3}))
    assert steps == ["aside", "recorded"]
    found = CommitRecord.latest(tmp_path)
    assert found == delivery.record
    assert (found.epoch, found.position, found.ended) == (1, 5, False)
    assert (found.accounts, found.letters) == ({"e": [1], "l": [2]}, {"e": 7, "l": 3})


def test_run_that_broke_off_goes_on(tmp_path: Path) -> None:
    """It resumes with its run id and load id; a run that ended does not (issue 14)."""
    first = begun(tmp_path)
    first.commit(5)
    again = Delivery(tmp_path, exactly_once=True)
    with again:
        assert again.begin("r2", stages=["e", "l"], letters={})
        assert again.record.fence == first.record.fence + 1
        assert (again.record.run, again.record.epoch) == ("r1", 1)
        assert again.record.load == first.record.load
        again.commit(9, ended=True)
    third = Delivery(tmp_path, exactly_once=True)
    with third:
        assert not third.begin("r3", stages=["e", "l"], letters={})
        assert (third.record.run, third.record.position) == ("r3", 9)
        assert (third.record.load, third.record.epoch) == (first.record.load, 2)
        third.commit(None, ended=True)
        third.settle()
    fourth = begun(tmp_path, run="r4")
    assert (fourth.record.epoch, fourth.record.position) == (0, None)
    assert fourth.record.load != first.record.load


def test_stream_that_broke_off_goes_on(tmp_path: Path) -> None:
    """Even before its first epoch, with the stages on record (issue 14)."""
    with Delivery(tmp_path, whole=True) as first:
        first.begin("r1", stages=["e", "l"], letters={"e": 7})
        assert first.record.delivery == "at-least-once"
    with Delivery(tmp_path, whole=True) as again:
        assert again.begin("r2", stages=["e", "l"], letters={"e": 9})
        assert (again.record.run, again.record.letters) == ("r1", {"e": 7})
    with (
        Delivery(tmp_path, whole=True) as third,
        pytest.raises(StateUnusable, match="its stages were e, l"),
    ):
        third.begin("r3", stages=["e", "x"], letters={})


@pytest.mark.parametrize(
    ("exactly_once", "stages", "why"),
    [
        (False, ["e", "l"], "its delivery was exactly-once"),
        (True, ["e", "x"], "its stages were e, l"),
    ],
)
def test_another_pipeline_does_not_go_on(
    tmp_path: Path, exactly_once: bool, stages: list[str], why: str
) -> None:
    """The loaded data would be inconsistent (issue 14)."""
    begun(tmp_path)
    with (
        Delivery(tmp_path, exactly_once=exactly_once) as delivery,
        pytest.raises(
            StateUnusable, match=f"r1 that was interrupted .* can't be resumed: {why}"
        ),
    ):
        delivery.begin("r2", stages=stages, letters={})


def test_another_pipeline_is_refused_before_the_directory_is_taken(
    tmp_path: Path,
) -> None:
    """Only where no run holds it, and nothing is changed (issue 24)."""
    other = Delivery(tmp_path / "state", exactly_once=True)
    other.check_resumable(stages=["x"], output="")
    assert not other.folder.exists()
    begun(other.folder)
    stored = CommitRecord.latest(other.folder)
    for stages in (["e", "l"], None):
        other.check_resumable(stages=stages, output="")
    with pytest.raises(StateUnusable, match="resumed: its stages were e, l;"):
        other.check_resumable(stages=["x"], output="")
    assert CommitRecord.latest(other.folder) == stored
    with Delivery(other.folder):
        other.check_resumable(stages=["x"], output="")
    (other.folder / "lock").unlink()
    (other.folder / "lock").symlink_to("elsewhere")
    with pytest.raises(StateUnusable, match="can't use the state directory"):
        other.check_resumable(stages=["e", "l"], output="")


def test_run_goes_on_where_it_has_loaded(tmp_path: Path) -> None:
    """A run that has loaded nothing yet may use another output (issue 14)."""
    for number, output in enumerate(("parquet /a", "parquet /b", "parquet /b")):
        with Delivery(tmp_path, exactly_once=True) as delivery:
            again = delivery.begin("r", stages=[], letters={}, output=output)
            assert again == bool(number)
            assert delivery.record.output == output
            if number:
                delivery.commit(number)
    with (
        Delivery(tmp_path, exactly_once=True) as delivery,
        pytest.raises(
            StateUnusable,
            match="it has loaded into parquet /b, not into parquet /c",
        ),
    ):
        delivery.begin("r", stages=[], letters={}, output="parquet /c")


def test_load_that_continues_elsewhere_knows_where_it_was_until_it_has_loaded(
    tmp_path: Path,
) -> None:
    """A start that loads nothing there changes nothing (issue 23)."""

    def begin(output: str) -> Delivery:
        with Delivery(tmp_path, exactly_once=True) as delivery:
            delivery.begin("r", stages=[], letters={}, output=output)
        return delivery

    first = begin("a")
    first.keep(first.next(5, ended=True))
    for output, moved_from in (("b", "a"), ("b", "a"), ("a", ""), ("c", "a")):
        found = begin(output)
        assert found.record.moved_from == moved_from
        assert (found.record.epoch, found.record.load) == (1, first.record.load)
    found.keep(found.next(9))
    assert begin("c").record.moved_from == ""
    with pytest.raises(StateUnusable, match="it has loaded into c, not into a"):
        begin("a")


def test_end_at_a_position_whose_actions_may_not_be_done(
    tmp_path: Path, synced: list[Path]
) -> None:
    """
    They need the same output and delivery, unless they are on record (issue 23).

    Only the record of the end is stored twice for that.
    """

    def begin(run: str, output: str, *, exactly_once: bool = True) -> Delivery:
        with Delivery(tmp_path, exactly_once=exactly_once) as delivery:
            assert not delivery.begin(run, stages=["l"], letters={}, output=output)
        return delivery

    first = begin("r1", "parquet /a")
    first.keep(first.next(5, performs=True))
    synced.clear()
    first.performed()
    assert synced == []
    first.keep(first.next(9, ended=True, performs=True))
    with pytest.raises(StateUnusable, match="loaded into parquet /a, not into parquet"):
        begin("r2", "parquet /b")
    with pytest.raises(StateUnusable, match="its delivery was exactly-once"):
        begin("r2", "parquet /a", exactly_once=False)
    second = begin("r2", "parquet /a")
    assert second.record.load == first.record.load
    second.keep(second.next(12, ended=True, performs=True))
    second.performed()
    assert begin("r3", "parquet /b").record.load == first.record.load


def test_who_was_taken_over_can_not_commit(tmp_path: Path) -> None:
    """A suspended holder still has its lock, so the fence shuts it out (issue 14)."""
    with Delivery(tmp_path, exactly_once=True) as first:
        first.begin("r1", stages=[], letters={})
        first.commit(1)
        assert take_over(tmp_path).epoch == 1
        with Delivery(tmp_path, exactly_once=True) as second:
            with pytest.raises(
                StateUnusable, match=r"has taken over .* commits nothing after epoch 1"
            ):
                first.commit(2)
            second.begin("r2", stages=[], letters={})
            second.commit(3)
    assert CommitRecord.latest(tmp_path).position == 3


@pytest.mark.parametrize("when", ["aside", "stored"])
def test_commit_in_the_middle_of_which_it_was_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its record may be stored, but doesn't count and isn't reported (issue 14)."""
    store = CommitRecord.store

    def late(
        self: CommitRecord, folder: Path, *told: Callable[[str], None] | None
    ) -> None:
        monkeypatch.undo()
        store(self, folder, *told)
        take_over(folder)

    def at(step: str) -> None:
        if step == "aside" == when:
            take_over(tmp_path)

    for end in (False, True):
        with Delivery(tmp_path, exactly_once=True) as first:
            first.begin("r1", stages=[], letters={})
            epoch = first.record.epoch
            first.at = at
            if when == "stored":
                monkeypatch.setattr(CommitRecord, "store", late)
            with pytest.raises(StateUnusable, match="has taken over"):
                first.end() if end and when == "stored" else first.commit(2, ended=True)
            assert (first.record.epoch, first.record.ended) == (epoch, False)
        assert CommitRecord.latest(tmp_path).fence > first.record.fence


def test_fence_belongs_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two processes raise it at the same moment (issue 14)."""
    latest = CommitRecord.latest
    passed: list[CommitRecord] = []

    def slow(folder: Path) -> CommitRecord:
        monkeypatch.setattr(CommitRecord, "latest", latest)
        passed.append(take_over(folder))
        return latest(folder)

    for claimed in (False, True):
        before = latest(tmp_path).fence
        if claimed:
            (tmp_path / f"record.{before + 1}.claim").touch()  # killed by then
        monkeypatch.setattr(CommitRecord, "latest", slow)
        with Delivery(tmp_path) as delivery:
            delivery.check()
            assert delivery.record.fence == passed[-1].fence + 1
        assert {path.name for path in tmp_path.glob("record.*")} == {
            f"record.{delivery.record.fence}.json"
        }


def test_commit_behind_the_look_of_a_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be lost, so it fails even before the new fence is stored (issue 14)."""
    latest = CommitRecord.latest
    with Delivery(tmp_path, exactly_once=True) as first:
        first.begin("r1", stages=[], letters={})

        def slow(folder: Path) -> CommitRecord:
            monkeypatch.undo()
            found = latest(folder)
            with pytest.raises(StateUnusable, match="has taken over"):
                first.commit(1, ended=True)
            return found

        monkeypatch.setattr(CommitRecord, "latest", slow)
        assert take_over(tmp_path).epoch == first.record.epoch == 0


def test_lock_that_was_taken_over_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waited for the old lock file checks the new one (issue 14)."""
    flock = fcntl.flock

    def late(file: BinaryIO, how: int) -> None:
        monkeypatch.undo()
        take_over(tmp_path)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        Delivery(tmp_path),
        pytest.raises(StateUnusable, match="another run uses"),
        Delivery(tmp_path),
    ):
        pass


def test_who_asks_for_the_holder_does_not_hold_up_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query for the holder takes the lock only for a moment (issue 14)."""
    with Delivery(tmp_path):
        pass
    with (tmp_path / "lock").open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr(
            "etlstage.pipeline.delivery.delivery.sleep",
            lambda _: fcntl.flock(asking, fcntl.LOCK_UN),
        )
        with Delivery(tmp_path) as delivery:
            delivery.check()


def test_lock_that_can_not_be_written(tmp_path: Path) -> None:
    """As on a full disk, which is reported as such (issue 24)."""
    soft, hard = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(StateUnusable, match=r"can't use .*: file too large"):
            Delivery(tmp_path / "state").__enter__()
    finally:
        setrlimit(RLIMIT_FSIZE, (soft, hard))


def test_lock_that_can_not_be_taken(tmp_path: Path) -> None:
    """The error names the folder (issue 14)."""
    (tmp_path / "lock").mkdir()
    with pytest.raises(
        StateUnusable, match=f"can't use the state directory {tmp_path}"
    ):
        take_over(tmp_path)


def test_what_a_sink_has_noted_is_adopted(tmp_path: Path) -> None:
    """
    If it is later than the record, and under the new holder's fence (issue 14).

    Else the remedy includes what another load would not remove (issue 23).
    """
    delivery = begun(tmp_path)
    noted = delivery.next(5, accounts={"e": [1], "l": [2]}, letters={"l": 3})
    with Delivery(tmp_path, exactly_once=True) as again:
        again.adopt(noted.note)
        assert again.record == replace(noted, fence=2) == CommitRecord.latest(tmp_path)
        again.commit(6)
        again.adopt(noted.note)
        assert again.record.position == 6
        for note in "{}", "[]", "1", noted.note.replace('"epoch": 1', '"epoch": "1"'):
            with pytest.raises(
                StateUnusable,
                match=r"can't read the sink's note of load .*: to start from the"
                r" beginning, remove what it has written, then use 'etlstage state reset",
            ):
                again.adopt(note)


def test_note_of_another_output_leaves_this_run_its_own(tmp_path: Path) -> None:
    """It has moved, unless all was loaded into the other one (issue 22)."""
    delivery = begun(tmp_path)
    delivery.record = replace(delivery.record, output="jdbc b")
    noted, last = delivery.next(5), delivery.next(None, ended=True)
    for output, moved_from in ("jdbc c", "jdbc b"), ("jdbc b", ""):
        with Delivery(tmp_path / output, exactly_once=True) as again:
            again.begin("r", stages=["e", "l"], letters={}, output=output, input="new")
            again.adopt(noted.note)
            found = CommitRecord.latest(tmp_path / output)
        assert (found.position, found.output, found.input) == (5, output, "new")
        assert found.moved_from == moved_from
    with Delivery(tmp_path / "ended", exactly_once=True) as again:
        again.begin("r", stages=["e", "l"], letters={}, output="jdbc c")
        with pytest.raises(
            StateUnusable, match="it has loaded into jdbc b, not into jdbc c"
        ):
            again.adopt(last.note)
        assert again.record.epoch == 0
