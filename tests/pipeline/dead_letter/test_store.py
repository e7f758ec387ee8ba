"""The store of dead letters: what is durable, and what is cut off."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import anyio
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import integers, sampled_from

from etlstage.errors import Attempt, StageError, StateUnusable, WorkerLost
from etlstage.pipeline.dead_letter.files import (
    LetterFile,
    Torn,
    cut,
    letter_files,
    read_letters,
)
from etlstage.pipeline.dead_letter.letter import DeadLetter, first_clause
from etlstage.pipeline.dead_letter.retry import settle
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Delivery, take_over

NOON = "2026-01-02T12:00:00.500+00:00"
CONFIG = {"name": "clean", "command": ["sort", "-n"]}


@pytest.fixture
def letters(tmp_path: Path) -> Iterator[DeadLetters]:
    """Give a store for dead letters whose folder does not exist yet."""
    made = DeadLetters(tmp_path / "state" / "p", pipeline="p", run="r")
    yield made
    made.close()


def lost(text: str = "stage clean: died", *attempts: Attempt) -> WorkerLost:
    """Return an error with a history of attempts."""
    error = WorkerLost(text, stage="clean")
    error.attempts = attempts
    return error


async def put(
    letters: DeadLetters,
    message: bytes = b"m",
    *,
    stage: str = "clean",
    error: Exception | None = None,
) -> DeadLetter:
    """Dead-letter one message."""
    letter = letters.letter(
        stage, 7, message, error or lost(), config=CONFIG, time=NOON
    )
    await letters.keep([letter])
    return letter


def kept(path: Path) -> list[DeadLetter | Torn]:
    """Return the letters in a file."""
    return list(read_letters(path))


def file_of(letters: DeadLetters, name: str = "clean.jsonl") -> Path:
    """Return the path of a stage's letters."""
    return letters._state / "dead_letters" / name


async def test_letter_is_read_as_it_was_put(letters: DeadLetters) -> None:
    """With every detail, and every byte of the message."""
    message = bytes(range(256)) * 3
    attempt = Attempt("clean-1", 4711, "exited", ("started", "exited"), ("oh", "no"))
    letter = await put(letters, message, error=lost("stage clean: died", attempt))
    assert kept(file_of(letters)) == [letter]
    assert letter == DeadLetter(
        id="r-1",
        time="2026-01-02T12:00:00.500+00:00",
        pipeline="p",
        run="r",
        stage="clean",
        place=7,
        message=message,
        error="stage clean: died",
        kind="WorkerLost",
        attempts=(attempt,),
        config=CONFIG,
    )


async def test_error_without_a_history(letters: DeadLetters) -> None:
    """A message that was never sent to a worker has no attempts."""
    assert (await put(letters, error=ValueError("x"))).attempts == ()


def test_nothing_is_made_before_it_is_needed(tmp_path: Path) -> None:
    """A run without failures leaves no trace."""
    made = DeadLetters(tmp_path / "state", pipeline="p")
    made.close()
    assert list(tmp_path.iterdir()) == []
    assert letter_files(tmp_path / "state") == []


async def test_letters_are_ours_alone(letters: DeadLetters, tmp_path: Path) -> None:
    """Letters contain data: other users must not read them."""
    await put(letters)
    path = file_of(letters)
    modes = [p.stat().st_mode & 0o777 for p in (path.parent.parent, path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]


async def test_letters_are_not_written_where_a_link_leads(
    letters: DeadLetters, tmp_path: Path
) -> None:
    """Nor into a folder that others may write to (issue 10)."""
    other = tmp_path / "other"
    other.touch()
    path = file_of(letters)
    path.parent.mkdir(mode=0o700, parents=True)
    path.parent.parent.chmod(0o700)
    path.symlink_to(other)
    with pytest.raises(StageError, match="too many levels of symbolic links"):
        await put(letters)
    path.unlink()
    path.parent.chmod(0o777)
    with pytest.raises(StageError, match="others may write to the folder"):
        await put(letters)
    assert other.read_bytes() == b""


@pytest.mark.parametrize("linked", ["dead_letters", "dead_letters/clean.jsonl"])
@pytest.mark.parametrize("there", [False, True])
async def test_link_in_the_state_is_refused_before_the_first_letter(
    letters: DeadLetters, tmp_path: Path, linked: str, *, there: bool
) -> None:
    """Nothing is read or written where the link leads (issue 23)."""
    state, other = tmp_path / "state" / "p", tmp_path / "other"
    if there:
        other.mkdir() if linked == "dead_letters" else other.touch()
    (state / linked).parent.mkdir(parents=True, mode=0o700)
    state.parent.chmod(0o700)
    (state / linked).symlink_to(other)
    with pytest.raises(StateUnusable, match=r"state directory .* link"):
        letters.check()
    with pytest.raises(StageError, match="link"):
        await put(letters)
    if linked == "dead_letters" and there:
        with pytest.raises(StateUnusable, match="dead_letters is a link, which is not"):
            letters.supersede(NOON)
        with pytest.raises(StateUnusable, match="can't record the outcomes"):
            settle(state, ["r-1"], "dropped")
        (state / linked).unlink()
        (state / linked).mkdir()
        (state / linked / "settled").symlink_to(other)
        with pytest.raises(StateUnusable, match="settled is a link, which is not"):
            settle(state, ["r-1"], "dropped")
        assert list(other.iterdir()) == []


async def test_runs_append_to_the_same_file(tmp_path: Path) -> None:
    """Also at the same time; ids never collide."""
    first, second = (DeadLetters(tmp_path, pipeline="p") for _ in range(2))
    for letters in (first, second, first, second):
        await put(letters)
    ids = [
        letter.id for letter in kept(file_of(first)) if isinstance(letter, DeadLetter)
    ]
    assert len(set(ids)) == 4
    assert [letter.id for letter in first.letters()] == ids[::2]
    assert [letter.id for letter in second.letters()] == ids[1::2]
    assert (first.count, second.count) == (2, 2)
    for letters in (first, second):
        letters.close()


async def test_letters_of_all_starts_of_a_run(letters: DeadLetters) -> None:
    """A start that resumes the run has those of the starts before it (issue 23)."""
    other, again = (DeadLetters(letters._state, pipeline="p") for _ in range(2))
    await put(other, b"of another run")
    await put(letters, b"a")
    await put(letters, b"b", stage="load")
    sizes = letters.sizes()
    await put(letters, b"not on record")
    again.resume("r", sizes)
    await put(again, b"c")
    again.close()
    other.close()
    assert [letter.message for letter in again.letters()] == [b"a", b"c", b"b"]


async def test_letters_of_other_runs_are_kept_by_a_start_that_resumes(
    letters: DeadLetters,
) -> None:
    """Runs without a state directory may use the same folder (issue 23)."""
    other, again = (DeadLetters(letters._state, pipeline="p") for _ in range(2))
    await put(letters, b"a")
    sizes = letters.sizes()
    path = file_of(letters)
    with path.open("ab") as file:
        file.write(b'{"torn')  # as by a run that was killed
    await put(other, b"of another run")
    await put(letters, b"not on record")
    batch = letters.of_run("l0-3")
    await put(batch, b"of a batch")
    await put(other, b"of another run", stage="load")
    again.load = "l0"
    again.resume("r", sizes)
    await put(again, b"b")
    for store in (letters, batch, other, again):
        store.close()
    found = [x for file in letter_files(letters._state) for x in kept(file)]
    assert [x.message for x in found if isinstance(x, DeadLetter)] == [
        b"a",
        b"of another run",
        b"b",
        b"of another run",
    ]
    assert all(isinstance(x, DeadLetter) for x in found)


async def test_letters_of_a_run_during_which_another_resumes(
    letters: DeadLetters,
) -> None:
    """Its later letters are in the file that replaced the first (issue 23)."""
    other, again = (DeadLetters(letters._state, pipeline="p") for _ in range(2))
    await put(letters, b"not on record")
    await put(other, b"a")
    again.resume("r", {})
    assert [letter.message for letter in other.letters()] == [b"a"]
    await put(other, b"b")
    await other.sync()
    again.resume("r", {})
    await put(other, b"c")
    assert [letter.message for letter in other.letters()] == [b"a", b"b", b"c"]
    for store in (letters, other, again):
        store.close()
    assert [x.message for x in kept(file_of(letters)) if isinstance(x, DeadLetter)] == [
        *(b"a", b"b", b"c"),
    ]


@pytest.mark.process
def test_letter_that_comes_while_a_file_is_cut(letters: DeadLetters) -> None:
    """It waits for the new file, as other runs that cut it do (issue 23)."""
    adopt(letters, "clean", 1)
    path = file_of(letters)
    line = path.read_bytes()
    script = (
        "import sys; from pathlib import Path\n"
        "from etlstage.pipeline.dead_letter.files import LetterFile, cut\n"
        "state, line = Path(sys.argv[1]), bytes.fromhex(sys.argv[2])\n"
        "file = LetterFile(state, 'clean', lambda: None)\n"
        "print('opened', flush=True)\n"
        "file.append(line)\n"
        "cut(file.path, 0, lambda: None, lambda letter: False)\n"
        "file.append(line)\n"
    )
    command = sys.executable, "-c", script, str(letters._state), line.hex()
    others: list[subprocess.Popen[bytes]] = []

    def append() -> None:
        other = subprocess.Popen(command, stdout=subprocess.PIPE)
        others.append(other)
        assert other.stdout is not None
        assert other.stdout.readline() == b"opened\n"
        with path.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    cut(path, 0, append, lambda letter: False)
    (other,) = others
    with other:
        assert other.wait() == 0
    assert path.read_bytes() == line * 3


@pytest.mark.parametrize("first", ["append", "cut"])
def test_file_that_is_replaced_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The lock of the new file counts, however often it is replaced (issue 23)."""
    file = LetterFile(tmp_path, "t", lambda: None)
    real, left = fcntl.flock, [1, 2]

    def cut_all() -> None:
        cut(file.path, 0, lambda: None, lambda letter: True)

    def flock(fd: int, how: int) -> None:
        if how & fcntl.LOCK_EX and left:
            left.pop()
            with monkeypatch.context() as patched:
                patched.setattr(fcntl, "flock", real)
                cut_all()
                other = LetterFile(tmp_path, "t", lambda: None)
                other.append(b"\n")
                other.close()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    if first == "cut":
        cut_all()
    file.append(b"\n")
    assert left == []
    assert file.path.read_bytes() == b"\n" * 3
    file.close()


def test_file_whose_lock_a_stopped_run_holds_is_replaced(
    letters: DeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run was taken over, perhaps while it appended a letter (issue 23)."""
    monkeypatch.setattr("etlstage.pipeline.dead_letter.files._PAUSE", 0.0)
    adopt(letters, "clean", 1)
    path = file_of(letters)
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cut(path, 0, lambda: None, lambda letter: True)
    assert path.read_bytes() == b""


def test_file_that_was_to_be_replaced_is_not_left_locked(
    letters: DeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by a process that was forked meanwhile (issue 23)."""
    adopt(letters, "clean", 1)
    real, forked = fcntl.flock, []

    def flock(file: BinaryIO, how: int) -> None:
        real(file, how)
        if how & fcntl.LOCK_EX:
            forked.append(os.dup(file.fileno()))

    def check() -> None:
        raise StateUnusable("taken over")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StateUnusable, match="taken over"):
        cut(file_of(letters), 0, check, lambda letter: True)
    with file_of(letters).open("rb") as file:
        real(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (copy,) = forked
    os.close(copy)


async def test_stages_have_files_of_their_own(letters: DeadLetters) -> None:
    """Whatever the stages are called."""
    for stage in ("clean", "a b", "../x", "b/c"):
        await put(letters, stage=stage)
    folder = file_of(letters).parent
    names = ["..%2Fx.jsonl", "a b.jsonl", "b%2Fc.jsonl", "clean.jsonl"]
    assert letter_files(folder.parent) == [folder / name for name in names]
    assert [letter.stage for letter in letters.letters()] == [
        *("clean", "a b", "../x", "b/c"),
    ]


@pytest.mark.parametrize("cut", [1, 40])
async def test_torn_letter_is_skipped_with_a_word(
    letters: DeadLetters, tmp_path: Path, cut: int
) -> None:
    """A crash during an append damages only that append."""
    await put(letters)
    await put(letters)
    path = file_of(letters)
    os.truncate(path, path.stat().st_size - cut)
    size = len(path.read_bytes().splitlines()[1])
    later = DeadLetters(letters._state, pipeline="p", run="later")
    await put(later)
    later.close()
    first, torn, last = kept(path)
    assert isinstance(first, DeadLetter)
    assert isinstance(last, DeadLetter)
    assert (first.id, last.id) == ("r-1", "later-1")
    if cut > 1:
        assert torn == Torn(path, 2, size + 1)
    else:
        # Only the end of the line was missing.
        assert isinstance(torn, DeadLetter)


@pytest.mark.parametrize(
    "line",
    [
        b"\0\0\0\n",
        b"[]\n",
        b"{}\n",
        b'{"message": 5}\n',
        b"\xff\n",
        b"[" * 100_000 + b"\n",
    ],
)
def test_rubbish_is_no_letter(tmp_path: Path, line: bytes) -> None:
    """Garbage that a file system leaves after a crash is reported as torn."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(line)
    assert kept(path) == [Torn(path, 1, len(line))]


async def test_letters_of_a_later_version_are_read(letters: DeadLetters) -> None:
    """Unknown fields are ignored."""
    letter = await put(letters)
    line = json.dumps(letter.to_dict() | {"colour": "red"}).encode()
    assert DeadLetter.from_line(line) == letter


async def test_disk_that_is_full_is_reported(
    letters: DeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names folder and message; no partial line is left."""
    await put(letters)
    path = file_of(letters)
    before = path.read_bytes()
    calls: list[int] = []

    def write(fd: int, data: memoryview) -> int:
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:10])

    real = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(StageError) as caught:
            await put(letters)
    assert str(caught.value) == (
        f"stage clean: can't write dead letters to {path.parent}: no space left on"
        " device; make room, or move the directory and set state to its new place; the"
        " message's own error: stage clean: died"
    )
    assert caught.value.stage == "clean"
    assert path.read_bytes() == before
    assert letters.count == 1
    await put(letters)
    assert len(kept(path)) == 2


async def test_short_writes_are_completed(
    letters: DeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may write fewer bytes than it was given."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:100]))
    letter = await put(letters, b"x" * 1000)
    assert kept(file_of(letters)) == [letter]


async def test_folder_that_can_not_be_made(tmp_path: Path) -> None:
    """A file is in the way."""
    (tmp_path / "state").write_text("")
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    with pytest.raises(StageError, match=r"dead letters to .*: not a directory"):
        await put(letters)


async def test_letters_are_durable_after_sync(
    letters: DeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fsync covers all letters since the last; without new ones there is none."""
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    await letters.sync()
    await put(letters)
    # For a new file, its name and its folders' names must be durable, too.
    path = file_of(letters)
    assert synced == [*map(str, reversed(path.parents[:4]))]
    synced.clear()
    await put(letters)
    assert synced == []
    await letters.sync()
    await letters.sync()
    assert synced == [str(path)]


async def test_sync_that_fails_is_reported_and_tried_again(
    letters: DeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A letter that is not durable does not count as kept."""
    await put(letters)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    for _ in range(2):
        with pytest.raises(StageError, match="input/output error"):
            await letters.sync()


async def test_secrets_are_not_stored(tmp_path: Path) -> None:
    """An interpolated value is replaced by its placeholder, wherever it appears."""
    letters = DeadLetters(
        tmp_path,
        pipeline="p",
        commands={"clean": ("sort", "-k${N}", "${TOKEN}")},
        hidden={"hunter2": "${TOKEN}", "it's me": "${ME}", "a": "${SHORT}", "": "${E}"},
    )
    attempt = Attempt("w", 1, "hunter2!", ("a hunter2",), ("token=hunter2",))
    error = lost("command: sort -k1 hunter2 'it'\"'\"'s me'", attempt)
    letter = await put(letters, b"hunter2", error=error)
    letters.close()
    assert letter.error == "command: sort -k1 ${TOKEN} '${ME}'"
    assert letter.attempts == (
        Attempt("w", 1, "${TOKEN}!", ("a ${TOKEN}",), ("token=${TOKEN}",)),
    )
    assert letter.config["worker"]["command"] == ["sort", "-k${N}", "${TOKEN}"]
    # The message itself is unchanged.
    assert letter.message == b"hunter2"
    assert b"hunter2" not in file_of(letters).read_bytes()


async def test_command_for_looking_is_quoted(tmp_path: Path) -> None:
    """The command can be pasted into a shell."""
    assert DeadLetters(tmp_path, pipeline="p", shown="my file.yaml").look == (
        "etlstage dlq ls 'my file.yaml'"
    )
    assert DeadLetters(Path("/s"), pipeline="p").look == "etlstage dlq ls /s"


@pytest.mark.slow
async def test_reading_takes_no_memory(tmp_path: Path) -> None:
    """Letters are read one at a time, however many there are."""
    letters = DeadLetters(tmp_path, pipeline="p")
    await put(letters, b"x" * 10_000)
    letters.close()
    path = file_of(letters)
    path.write_bytes(path.read_bytes() * 10_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(1 for _ in read_letters(path)) == 10_000
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 20_000


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("", ""),
        ("plain", "plain"),
        ("one; two; three", "one"),
        ("one\ntwo; three", "one"),
        ("stage a b: worker a b-1 (pid 7) was killed; command: c", "was killed"),
        ("stage a: worker a-1 is gone; b", "worker a-1 is gone"),
        ("stage a: KeyError: 'a'; worker a-1 (pid 7) exited", "KeyError: 'a'"),
        ("x; stage a: worker a-1 (pid 7) died", "x"),
    ],
)
def test_first_clause(error: str, expected: str) -> None:
    """It is short enough for a line of a table or a log."""
    assert first_clause(error) == expected


async def test_letter_that_is_recalled_keeps_its_id(tmp_path: Path) -> None:
    """When a run is repeated, known letters keep their ids; new ones get unused ids."""
    for messages in ([b"a", b"b"], [b"new", b"b", b"a"]):
        letters = DeadLetters(tmp_path, pipeline="p", run="r")
        letters.recall()
        for message in messages:
            await put(letters, message)
        adopted = await put(letters, b"c")
        letters.adopt(adopted, place=8)
        letters.close()
    found = [one for one in kept(file_of(letters)) if isinstance(one, DeadLetter)]
    assert [(one.id, one.message) for one in found] == [
        ("r-1", b"a"),
        ("r-2", b"b"),
        ("r-3", b"c"),
        ("r-4", b"c"),
        ("r-5", b"new"),
    ]


async def test_letter_of_an_executor_is_pending_as_ours_are(tmp_path: Path) -> None:
    """Executors don't know whether the output has been replaced yet."""
    letters = DeadLetters(tmp_path, pipeline="p", run="r")
    letters.pending = True
    ours = await put(letters, b"a")
    letters.adopt(replace(ours, pending=False), place=1)
    letters.supersede("2026-01-01T00:00:00.000+00:00")
    letters.adopt(ours, place=2)
    letters.close()
    found = [one for one in kept(file_of(letters)) if isinstance(one, DeadLetter)]
    assert [one.pending for one in found] == [True, True, False]


async def put_at(letters: DeadLetters, stage: str = "t") -> None:
    """Dead-letter a message."""
    error = WorkerLost("died", stage=stage)
    letter = letters.letter(stage, 0, b"x", error, config={}, time="2026")
    await letters.keep([letter])


def test_line_that_is_appended_while_another_thread_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sync makes it durable (issue 14)."""
    file = LetterFile(tmp_path, "t", lambda: None)
    file.append(b"{}\n")
    synced: list[int] = []
    write, fsync = os.write, os.fsync

    def write_behind_sync(fd: int, data: bytes) -> int:
        file.sync()
        return write(fd, data)

    def append_before_sync(fd: int) -> None:
        if not synced:
            monkeypatch.setattr(os, "write", write)
            file.append(b"{}\n")
        synced.append(os.fstat(fd).st_size)
        fsync(fd)

    monkeypatch.setattr(os, "write", write_behind_sync)
    file.append(b"{}\n")
    assert file.dirty
    monkeypatch.setattr(os, "fsync", append_before_sync)
    file.sync()
    assert file.dirty
    file.sync()
    assert not file.dirty
    assert synced == [9, 9]
    file.close()


async def test_stage_whose_first_letter_comes_while_others_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file added during the sync does not break the loop over files (issue 14)."""
    letters = DeadLetters(tmp_path, pipeline="p")
    await put_at(letters)
    await put_at(letters, "u")

    def dirty(_file: LetterFile) -> bool:
        letters._files.setdefault("v", letters._files["t"])
        return False

    monkeypatch.setattr(LetterFile, "dirty", property(dirty), raising=False)
    await letters.sync()
    letters.close()


@pytest.mark.parametrize("left", [None, 0, 7])
async def test_file_that_lacks_what_is_on_record(
    tmp_path: Path, left: int | None
) -> None:
    """The run does not resume as if all were there, and no file is cut (issue 14)."""
    letters = DeadLetters(tmp_path, pipeline="p", run="r0")
    await put_at(letters)
    await put_at(letters, "u")
    letters.close()
    sizes = letters.sizes()
    path = tmp_path / "dead_letters" / "t.jsonl"
    if left is None:
        path.unlink()
    else:
        os.truncate(path, left)
    again = DeadLetters(tmp_path, pipeline="p")
    with pytest.raises(StateUnusable) as caught:
        again.resume("r0", {"u": 0, "t": sizes["t"]})
    assert str(caught.value) == (
        f"{path}: has {left or 0} bytes, expected at least {sizes['t']}, as recorded"
        " for the dead letters of run r0: restore the file, or use 'etlstage state"
        f" reset {tmp_path}' to forget the run and start from the beginning"
    )
    assert again.size("u") == sizes["u"]


def adopt(letters: DeadLetters, stage: str, number: int) -> None:
    """Dead-letter a message."""
    error = WorkerLost("died", stage=stage)
    message = b"%d" % number
    letter = letters.letter(stage, number, message, error, config={}, time="2026")
    letters.adopt(letter, place=number)


class Holder:
    """A run that holds the state directory, and may be taken over."""

    def __init__(self, state: Path) -> None:
        take_over(state)
        self.delivery = Delivery(state, exactly_once=True)
        self.delivery.__enter__()
        self.letters = DeadLetters(state, pipeline="p", run="r")
        self.letters.fence = self.delivery.record.fence
        if self.delivery.begin("r", stages=["e"], letters={}):
            self.letters.resume("r", self.delivery.record.letters)

    def keep(self, stage: str, number: int) -> None:
        """Dead-letter a message."""
        adopt(self.letters, stage, number)

    def commit(self) -> None:
        """Record all letters in a commit."""
        self.delivery.check()
        anyio.run(self.letters.sync)
        record = self.delivery.next(None, letters=self.letters.sizes())
        self.delivery.keep(record)

    def close(self) -> None:
        """Release the files."""
        self.letters.close()
        self.delivery.__exit__()


class TakeOvers(RuleBasedStateMachine):
    """Runs that were taken over may continue at any time; only the last run counts."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory()
        self.state = Path(self._folder.name) / "state"
        self.state.mkdir(mode=0o700)
        self.holders = [Holder(self.state)]
        self.other = DeadLetters(self.state, pipeline="p", run="other")
        self.number = 0
        self.kept: list[tuple[str, int]] = []
        self.recorded: list[tuple[str, int]] = []
        self.of_other: list[tuple[str, int]] = []

    @rule()
    def take_over(self) -> None:
        """Start another run, which resumes after the last recorded commit."""
        self.holders.append(Holder(self.state))
        self.kept = [*self.recorded]

    @rule(which=integers(min_value=0), stage=sampled_from("tu"))
    def keep(self, which: int, stage: str) -> None:
        """Dead-letter a message in any of the runs."""
        holder = self.holders[which % len(self.holders)]
        self.number += 1
        if holder is self.holders[-1]:
            holder.keep(stage, self.number)
            self.kept.append((stage, self.number))
            return
        with suppress(StageError):
            holder.keep(stage, self.number)

    @rule(stage=sampled_from("tu"))
    def keep_other(self, stage: str) -> None:
        """Dead-letter a message in a run without a state directory of its own."""
        self.number += 1
        adopt(self.other, stage, self.number)
        self.of_other.append((stage, self.number))

    @rule(which=integers(min_value=0))
    def commit(self, which: int) -> None:
        """Record the letters; raise in a run that was taken over."""
        holder = self.holders[which % len(self.holders)]
        if holder is self.holders[-1]:
            holder.commit()
            self.recorded = [*self.kept]
            return
        with pytest.raises(StateUnusable, match="has taken over"):
            holder.commit()

    @invariant()
    def letters_are_those_of_the_last(self) -> None:
        """The files hold exactly the last run's letters and the other's, each once."""
        found = [
            (letter.stage, int(letter.message))
            for path in letter_files(self.state)
            for letter in read_letters(path)
            if isinstance(letter, DeadLetter)
        ]
        assert sorted(found) == sorted(self.kept + self.of_other)

    def teardown(self) -> None:
        """Close and remove all files."""
        for holder in self.holders:
            holder.close()
        self.other.close()
        self._folder.cleanup()


TakeOvers.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=15,
    deadline=None,  # it writes files
)
TestTakeOvers = TakeOvers.TestCase


def test_letter_of_a_run_that_was_taken_over(tmp_path: Path) -> None:
    """The error names its stage and the directory; no file stays open (issue 14)."""
    first = Holder(tmp_path)
    first.close()
    second = Holder(tmp_path)
    with pytest.raises(StageError) as caught:
        first.keep("t", 1)
    assert str(caught.value) == (
        f"stage t: another run has taken over the state directory {tmp_path}: dead"
        " letters of this run are no longer kept there"
    )
    assert first.letters.sizes() == {"t": 0}
    second.close()


def test_start_that_is_taken_over_while_it_cuts(tmp_path: Path) -> None:
    """The file is left to the other run (issue 14)."""
    first = Holder(tmp_path)
    first.keep("t", 1)
    first.close()
    second = Holder(tmp_path)
    second.keep("t", 2)
    before = second.letters.sizes()
    with pytest.raises(StateUnusable, match="has taken over the state directory"):
        first.letters.resume("r", {})
    assert second.letters.sizes() == before
    second.close()
