"""
Tools for testing workers and pipelines.

A *hostile worker* does on purpose what other workers do by accident::

    plan = FaultPlan.of(
        Fault(FaultKind.KILL, contains=b"poison"),
        Fault(FaultKind.STALL, probability=0.001),
        seed=1,
    )
    stage = Stage(name="clean", worker=hostile_worker(plan))

A *faulty launch* does the same to any worker, from outside, and a *recorded launch*
records conversations, to be played to another worker::

    launch = FaultyLaunch(launch_worker, {"clean": plan})
    launch = RecordedLaunch(launch, RecordingFolder(Path("recordings")))

    played = await play(Recording.load(path), ("./clean-v2",))

A *scripted worker* is not a process, but an async function in yours. It can run in
virtual time, in which restarts, back-off and deadlines take milliseconds to test. See
:mod:`etlstage.testing.scripted` and :mod:`etlstage.testing.clock`::

    run_virtually(main)  # in it: AsyncSupervisor(stage, launch=ScriptedLaunch(script))

A *worker under test* is a single real process that gets exactly the bytes that a test
sends, with a transcript of both directions::

    async with WorkerUnderTest(stage) as worker:
        (reply,) = await worker.exchange([b"one"], cuts=[2])

A pipeline is tested between a :class:`MemorySource` and a :class:`MemorySink`; and
:func:`simulate` runs a pipeline once for each seed, in virtual time, with faults.

:mod:`etlstage.testing.strategies` draws messages, cuts, faults and stages for
Hypothesis; :func:`given_worker` tests a property of a worker's replies; a
:class:`WorkerMachine` compares a stage with a model, and a :class:`SessionMachine` a
worker that has sessions; a :class:`ProcessorMachine` restarts a record processor again
and again. These need the extra ``testing``; nothing else here does. Fixtures for pytest
are in :mod:`etlstage.testing.plugin`.

Names are imported on first use, as every pytest run imports the plugin, wherever this
package is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etlstage.testing.clock import VirtualLoop as VirtualLoop
    from etlstage.testing.clock import run_virtually as run_virtually
    from etlstage.testing.clock import virtual_time as virtual_time
    from etlstage.testing.conversation import WorkerMisbehaved as WorkerMisbehaved
    from etlstage.testing.conversation import WorkerUnderTest as WorkerUnderTest
    from etlstage.testing.ends import MemoryDeadLetters as MemoryDeadLetters
    from etlstage.testing.ends import MemoryEpochs as MemoryEpochs
    from etlstage.testing.ends import MemoryEpochSink as MemoryEpochSink
    from etlstage.testing.ends import MemorySink as MemorySink
    from etlstage.testing.ends import MemorySource as MemorySource
    from etlstage.testing.factories import PipelineFactory as PipelineFactory
    from etlstage.testing.factories import Ran as Ran
    from etlstage.testing.factories import SupervisorFactory as SupervisorFactory
    from etlstage.testing.factories import WorkerFactory as WorkerFactory
    from etlstage.testing.fault import Fault as Fault
    from etlstage.testing.fault import FaultKind as FaultKind
    from etlstage.testing.fault import FaultPlan as FaultPlan
    from etlstage.testing.fault import Moment as Moment
    from etlstage.testing.fault import hostile_worker as hostile_worker
    from etlstage.testing.faulty.wire import FaultyLaunch as FaultyLaunch
    from etlstage.testing.fuzzing.oracle import Case as Case
    from etlstage.testing.fuzzing.oracle import SessionCase as SessionCase
    from etlstage.testing.fuzzing.oracle import verify as verify
    from etlstage.testing.fuzzing.steps import Call as Call
    from etlstage.testing.fuzzing.steps import Calls as Calls
    from etlstage.testing.fuzzing.steps import Records as Records
    from etlstage.testing.fuzzing.steps import Step as Step
    from etlstage.testing.machine import WorkerMachine as WorkerMachine
    from etlstage.testing.machine import given_worker as given_worker
    from etlstage.testing.pair import ProtocolPair as ProtocolPair
    from etlstage.testing.processors import ProcessorMachine as ProcessorMachine
    from etlstage.testing.recording.recording import RecordedLaunch as RecordedLaunch
    from etlstage.testing.recording.recording import Recording as Recording
    from etlstage.testing.recording.recording import RecordingFolder as RecordingFolder
    from etlstage.testing.recording.replay import play as play
    from etlstage.testing.replies import Reply as Reply
    from etlstage.testing.scenario import Scenario as Scenario
    from etlstage.testing.scripted import ScriptedLaunch as ScriptedLaunch
    from etlstage.testing.scripted import ScriptedWorker as ScriptedWorker
    from etlstage.testing.sessions import SessionMachine as SessionMachine
    from etlstage.testing.simulation import SimulationFailed as SimulationFailed
    from etlstage.testing.simulation import simulate as simulate

__all__ = (
    "Call",
    "Calls",
    "Case",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultyLaunch",
    "MemoryDeadLetters",
    "MemoryEpochSink",
    "MemoryEpochs",
    "MemorySink",
    "MemorySource",
    "Moment",
    "PipelineFactory",
    "ProcessorMachine",
    "ProtocolPair",
    "Ran",
    "RecordedLaunch",
    "Recording",
    "RecordingFolder",
    "Records",
    "Reply",
    "Scenario",
    "ScriptedLaunch",
    "ScriptedWorker",
    "SessionCase",
    "SessionMachine",
    "SimulationFailed",
    "Step",
    "SupervisorFactory",
    "VirtualLoop",
    "WorkerFactory",
    "WorkerMachine",
    "WorkerMisbehaved",
    "WorkerUnderTest",
    "given_worker",
    "hostile_worker",
    "play",
    "run_virtually",
    "simulate",
    "verify",
    "virtual_time",
)

_HOMES = {
    name: module
    for module, names in {
        "clock": ("VirtualLoop", "run_virtually", "virtual_time"),
        "conversation": ("WorkerMisbehaved", "WorkerUnderTest"),
        "ends": (
            "MemoryDeadLetters",
            "MemoryEpochSink",
            "MemoryEpochs",
            "MemorySink",
            "MemorySource",
        ),
        "factories": ("PipelineFactory", "Ran", "SupervisorFactory", "WorkerFactory"),
        "fault": ("Fault", "FaultKind", "FaultPlan", "Moment", "hostile_worker"),
        "faulty.wire": ("FaultyLaunch",),
        "fuzzing.oracle": ("Case", "SessionCase", "verify"),
        "fuzzing.steps": ("Call", "Calls", "Records", "Step"),
        "machine": ("WorkerMachine", "given_worker"),
        "pair": ("ProtocolPair",),
        "processors": ("ProcessorMachine",),
        "recording.recording": ("RecordedLaunch", "Recording", "RecordingFolder"),
        "recording.replay": ("play",),
        "replies": ("Reply",),
        "scenario": ("Scenario",),
        "scripted": ("ScriptedLaunch", "ScriptedWorker"),
        "sessions": ("SessionMachine",),
        "simulation": ("SimulationFailed", "simulate"),
    }.items()
    for name in names
}


def __getattr__(name: str) -> object:
    """Import a public name from its module (PEP 562)."""
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names in the module, including those not imported yet."""
    return sorted(set(globals()) | set(__all__))
