"""The package as a whole: it covers the Go package's names, and needs only Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from etlstage import sequencing

TABLE = re.compile(r"^(\w[\w.]*) {2,}(\w[\w.]*)$", re.MULTILINE)
PAIRS = dict(TABLE.findall(str(sequencing.__doc__).partition("here\n")[2]))
PAGE = [
    "FixedFrameHeaderLength",
    "FixedFrameWord",
    "ErrDesyncDetected",
    "ErrEmptyListResponse",
    "ErrMustStartReplay",
    "EncodeFixedProtoFrame",
    "RegisterFraming",
    "UnpackFixedFrame",
    "UnpackLine",
    "AckIntent",
    "AckIntent.Journal",
    "AckIntent.Intent",
    "CSVFrameable",
    "CSVFrameable.MarshalCSV",
    "CSVFrameable.UnmarshalCSV",
    "CSVRecord",
    "CSVRecord.GetUUID",
    "CSVRecord.MarshalCSV",
    "CSVRecord.NewAcknowledgement",
    "CSVRecord.SetUUID",
    "CSVRecord.UnmarshalCSV",
    "Clock",
    "GetClock",
    "NewClock",
    "Clock.Tick",
    "Clock.Update",
    "Envelope",
    "Envelope.Journal",
    "Envelope.Begin",
    "Envelope.End",
    "Envelope.Message",
    "Flags",
    "Flag_OUTSIDE_TXN",
    "Flag_CONTINUE_TXN",
    "Flag_ACK_TXN",
    "GetFlags",
    "Frameable",
    "Framing",
    "Framing.ContentType",
    "Framing.Marshal",
    "Framing.NewUnmarshalFunc",
    "FramingByContentType",
    "Iterator",
    "Iterator.Next",
    "JSONMarshalerTo",
    "JSONMarshalerTo.MarshalJSONTo",
    "JournalProducer",
    "JournalProducer.Journal",
    "JournalProducer.Producer",
    "Mappable",
    "MappingFunc",
    "ModuloMapping",
    "RandomMapping",
    "RendezvousMapping",
    "MappingKeyFunc",
    "Message",
    "Message.GetUUID",
    "Message.SetUUID",
    "Message.NewAcknowledgement",
    "NewMessageFunc",
    "PartitionsFunc",
    "ProducerID",
    "GetProducerID",
    "NewProducerID",
    "ProducerState",
    "ProducerState.LastAck",
    "ProducerState.Begin",
    "ProtoFrameable",
    "ProtoFrameable.ProtoSize",
    "ProtoFrameable.MarshalTo",
    "ProtoFrameable.Unmarshal",
    "Publisher",
    "NewPublisher",
    "Publisher.BuildAckIntents",
    "Publisher.PublishCommitted",
    "Publisher.PublishUncommitted",
    "ReadCommittedIter",
    "NewReadCommittedIter",
    "ReadCommittedIter.Next",
    "ReadUncommittedIter",
    "NewReadUncommittedIter",
    "ReadUncommittedIter.Next",
    "Sequencer",
    "NewSequencer",
    "Sequencer.DequeCommitted",
    "Sequencer.HasPending",
    "Sequencer.ProducerStates",
    "Sequencer.QueueUncommitted",
    "Sequencer.ReplayRange",
    "Sequencer.StartReplay",
    "UUID",
    "BuildUUID",
    "UnmarshalFunc",
    "Validator",
]


def test_each_name_of_the_page_is_paired() -> None:
    """The table has each name of Go's documentation page, and no others."""
    assert sorted(PAIRS) == sorted(PAGE)


@pytest.mark.parametrize("name", PAGE)
def test_what_a_name_is_paired_with_is_there(name: str) -> None:
    """Its Python name is public in the package."""
    first, *rest = PAIRS[name].split(".")
    assert first in sequencing.__all__
    found: object = getattr(sequencing, first)
    for part in rest:
        found = getattr(found, part)


ALONE = """
import sys
sys.path.insert(0, {root!r})
from importlib.abc import MetaPathFinder
class Refuse(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.partition('.')[0]
        if top != 'etlstage' and top not in sys.stdlib_module_names:
            raise AssertionError('imports ' + name)
sys.meta_path.insert(0, Refuse())
from etlstage.sequencing import *
from etlstage.sequencing import Sequencer, Opaque, build_uuid, Envelope
message = Opaque(b'x')
message.set_uuid(build_uuid(b'123456', 1, 0))
sequencer = Sequencer()
sequencer.queue_uncommitted(Envelope('j', 0, 1, message))
assert sequencer.deque_committed().message is message
ours = {{name for name in sys.modules if name.startswith('etlstage.')}}
assert all(n == 'etlstage.errors' or n.startswith('etlstage.sequencing') for n in ours), ours
"""


@pytest.mark.process
def test_standard_library_is_enough() -> None:
    """The package works in an interpreter that has only the standard library."""
    root = str(Path(__file__).parents[2])
    code = ALONE.format(root=root)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
