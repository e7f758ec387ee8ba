"""Record processors in memory: a sound one, and the bugs that it can be given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from etlstage.testing import ScriptedWorker

__all__ = ("Processor",)


class _Exit(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class Processor:
    """
    Checkpoints each batch, and its shard's end; retries throttled checkpoints.

    Args:
        bugs: Names of its bugs; ``_has`` and ``_exit_if`` are called with them.

    """

    def __init__(self, *bugs: str) -> None:
        self._bugs = set(bugs)

    async def __call__(self, worker: ScriptedWorker) -> int:
        """Process actions until the input ends, or a bug ends it."""
        self._worker, self._held = worker, b""
        self._last: dict[str, Any] = {}
        self._lines: list[bytes] = []
        self._ended = False
        self._acts = 0
        try:
            while (said := await self._read()) is not None:
                await self._act(said)
        except _Exit as end:
            return end.status
        if self._has("ignores the end") and not self._ended:
            await self._forever()
        return 0

    def _has(self, bug: str) -> bool:
        return bug in self._bugs

    async def _act(self, said: dict[str, Any]) -> None:
        action = said["action"]
        self._exit_if(f"dies of {action}")
        if self._has(f"hangs in {action}"):
            await self._forever()
        if action == "initialize":
            if said.get("subSequenceNumber"):
                self._exit_if("takes no sub-sequence number")
            if said["sequenceNumber"].isdecimal() and not said["subSequenceNumber"]:
                self._exit_if("begins at the beginning only")
        if action == "processRecords":
            await self._process(said["records"])
        elif action == "shardEnded":
            await self._end()
        elif (action == "shutdownRequested" and not self._has("ignores a request")) or (
            action == "leaseLost" and self._has("checkpoints behind leaseLost")
        ):
            await self._checkpoint()
        await self._status(action)
        if action == "processRecords":
            if self._has("leaves after a batch"):
                raise _Exit(0)
            if self._has("checkpoints between actions"):
                await self._write({"action": "checkpoint", "sequenceNumber": None})

    async def _process(self, records: Sequence[dict[str, Any]]) -> None:
        if self._has("floods stdout"):
            await self._worker.write(b"hello\n" * 200_000)
        if self._has("prints"):
            await self._worker.write(b"hello\n")
        if not records:
            self._exit_if("dies of no records")
            if self._has("checkpoints None"):
                await self._checkpoint("None")
            return
        if len({record["sequenceNumber"] for record in records}) < len(records) - 1:
            self._exit_if("dies of three together")
        if not any(record["data"] for record in records):
            self._exit_if("dies of no data")
        if len(records) > 1000:
            self._exit_if("dies of many")
        if any(not record["partitionKey"].isascii() for record in records):
            self._exit_if("dies of keys")
        last = self._last = records[-1]
        number, sub = last["sequenceNumber"], last["subSequenceNumber"]
        if self._has("goes back") and self._acts > 1:
            number = str(int(number) - 1000)
        self._acts += 1
        if self._has("keeps doubles"):
            number = str(int(float(number)))
        if self._has("invents numbers"):
            number = str(int(number) + 1)
        if self._has("counts on"):
            number = str(int(records[0]["sequenceNumber"]) + len(records) - 1)
        if self._has("forgets sub-sequence numbers"):
            sub = None
        if not self._has("never checkpoints"):
            await self._checkpoint(number, sub)

    async def _end(self) -> None:
        if self._has("ignores the end of a shard"):
            return
        if self._has("ends with a number") and self._last:
            last = self._last["sequenceNumber"], self._last["subSequenceNumber"]
            await self._checkpoint(*last)
        elif self._last or not self._has("needs records to end"):
            await self._checkpoint()

    async def _checkpoint(self, number: str | None = None, sub: Any = None) -> None:  # noqa: ANN401 - JSON
        for _ in range(3):
            asked = {"action": "checkpoint", "sequenceNumber": number}
            await self._write({**asked, "subSequenceNumber": sub})
            if self._worker.start == 1 and self._acts == 2:
                self._exit_if("dies asking")
            if self._has("does not wait"):
                return
            answer = await self._read()
            if answer is None and self._has("asks again after the end"):
                await self._write({**asked, "subSequenceNumber": sub})
                raise _Exit(3)
            if answer is None:
                if self._has("waits for ever"):
                    await self._forever()
                raise _Exit(1)
            error = answer["error"]
            passing = error == "ThrottlingException" or (
                error == "KinesisClientLibDependencyException"
            )
            if error == "ShutdownException" and self._has("insists"):
                continue
            if error:
                self._exit_if(f"dies of {error}")
            if not passing or self._has("tries once"):
                return

    async def _status(self, action: str) -> None:
        named: str | None = "nothing" if self._has("names another") else action
        if self._has("names none"):
            named = None
        await self._write({"action": "status", "responseFor": named})
        if action == "leaseLost" and self._has("checkpoints behind its status"):
            await self._write({"action": "checkpoint", "sequenceNumber": None})
        twice = self._has("answers twice") and action == "processRecords"
        if twice or self._has(f"answers {action} twice"):
            await self._write({"action": "status", "responseFor": named})
        self._ended = action in ("leaseLost", "shardEnded")
        if action == "leaseLost":
            self._exit_if("exits badly")

    def _exit_if(self, bug: str) -> None:
        if self._has(bug):
            raise _Exit(3)

    async def _forever(self) -> None:
        import anyio

        await anyio.sleep_forever()

    async def _write(self, said: dict[str, Any]) -> None:
        await self._worker.write(b"\n" + json.dumps(said).encode() + b"\n")

    async def _read(self) -> dict[str, Any] | None:
        while not self._lines:
            if not (data := await self._worker.read()):
                return None
            *lines, self._held = (self._held + data).split(b"\n")
            self._lines += lines
        said: dict[str, Any] = json.loads(self._lines.pop(0))
        return said
