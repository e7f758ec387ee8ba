"""
A real Kinesis API on a free port: kinesalite, from the registry of npm.

It is installed once, into the cache folder of the user, by the machine's npm. If there
is none, root gets Node from Debian, and other users are shown what to install.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import boto3

from tests.cache import cached
from tests.database import install

__all__ = ("CREDENTIALS", "Kinesalite", "kinesalite")

_VERSION: Final = "3.3.3"
CREDENTIALS: Final = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_SERVER: Final = """\
const quick = {createStreamMs: 5, deleteStreamMs: 5, updateStreamMs: 5, shardLimit: 99}
const server = require("kinesalite")(quick)
// Its own command listens on all addresses.
server.listen(0, "127.0.0.1", () => console.log(server.address().port))
// A client that is killed within a request would end the server.
process.on("uncaughtException", error => { if (error.code !== "ECONNRESET") throw error })
process.stdin.on("end", () => process.exit()).resume()
"""


class Kinesalite:
    """A server, with one stream."""

    stream: Final = "clicks"

    def __init__(self, port: int) -> None:
        self.endpoint: Final = f"http://127.0.0.1:{port}"
        self.client: Final[Any] = boto3.client(
            "kinesis",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )

    def create(self, shards: int) -> None:
        """Create the stream."""
        self.client.create_stream(StreamName=self.stream, ShardCount=shards)
        self._wait()

    def delete(self) -> None:
        """Delete the stream."""
        self.client.delete_stream(StreamName=self.stream)
        waiter = self.client.get_waiter("stream_not_exists")
        waiter.config.delay = 0.02
        waiter.wait(StreamName=self.stream)

    def put(self, records: Sequence[tuple[bytes, str]]) -> None:
        """Put records: their data and partition keys."""
        answer = self.client.put_records(
            StreamName=self.stream,
            Records=[{"Data": data, "PartitionKey": key} for data, key in records],
        )
        assert not answer["FailedRecordCount"], answer

    def split(self, shard: str) -> None:
        """Split a shard in the middle."""
        of = next(s for s in self.shards() if s["ShardId"] == shard)["HashKeyRange"]
        half = (int(of["StartingHashKey"]) + int(of["EndingHashKey"])) // 2
        self.client.split_shard(
            StreamName=self.stream, ShardToSplit=shard, NewStartingHashKey=str(half)
        )
        self._wait()

    def merge(self, first: str, second: str) -> None:
        """Merge two shards that are neighbours."""
        self.client.merge_shards(
            StreamName=self.stream, ShardToMerge=first, AdjacentShardToMerge=second
        )
        self._wait()

    def shards(self) -> list[dict[str, Any]]:
        """Return all shards, as the API has them."""
        found: list[dict[str, Any]] = self.client.list_shards(StreamName=self.stream)[
            "Shards"
        ]
        return found

    def _wait(self) -> None:
        waiter = self.client.get_waiter("stream_exists")
        waiter.config.delay = 0.02
        waiter.wait(StreamName=self.stream)


@contextmanager
def kinesalite() -> Iterator[Kinesalite]:
    """Run a server."""
    server = subprocess.Popen(
        [_program("node"), "-e", _SERVER],
        env={**os.environ, "NODE_PATH": os.fspath(_modules())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with server:
        try:
            assert server.stdout is not None
            yield Kinesalite(json.loads(server.stdout.readline()))
        finally:
            server.kill()


def _modules() -> Path:
    """Return the folder where it is installed; install it, if need be."""
    return cached(f"kinesalite-{_VERSION}", _install) / "node_modules"


def _install(folder: Path) -> None:
    subprocess.run(
        [
            *(_program("npm"), "install", "--prefix", os.fspath(folder)),
            *("--no-audit", "--no-fund", "--ignore-scripts", "--silent"),
            f"kinesalite@{_VERSION}",
        ],
        check=True,
    )


def _program(name: str) -> str:
    """Return a program of Node; get it, if need be."""
    if shutil.which(name) is None:
        install(["nodejs", "npm"])
    found = shutil.which(name)
    assert found is not None
    return found
