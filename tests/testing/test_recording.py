from __future__ import annotations

import json
import re
import resource
import stat
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing.recording.recording import Recording
from etlstage.testing.transcript import Channel, Entry

pytestmark = pytest.mark.core

EVERY_BYTE = bytes(range(256))
RECORDING = Recording(
    stage="clean",
    kind=StageKind.LOAD,
    dialect=MarkerDialect(
        mode=Mode.BATCH_SUPERVISOR, markers=Markers(eom=b"<m>"), eob_then_eom=True
    ),
    command=("./worker", "--eom", "{eom}"),
    worker="clean-2",
    start=3,
    entries=(
        Entry(Channel.STDIN, b"one<m>", 0.25, ahead=7),
        Entry(Channel.STDOUT, EVERY_BYTE, 0.5),
        Entry(Channel.STDERR, b"oh\n", 0.5),
        Entry(Channel.STATUS, b"\n", 0.5),
        Entry(Channel.STDIN, b"", 1.0),
    ),
    exit=-9,
    stopped=True,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file that holds the recording."""
    path = tmp_path / "clean-2.3.rec"
    RECORDING.save(path)
    return path


def damage(path: Path, line: int) -> None:
    """Change a byte of a line of a file, counted from 0."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b": ", b":  ", 1)
    path.write_bytes(b"".join(lines))


def test_file_gives_back_what_was_saved(path: Path) -> None:
    """Every byte, every setting, every cut and time; only its owner can read it."""
    assert Recording.load(path) == RECORDING
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_lines_are_json_with_a_checksum_that_anybody_can_check(path: Path) -> None:
    """It covers the bytes before it; each byte of the conversation is a character."""
    lines = path.read_bytes().splitlines()
    assert json.loads(lines[0])["format"] == "etlstage-recording"
    assert json.loads(lines[2])["stdout"].encode("latin-1") == EVERY_BYTE
    for line in lines:
        text, _, _ = line.partition(b', "crc"')
        assert json.loads(line)["crc"] == f"{zlib.crc32(text):08x}"


def test_what_is_not_so_is_not_claimed(path: Path) -> None:
    """Lines are read by people, so defaults are left out (issue 12)."""
    *_, stdin, end = path.read_bytes().splitlines()
    assert b'"ahead"' not in stdin
    assert set(json.loads(end)) == {"exit", "stopped", "crc"}


@pytest.mark.parametrize("room", [10, -3])
def test_line_that_does_not_fit_is_reported(path: Path, room: int) -> None:
    """A partial write is an error, and the file is closed (issue 12)."""
    small = path.with_name("small")
    size = room if room > 0 else path.stat().st_size + room
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    files = len([*Path("/proc/self/fd").iterdir()])
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            RECORDING.save(small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len([*Path("/proc/self/fd").iterdir()]) == files
    assert small.stat().st_size == size


def test_damage_in_the_last_line_but_one_is_an_error(path: Path) -> None:
    """Only a line that nothing follows can be torn (issue 12)."""
    path.write_bytes(path.read_bytes()[:-1])
    damage(path, -2)
    with pytest.raises(ConfigError, match=r"clean-2\.3\.rec:6: the checksum does not"):
        Recording.load(path)


def test_file_that_is_there_is_not_written_over(path: Path) -> None:
    """A recording is evidence."""
    with pytest.raises(FileExistsError):
        RECORDING.save(path)


@pytest.mark.parametrize("lost", [1, 20])
def test_torn_line_is_left_out_and_reported(path: Path, lost: int) -> None:
    """The writer was killed; all lines before it can be used."""
    path.write_bytes(path.read_bytes()[:-lost])
    found = Recording.load(path)
    assert found.cut == "the file ends within a line"
    assert (found.entries, found.exit) == (RECORDING.entries, None)


def test_damaged_last_line_is_left_out_and_reported(path: Path) -> None:
    """A file may have grown on disk before its bytes were written."""
    damage(path, -1)
    assert Recording.load(path).cut == "the file ends within a line"


def test_file_without_its_last_line_is_not_complete(path: Path) -> None:
    """How the worker ended is unknown."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    found = Recording.load(path)
    assert found.cut == "the file ends before the worker's exit"
    assert found.entries == RECORDING.entries


def test_damage_in_the_middle_is_an_error(path: Path) -> None:
    """Lines after it can't be trusted to continue those before it."""
    damage(path, 2)
    with pytest.raises(ConfigError, match=r"clean-2\.3\.rec:3: the checksum does not"):
        Recording.load(path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"", "is not a recording: it is empty"),
        (b'{"format": "etl', "is not a recording: it ends within its first line"),
        (b"name: x\n", "other:1: is not a line of a recording"),
        (b'{"a": 1}\n', "other:1: is not a line of a recording"),
    ],
)
def test_other_file_is_refused(tmp_path: Path, text: bytes, error: str) -> None:
    """The error states why."""
    other = tmp_path / "other"
    other.write_bytes(text)
    with pytest.raises(ConfigError, match=error):
        Recording.load(other)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"at": 0, "stdin": 5', "stdin is 5, expected text"),
        (b'{"at": "0", "stdin": ""', "at is '0', expected a number of seconds"),
        (b'{"at": 1e999, "stdin": ""', "at is inf, expected a number of seconds"),
        (b'{"at": true, "stdin": ""', "at is True, expected a number of seconds"),
        (b'{"at": 1%s, "stdin": ""' % (b"0" * 400), "at is 10+, expected a number of"),
        (b'{"at": 0, "stdin": "", "ahead": []', r"ahead is \[\], expected a number of"),
    ],
)
def test_line_with_values_of_wrong_types_is_refused(
    path: Path, line: bytes, error: str
) -> None:
    """Even if its checksum is right (issue 26)."""
    *rest, end = path.read_bytes().splitlines(keepends=True)
    rest += [b'%s, "crc": "%08x"}\n' % (line, zlib.crc32(line)), end]
    path.write_bytes(b"".join(rest))
    with pytest.raises(ConfigError, match=rf"is not a recording: {error}"):
        Recording.load(path)


@pytest.mark.parametrize(
    ("number", "key", "value", "expected"),
    [
        (0, "stage", [1], "text"),
        (0, "worker", 1, "text"),
        (0, "start", "1", "a whole number"),
        (0, "command", "cat", "a list"),
        (0, "dialect", "marker", "a mapping"),
        (-1, "exit", {"a": 1}, "a status or None"),
        (-1, "cut", 1, "text"),
    ],
)
def test_key_with_a_value_of_a_wrong_type_is_refused(
    path: Path, number: int, key: str, value: object, expected: str
) -> None:
    """Even if its checksum is right (issue 26)."""
    lines = path.read_bytes().splitlines(keepends=True)
    line = json.loads(lines[number])
    del line["crc"]
    text = json.dumps(line | {key: value})[:-1].encode()
    lines[number] = b'%s, "crc": "%08x"}\n' % (text, zlib.crc32(text))
    path.write_bytes(b"".join(lines))
    error = f"{path} is not a recording: {key} is {value!r}, expected {expected}"
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}$"):
        Recording.load(path)


def test_later_version_is_refused(path: Path) -> None:
    """A format that is not known must not be guessed at."""
    text = path.read_bytes().splitlines()[0].partition(b', "crc"')[0]
    text = text.replace(b'"version": 1', b'"version": 2')
    path.write_bytes(b'%s, "crc": "%08x"}\n' % (text, zlib.crc32(text)))
    with pytest.raises(ConfigError, match="format etlstage-recording 2, expected"):
        Recording.load(path)


def test_stage_speaks_as_the_one_that_was_recorded() -> None:
    """It runs the command that is given."""
    stage = RECORDING.stage_of(["./other", "x"])
    assert (stage.name, stage.kind) == ("clean", StageKind.LOAD)
    assert stage.dialect == RECORDING.dialect
    assert stage.program.command == ("./other", "x")


def test_what_has_passed_is_reported_by_channel() -> None:
    """Pieces are joined, as their cuts are a matter of chance."""
    more = replace(RECORDING, entries=RECORDING.entries * 2)
    assert more.written(Channel.STDIN) == b"one<m>" * 2
