"""
Journals: append-only logs of messages in a folder, for many writers and many readers.

::

    async with Journals("/data/orders", partitions=8) as journals:
        publisher = Publisher(journals, mapping=modulo(lambda m: m["customer"]))
        await publisher.publish_committed({"customer": 7, "sum": 12})
        async for envelope in journals.read_committed(name="billing", follow=True):
            ...

There is no server: processes on one machine share the files. With the address of a
Gazette broker instead of the folder, the same code reads and appends to the broker's
journals. Messages, producers and commits are :mod:`etlstage.sequencing`'s.
"""

from __future__ import annotations

from etlstage.journal.broker import Broker
from etlstage.journal.errors import (
    AppendInDoubt,
    JournalDamaged,
    JournalError,
    LimitReached,
    OffsetGone,
    ReaderBusy,
)
from etlstage.journal.journals import Journals, modulo, rendezvous
from etlstage.journal.reader import CommittedReader, Registered
from etlstage.journal.run import RunMessage
from etlstage.journal.storage import FolderStorage, MemoryStorage
from etlstage.sequencing import Publisher

__all__ = (
    "AppendInDoubt",
    "Broker",
    "CommittedReader",
    "FolderStorage",
    "JournalDamaged",
    "JournalError",
    "Journals",
    "LimitReached",
    "MemoryStorage",
    "OffsetGone",
    "Publisher",
    "ReaderBusy",
    "Registered",
    "RunMessage",
    "modulo",
    "rendezvous",
)
