"""
The properties file of a daemon, as the keys of a load stage.

A daemon ignores names that it does not know, and values that are false or 0; here each
is said: what became of it, or why it has no key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from etlstage.errors import ConfigError, guess

__all__ = ("read_properties", "translated")

_Keys: TypeAlias = dict[str, dict[str, object]]

_EXTRACT: Final = "records come from the extract stage"
_LEASES: Final = "there are no leases: shards.count says how many shards a run has"
_METRICS: Final = "metrics are those of etlstage"
_THREADS: Final = "each shard has a worker, and no thread"
_WHY: Final[dict[str, str]] = {
    **dict.fromkeys(
        [
            "applicationName",
            "streamName",
            "streamArn",
            "AwsCredentialsProvider",
            "AwsCredentialsProviderDynamoDB",
            "AwsCredentialsProviderCloudWatch",
            "regionName",
            "kinesisEndpoint",
            "dynamoDBEndpoint",
            "initialPositionInStream",
            "initialPositionInStreamExtended",
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
            "workerId",
            "tableName",
            "failoverTimeMillis",
            "leaseAssignmentIntervalMillis",
            "shardSyncIntervalMillis",
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
    "maxActiveThreads": _THREADS,
    "processingLanguage": "only AWS uses it",
    "taskBackoffTimeMillis": "see restart.delay",
    "logWarningForTaskAfterMillis": "silent workers are logged",
    "validateSequenceNumberBeforeCheckpointing": "checkpoints are always validated",
}
_OURS: Final = (
    "executableName",
    "timeoutInSeconds",
    "shutdownGraceMillis",
    "maxRecords",
    "callProcessRecordsEvenForEmptyRecordList",
    "idleTimeBetweenReadsInMillis",
)
"""What has a key here."""
_GROUPS: Final = (
    ("fanoutConfig.", _EXTRACT),
    ("coordinatorState", _LEASES),
    ("workerMetrics", _LEASES),
)
_IDLE: Final = "1500"  # milliseconds between two reads, if it is not said
_LINE: Final = re.compile(
    r"((?:\\.|[^=:\s\\])+)[ \t\f]*[=: \t\f]?[ \t\f]*(.*)", re.DOTALL
)
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def read_properties(text: str) -> dict[str, str]:
    """Return the properties of a file of Java; of a name that comes twice the last."""
    found = {}
    for line in _logical_lines(text):
        match = _LINE.fullmatch(line)
        if match is not None:
            found[_plain(match[1])] = _plain(match[2]).strip()
    return found


def _logical_lines(text: str) -> Iterator[str]:
    """Yield lines, with those that a backslash ends and those behind them as one."""
    begun = ""
    for line in text.splitlines():
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

    return _ESCAPE.sub(meant, text)


def translated(text: str) -> tuple[_Keys, list[str]]:
    """
    Return a properties file as the keys of a load stage, and what was dropped and why.

    Raises:
        ConfigError: If there is no program, or a value is none of its kind.

    """
    properties = read_properties(text)
    command = properties.get("executableName", "").split()
    if not command:
        raise ConfigError("executableName: expected the command of a processor")
    keys: _Keys = {"worker": {"command": command}, "dialect": {"name": "kcl"}}
    dropped = []
    for name, value in properties.items():
        why = _translate(keys, name, value, properties)
        if why:
            dropped.append(f"{name}: {why}")
    return keys, dropped


def _translate(
    keys: _Keys, name: str, value: str, properties: Mapping[str, str]
) -> str:
    """Add a value to the keys, or say why not."""
    match name:
        case "executableName":
            return ""
        case "timeoutInSeconds":
            return _seconds(keys, "message", name, value, 1)
        case "shutdownGraceMillis":
            return _seconds(keys, "farewell", name, value, 1000)
        case "maxRecords":
            keys["batch"] = {"size": max(1, _whole(name, value))}
        case "callProcessRecordsEvenForEmptyRecordList":
            if value.lower() != "true":
                return "false is the default: none is given"
            between = "idleTimeBetweenReadsInMillis"
            idle = _whole(between, properties.get(between, _IDLE))
            keys["dialect"]["empty_after"] = f"{max(1, idle) / 1000:g}s"
        case "idleTimeBetweenReadsInMillis":
            asked = properties.get("callProcessRecordsEvenForEmptyRecordList", "")
            return "" if asked.lower() == "true" else _EXTRACT
        case _:
            return _reason(name)
    return ""


def _seconds(keys: _Keys, key: str, name: str, value: str, unit: int) -> str:
    seconds = _whole(name, value) / unit
    if not seconds:
        return f"0 is no time here: timeout.{key} is left at its default"
    keys.setdefault("timeout", {})[key] = f"{seconds:g}s"
    return ""


def _whole(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()):
        raise ConfigError(f"{name}: expected a whole number, got {value!r}")
    return int(value)


def _reason(name: str) -> str:
    if name in _WHY:
        return _WHY[name]
    for begin, why in _GROUPS:
        if name.startswith(begin):
            return why
    return f"no option of the daemon, which ignores it{guess(name, [*_OURS, *_WHY])}"
