"""A daemon's properties translated to a load stage, name by name."""

from __future__ import annotations

import re

import pytest

from etlstage.errors import ConfigError
from etlstage.protocol.kcl.properties import read_properties, translated
from etlstage.protocol.registry import translation
from etlstage.settings.units import DURATION

pytestmark = pytest.mark.core

PROGRAM = "executableName = python  sample.py\n"


def test_file_of_java() -> None:
    """Comments, separators, escapes, and continued lines."""
    text = (
        "# comment\n! another = 1\n\n"
        "a=1\n  b : two words \nc three\nd\n"
        "e = x\\\n    y\\\n    z\nf\\ g = \\u0041\\t\\:\na=last\n"
        "h = C\\\\\ni = open\\"
    )
    assert read_properties(text) == {
        "a": "last",
        "b": "two words",
        "c": "three",
        "d": "",
        "e": "xyz",
        "f g": "A\t:",
        "h": "C\\",
        "i": "open",
    }
    assert read_properties("=value") == {}


def test_lines_end_as_in_java() -> None:
    """With a line feed, a carriage return or both, and nothing else (issue 26)."""
    text = "a=1\rb=2\r\nc=3\\\r\n  4\nd=w\x85x\x1cy\x0bz\ne\x85=5"
    assert read_properties(text) == {
        "a": "1",
        "b": "2",
        "c": "34",
        "d": "w\x85x\x1cy\x0bz",
        "e\x85": "5",
    }


def test_escaped_surrogates_are_joined() -> None:
    """Two escapes of Java stand for one character beyond 16 bits (issue 26)."""
    text = "a\\uD83D\\uDE00 = \\ufeffx\\ud83d\\ude00y\\u00e9"
    assert read_properties(text) == {"a\U0001f600": "\ufeffx\U0001f600yé"}


def test_what_has_a_key() -> None:
    """The program, times, records of an action, empty lists."""
    keys, dropped, _ = translated(
        PROGRAM + "timeoutInSeconds=60\nshutdownGraceMillis=2500\nmaxRecords=500\n"
        "callProcessRecordsEvenForEmptyRecordList=TRUE\n"
        "idleTimeBetweenReadsInMillis=250\n"
    )
    assert keys == {
        "worker": {"command": ["python", "sample.py"]},
        "dialect": {"name": "kcl", "empty_after": "0.25s"},
        "timeout": {"message": "60s", "farewell": "2.5s"},
        "batch": {"size": 500},
    }
    assert dropped == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("shutdownGraceMillis = 0", "0 is not allowed here: timeout.farewell keeps"),
        ("timeoutInSeconds = 0", "0 is not allowed here: timeout.message keeps"),
        ("callProcessRecordsEvenForEmptyRecordList = false", "false is the default"),
        ("idleTimeBetweenReadsInMillis = 1000", "records come from the extract stage"),
        ("regionName = r", "records come from the extract stage"),
        ("shardSyncIntervalMillis = 1", "records come from the extract stage"),
        ("failoverTimeMillis = 20000", "records come from the extract stage"),
        ("cleanupLeasesUponShardCompletion = false", "leases are in state"),
        ("fanoutConfig.consumerArn = a", "extract.kinesis has no key for it"),
        ("coordinatorStateTableName = t", "leases are in state"),
        ("workerMetricsBillingMode = b", "leases are in state"),
        ("metricsLevel = NONE", "etlstage has metrics of its own"),
        (
            "maxRecord = 5",
            "not an option of the daemon, which ignores it (did you mean 'maxRecords'?)",
        ),
    ],
)
def test_what_is_dropped_is_reported(line: str, said: str) -> None:
    """With the reason; including false, 0, and what a daemon ignores (issue 25)."""
    keys, (dropped,), _ = translated(f"{PROGRAM}{line}\n")
    assert dropped.startswith(f"{line.split()[0]}: {said}")
    assert keys.keys() == {"worker", "dialect"}


def test_stream_is_the_extract_stage() -> None:
    """Its name, start and endpoint, and how it is read and shared (issue 25)."""
    keys, dropped, extract = translated(
        PROGRAM + "streamName = clicks\nregionName = eu-west-1\nkinesisEndpoint = u\n"
        "initialPositionInStream = TRIM_HORIZON\nidleTimeBetweenReadsInMillis = 500\n"
        "shardSyncIntervalMillis = 30000\nfailoverTimeMillis = 20000\n"
        "applicationName = a\n"
    )
    assert extract == {
        "kinesis": {
            "stream": "clicks",
            "from": "trim_horizon",
            "region": "eu-west-1",
            "endpoint": "u",
            "idle": "0.5s",
            "sync": "30s",
        }
    }
    assert keys == {
        "worker": {"command": ["python", "sample.py"]},
        "dialect": {"name": "kcl"},
        "shards": {"failover": "20s"},
    }
    assert [line.partition(":")[0] for line in dropped] == ["applicationName"]


@pytest.mark.parametrize(
    ("lines", "begin"),
    [
        ("", "latest"),
        ("initialPositionInStream = trim_horizon", "trim_horizon"),
        ("initialPositionInStreamExtended = 1476889708", "1476889708"),
        (
            "initialPositionInStreamExtended = 1\ninitialPositionInStream = TRIM_HORIZON",
            "1",
        ),
    ],
)
def test_where_a_stream_begins(lines: str, begin: str) -> None:
    """As for a daemon: at the stream's end by default; an ARN overrides a name."""
    stream = "streamArn = arn:aws:kinesis:r:1:stream/s\nstreamName = other\n"
    _, dropped, extract = translated(PROGRAM + stream + lines)
    assert extract["kinesis"]["from"] == begin
    assert extract["kinesis"]["stream"] == "arn:aws:kinesis:r:1:stream/s"
    assert dropped == ["streamName: streamArn is used instead"]


def test_times_are_exact_and_read_again() -> None:
    """Also those that a short text would round, or write as 1e+06s (issue 25)."""
    keys, _, _ = translated(
        PROGRAM + "streamName = s\n"
        "timeoutInSeconds = 1000000\nfailoverTimeMillis = 12345678\n"
        "callProcessRecordsEvenForEmptyRecordList = true\n"
        "idleTimeBetweenReadsInMillis = 1234567890\n"
    )
    for written, seconds in (
        (keys["timeout"]["message"], 1_000_000),
        (keys["shards"]["failover"], 12345.678),
        (keys["dialect"]["empty_after"], 1234567.89),
    ):
        assert DURATION.read(written) == seconds


def test_empty_lists_come_as_daemons_read() -> None:
    """Every 1.5 s by default."""
    asked = "callProcessRecordsEvenForEmptyRecordList = true"
    keys, _, _ = translation("kcl", PROGRAM + asked)
    assert keys["dialect"]["empty_after"] == "1.5s"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "executableName: expected the command"),
        (PROGRAM + "maxRecords = many", "maxRecords: expected a whole number"),
        (
            PROGRAM + "streamName=s\ninitialPositionInStream = AT_TIMESTAMP",
            "initialPositionInStream: expected LATEST or TRIM_HORIZON",
        ),
        (PROGRAM + "timeoutInSeconds = -1", "timeoutInSeconds: expected a whole"),
        (
            PROGRAM + "regionName = a\\uDE00\\uD83D",
            "regionName: found half of a surrogate pair, expected both halves",
        ),
        (PROGRAM + "a\\ud83d = 1", "a\\ud83d: found half of a surrogate pair"),
        *(
            (PROGRAM + f"streamName=s\n{name}=" + "9" * digits, f"{name}: expected a")
            for digits in (309, 5000)
            for name in (
                "failoverTimeMillis",
                "maxRecords",
                "initialPositionInStreamExtended",
            )
        ),
        (
            PROGRAM + "callProcessRecordsEvenForEmptyRecordList=true\n"
            "idleTimeBetweenReadsInMillis=" + "9" * 400,
            "idleTimeBetweenReadsInMillis: expected a whole number of at most 308",
        ),
    ],
)
def test_wrong_value(text: str, said: str) -> None:
    """The error names the property (issue 26)."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        translated(text)
