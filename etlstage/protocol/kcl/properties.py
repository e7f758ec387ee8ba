"""
Translates a daemon's properties file into the keys of a load stage and its stream.

A daemon ignores names that it does not know, and values that are false or 0; here each
is either translated, or reported with the reason why it has no key.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from etlstage.errors import ConfigError, guess
from etlstage.settings.units import as_duration

__all__ = ("read_properties", "translated")

_Keys: TypeAlias = dict[str, dict[str, object]]

_EXTRACT: Final = "extract.kinesis has no key for it"
_NO_STREAM: Final = "records come from the extract stage, and no stream is named"
_LEASES: Final = "leases are in state, or in the database that shards.leases names"
_METRICS: Final = "etlstage has metrics of its own"
_THREADS: Final = "each shard has a worker process, not a thread"
_WHY: Final[dict[str, str]] = {
    **dict.fromkeys(
        [
            "retrievalMode",
            "retryGetRecordsInSeconds",
            "maxGetRecordsThreadPool",
            "millisBehindLatestThresholdForReducedTps",
            "listShardsBackoffTimeInMillis",
            "maxListShardsRetryAttempts",
        ],
        _EXTRACT,
    ),
    **dict.fromkeys(
        [
            "dynamoDBEndpoint",
            "tableName",
            "leaseAssignmentIntervalMillis",
            "cleanupLeasesUponShardCompletion",
            "ignoreUnexpectedChildShards",
            "maxLeasesForWorker",
            "maxLeasesToStealAtOneTime",
            "enablePriorityLeaseAssignment",
            "maxLeaseRenewalThreads",
            "initialLeaseTableReadCapacity",
            "initialLeaseTableWriteCapacity",
            "leaseTableDeletionProtectionEnabled",
            "leaseTablePitrEnabled",
            "leaseTableScanTotalSegments",
            "parentShardPollIntervalMillis",
            "skipShardSyncAtWorkerInitializationIfLeasesExist",
            "schedulerInitializationBackoffTimeMillis",
            "shardPrioritization",
            "clientVersionConfig",
            "migrateAllEntitiesToLeaseTable",
            "tableMigrationCompleteBakeTimeSeconds",
            "isGracefulLeaseHandoffEnabled",
            "gracefulLeaseHandoffTimeoutMillis",
            "disableWorkerMetrics",
            "maxThroughputPerHostKBps",
            "dampeningPercentage",
            "reBalanceThresholdPercentage",
            "allowThroughputOvershoot",
            "varianceBalancingFrequency",
            "workerMetricsEMAAlpha",
            "noOfPersistedMetricsPerWorkerMetrics",
            "inMemoryWorkerMetricsCaptureFrequencyMillis",
            "workerMetricsReporterFreqInMillis",
            "staleWorkerMetricsEntryCleanupDuration",
        ],
        _LEASES,
    ),
    **dict.fromkeys(
        [
            "metricsLevel",
            "metricsEnabledDimensions",
            "metricsBufferTimeMillis",
            "metricsMaxQueueSize",
        ],
        _METRICS,
    ),
    **dict.fromkeys(
        [
            "AwsCredentialsProvider",
            "AwsCredentialsProviderDynamoDB",
            "AwsCredentialsProviderCloudWatch",
        ],
        "boto3 looks up the credentials",
    ),
    "applicationName": "the pipeline's name is used, and its data is stored in state",
    "workerId": "runners name themselves",
    "maxActiveThreads": _THREADS,
    "processingLanguage": "only AWS uses it",
    "taskBackoffTimeMillis": "see restart.delay",
    "logWarningForTaskAfterMillis": "silent workers are logged",
    "validateSequenceNumberBeforeCheckpointing": "checkpoints are always validated",
}
_TIMES: Final = {
    "timeoutInSeconds": ("timeout", "message", 1),
    "shutdownGraceMillis": ("timeout", "farewell", 1000),
    "failoverTimeMillis": ("shards", "failover", 1000),
    "idleTimeBetweenReadsInMillis": ("kinesis", "idle", 1000),
    "shardSyncIntervalMillis": ("kinesis", "sync", 1000),
}
"""The mapping and the key of each here, and how many of its units make a second."""
_TEXTS: Final = {"regionName": "region", "kinesisEndpoint": "endpoint"}
"""The key of each in the mapping of the stream."""
_EMPTY: Final = "callProcessRecordsEvenForEmptyRecordList"
_BEGIN: Final = ("initialPositionInStream", "initialPositionInStreamExtended")
_OURS: Final = (
    *("executableName", "streamName", "streamArn", "maxRecords", _EMPTY),
    *(*_TIMES, *_TEXTS, *_BEGIN),
)
"""Properties with a key here."""
_GROUPS: Final = (
    ("fanoutConfig.", _EXTRACT),
    ("coordinatorState", _LEASES),
    ("workerMetrics", _LEASES),
)
_IDLE: Final = "1500"  # milliseconds between two reads, by default
_DIGITS: Final = sys.float_info.max_10_exp  # so that it can be divided
_LINE_END: Final = re.compile(r"\r\n|\r|\n")
_LINE: Final = re.compile(
    r"((?:\\.|[^=: \t\f\\])+)[ \t\f]*[=: \t\f]?[ \t\f]*(.*)", re.DOTALL
)
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def read_properties(text: str) -> dict[str, str]:
    """
    Return the properties in a Java file; the last value of a repeated name wins.

    Raises:
        ConfigError: If half of a surrogate pair is escaped.

    """
    found = {}
    for line in _logical_lines(text):
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        try:
            found[_plain(match[1])] = _plain(match[2]).strip()
        except UnicodeDecodeError:
            raise ConfigError(
                f"{match[1]}: found half of a surrogate pair, expected both halves,"
                r" as in \ud83d\ude00"
            ) from None
    return found


def _logical_lines(text: str) -> Iterator[str]:
    """Yield logical lines: a line that ends with a backslash continues on the next."""
    begun = ""
    for line in _LINE_END.split(text):
        part = line.lstrip(" \t\f")
        if not begun and (not part or part[0] in "#!"):
            continue
        ends = len(part) - len(part.rstrip("\\"))
        if ends % 2:
            begun += part[:-1]
            continue
        yield begun + part
        begun = ""
    if begun:
        yield begun


def _plain(text: str) -> str:
    def meant(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) == 5 else _ESCAPES.get(code, code)

    # Java escapes a character beyond 16 bits as two.
    utf16 = _ESCAPE.sub(meant, text).encode("utf-16", "surrogatepass")
    return utf16.decode("utf-16")


def translated(text: str) -> tuple[_Keys, list[str], _Keys]:
    """
    Return the keys of a load stage, what was dropped and why, and those of an extract.

    Raises:
        ConfigError: If there is no program, a value has the wrong type, or half of a
            surrogate pair is escaped.

    """
    properties = read_properties(text)
    command = properties.get("executableName", "").split()
    if not command:
        raise ConfigError("executableName: expected the command of a processor")
    keys: _Keys = {"worker": {"command": command}, "dialect": {"name": "kcl"}}
    if stream := properties.get("streamArn") or properties.get("streamName"):
        # A daemon begins at the end of a stream by default.
        keys["kinesis"] = {"stream": stream, "from": "latest"}
    dropped = []
    for name, value in properties.items():
        why = _translate(keys, name, value, properties)
        if why:
            dropped.append(f"{name}: {why}")
    return keys, dropped, {"kinesis": keys.pop("kinesis")} if stream else {}


def _translate(
    keys: _Keys, name: str, value: str, properties: Mapping[str, str]
) -> str:
    """Add a value to the keys, or return why not."""
    stream = keys.get("kinesis")
    match name:
        case "executableName" | "streamArn":
            return ""
        case "streamName":
            return "streamArn is used instead" if properties.get("streamArn") else ""
        case "maxRecords":
            keys["batch"] = {"size": max(1, _whole(name, value))}
        case "callProcessRecordsEvenForEmptyRecordList":
            if value.lower() != "true":
                return "false is the default: no empty lists are given"
            between = "idleTimeBetweenReadsInMillis"
            idle = _whole(between, properties.get(between, _IDLE))
            keys["dialect"]["empty_after"] = as_duration(max(1, idle) / 1000)
        case "idleTimeBetweenReadsInMillis" if stream is None:
            asked = properties.get(_EMPTY, "")
            return "" if asked.lower() == "true" else _NO_STREAM
        case _ if name in _TIMES:
            return _seconds(keys, name, value)
        case _ if name in (*_TEXTS, *_BEGIN):
            return _NO_STREAM if stream is None else _of_stream(stream, name, value)
        case _:
            return _reason(name)
    return ""


def _of_stream(stream: dict[str, object], name: str, value: str) -> str:
    """Add where a stream is, or where it begins, or return why not."""
    if name in _TEXTS:
        stream[_TEXTS[name]] = value
    elif name == "initialPositionInStreamExtended":
        stream["from"] = str(_whole(name, value))
    elif value.upper() not in ("LATEST", "TRIM_HORIZON"):
        raise ConfigError(f"{name}: expected LATEST or TRIM_HORIZON, got {value!r}")
    elif stream["from"] == "latest":
        stream["from"] = value.lower()
    return ""


def _seconds(keys: _Keys, name: str, value: str) -> str:
    group, key, unit = _TIMES[name]
    if group in ("kinesis", "shards") and "kinesis" not in keys:
        return _NO_STREAM
    seconds = _whole(name, value) / unit
    if not seconds:
        return f"0 is not allowed here: {group}.{key} keeps its default"
    keys.setdefault(group, {})[key] = as_duration(seconds)
    return ""


def _whole(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= _DIGITS):
        raise ConfigError(
            f"{name}: expected a whole number of at most {_DIGITS} digits, got"
            f" {value!r}"
        )
    return int(value)


def _reason(name: str) -> str:
    if name in _WHY:
        return _WHY[name]
    for begin, why in _GROUPS:
        if name.startswith(begin):
            return why
    return (
        f"not an option of the daemon, which ignores it{guess(name, [*_OURS, *_WHY])}"
    )
