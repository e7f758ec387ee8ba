"""
Messages in journals, delivered exactly once: Gazette's package ``message`` in Python.

A journal is an append-only log of bytes, and an append may happen twice. So each
message has a UUID that contains its producer, its time, and whether it is in a
transaction. From it a reader ensures that each committed message is delivered once.
Nothing here opens a file or a socket: the caller supplies what appends and reads.

This package needs nothing but the standard library. Its names are those of Gazette's
page in Python's spelling:

=================================== ====================================
page                                here
=================================== ====================================
FixedFrameHeaderLength              FIXED_FRAME_HEADER_LENGTH
FixedFrameWord                      FIXED_FRAME_WORD
ErrDesyncDetected                   DesyncDetected
ErrEmptyListResponse                EmptyListResponse
ErrMustStartReplay                  MustStartReplay
EncodeFixedProtoFrame               encode_fixed_frame
RegisterFraming                     register_framing
UnpackFixedFrame                    unpack_fixed_frame
UnpackLine                          unpack_line
AckIntent                           AckIntent
AckIntent.Journal                   AckIntent.journal
AckIntent.Intent                    AckIntent.intent
CSVFrameable                        CsvFrameable
CSVFrameable.MarshalCSV             CsvFrameable.marshal_csv
CSVFrameable.UnmarshalCSV           CsvFrameable.unmarshal_csv
CSVRecord                           CsvRecord
CSVRecord.GetUUID                   CsvRecord.uuid
CSVRecord.MarshalCSV                CsvRecord.marshal_csv
CSVRecord.NewAcknowledgement        CsvRecord.acknowledgement
CSVRecord.SetUUID                   CsvRecord.set_uuid
CSVRecord.UnmarshalCSV              CsvRecord.unmarshal_csv
Clock                               Clock
GetClock                            clock_of
NewClock                            clock_at
Clock.Tick                          Clock.tick
Clock.Update                        Clock.update
Envelope                            Envelope
Envelope.Journal                    Envelope.journal
Envelope.Begin                      Envelope.begin
Envelope.End                        Envelope.end
Envelope.Message                    Envelope.message
Flags                               Flags
Flag_OUTSIDE_TXN                    Flags.OUTSIDE_TXN
Flag_CONTINUE_TXN                   Flags.CONTINUE_TXN
Flag_ACK_TXN                        Flags.ACK_TXN
GetFlags                            flags_of
Frameable                           Message
Framing                             Framing
Framing.ContentType                 Framing.content_type
Framing.Marshal                     Framing.marshal
Framing.NewUnmarshalFunc            Framing.unmarshaller
FramingByContentType                framing_by_content_type
Iterator                            ReadUncommitted
Iterator.Next                       ReadUncommitted.__next__
JSONMarshalerTo                     JsonMarshaller
JSONMarshalerTo.MarshalJSONTo       JsonMarshaller.marshal_json_to
JournalProducer                     JournalProducer
JournalProducer.Journal             JournalProducer.journal
JournalProducer.Producer            JournalProducer.producer
Mappable                            Message
MappingFunc                         Mapping
ModuloMapping                       modulo
RandomMapping                       random
RendezvousMapping                   rendezvous
MappingKeyFunc                      MappingKey
Message                             Message
Message.GetUUID                     Message.uuid
Message.SetUUID                     Message.set_uuid
Message.NewAcknowledgement          Message.acknowledgement
NewMessageFunc                      NewMessage
PartitionsFunc                      Partitions
ProducerID                          producer_of
GetProducerID                       producer_of
NewProducerID                       new_producer_id
ProducerState                       ProducerState
ProducerState.LastAck               ProducerState.last_ack
ProducerState.Begin                 ProducerState.begin
ProtoFrameable                      ProtoFrameable
ProtoFrameable.ProtoSize            ProtoFrameable.size
ProtoFrameable.MarshalTo            ProtoFrameable.marshal_to
ProtoFrameable.Unmarshal            ProtoFrameable.unmarshal
Publisher                           Publisher
NewPublisher                        Publisher.__init__
Publisher.BuildAckIntents           Publisher.build_ack_intents
Publisher.PublishCommitted          Publisher.publish_committed
Publisher.PublishUncommitted        Publisher.publish_uncommitted
ReadCommittedIter                   ReadCommitted
NewReadCommittedIter                read_committed
ReadCommittedIter.Next              ReadCommitted.__next__
ReadUncommittedIter                 ReadUncommitted
NewReadUncommittedIter              read_uncommitted
ReadUncommittedIter.Next            ReadUncommitted.__next__
Sequencer                           Sequencer
NewSequencer                        Sequencer.__init__
Sequencer.DequeCommitted            Sequencer.deque_committed
Sequencer.HasPending                Sequencer.has_pending
Sequencer.ProducerStates            Sequencer.producer_states
Sequencer.QueueUncommitted          Sequencer.queue_uncommitted
Sequencer.ReplayRange               Sequencer.replay_range
Sequencer.StartReplay               Sequencer.start_replay
UUID                                UUID
BuildUUID                           build_uuid
UnmarshalFunc                       Unmarshaller
Validator                           Validator
=================================== ====================================
"""

from __future__ import annotations

from uuid import UUID

from etlstage.sequencing.clock import (
    NO_UUID,
    Clock,
    Flags,
    build_uuid,
    clock_at,
    clock_of,
    flags_of,
    new_producer_id,
    parse_uuid,
    producer_of,
    seconds_of,
)
from etlstage.sequencing.framing import (
    FIXED_FRAME_HEADER_LENGTH,
    FIXED_FRAME_WORD,
    MAX_FRAME,
    ByteWriter,
    DesyncDetected,
    FixedFraming,
    FrameBuffer,
    FrameError,
    Framing,
    NotFrameable,
    ProtoFrameable,
    UnexpectedEnd,
    Unmarshaller,
    encode_fixed_frame,
    framing_by_content_type,
    located,
    register_framing,
    unpack_fixed_frame,
    unpack_line,
)
from etlstage.sequencing.iterator import (
    AsyncJournalReader,
    JournalReader,
    OpenReplay,
    ReadCommitted,
    ReadUncommitted,
    read_committed,
    read_uncommitted,
)
from etlstage.sequencing.mapping import (
    EmptyListResponse,
    Fnv1a,
    Mapping,
    MappingKey,
    Partitions,
    Unbound,
    fnv1a32,
    modulo,
    random,
    rendezvous,
)
from etlstage.sequencing.message import (
    AckIntent,
    CsvRecord,
    Envelope,
    JournalProducer,
    JournalSpec,
    JsonMessage,
    Message,
    NewMessage,
    Opaque,
    ProtoMessage,
    Validator,
    as_message,
)
from etlstage.sequencing.publisher import (
    Append,
    Appender,
    AppendUncertain,
    OrderedSection,
    Publisher,
)
from etlstage.sequencing.sequencer import (
    Checkpoint,
    MustStartReplay,
    ProducerState,
    QueueOutcome,
    ReplayFailed,
    ReplayRange,
    ReplayWaits,
    Sequencer,
)
from etlstage.sequencing.text import (
    CsvFrameable,
    CsvFraming,
    JsonFrameable,
    JsonFraming,
    JsonMarshaller,
    encode_csv,
    encode_json,
)

__all__ = (
    "FIXED_FRAME_HEADER_LENGTH",
    "FIXED_FRAME_WORD",
    "MAX_FRAME",
    "NO_UUID",
    "UUID",
    "AckIntent",
    "Append",
    "AppendUncertain",
    "Appender",
    "AsyncJournalReader",
    "ByteWriter",
    "Checkpoint",
    "Clock",
    "CsvFrameable",
    "CsvFraming",
    "CsvRecord",
    "DesyncDetected",
    "EmptyListResponse",
    "Envelope",
    "FixedFraming",
    "Flags",
    "Fnv1a",
    "FrameBuffer",
    "FrameError",
    "Framing",
    "JournalProducer",
    "JournalReader",
    "JournalSpec",
    "JsonFrameable",
    "JsonFraming",
    "JsonMarshaller",
    "JsonMessage",
    "Mapping",
    "MappingKey",
    "Message",
    "MustStartReplay",
    "NewMessage",
    "NotFrameable",
    "Opaque",
    "OpenReplay",
    "OrderedSection",
    "Partitions",
    "ProducerState",
    "ProtoFrameable",
    "ProtoMessage",
    "Publisher",
    "QueueOutcome",
    "ReadCommitted",
    "ReadUncommitted",
    "ReplayFailed",
    "ReplayRange",
    "ReplayWaits",
    "Sequencer",
    "Unbound",
    "UnexpectedEnd",
    "Unmarshaller",
    "Validator",
    "as_message",
    "build_uuid",
    "clock_at",
    "clock_of",
    "encode_csv",
    "encode_fixed_frame",
    "encode_json",
    "flags_of",
    "fnv1a32",
    "framing_by_content_type",
    "located",
    "modulo",
    "new_producer_id",
    "parse_uuid",
    "producer_of",
    "random",
    "read_committed",
    "read_uncommitted",
    "register_framing",
    "rendezvous",
    "seconds_of",
    "unpack_fixed_frame",
    "unpack_line",
)
