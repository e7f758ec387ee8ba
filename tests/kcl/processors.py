"""
Processors of the published client, as sources of programs.

Those that process records write a line for each into a file, before any checkpoint of
it: a record that is not in the file was lost.
"""

from __future__ import annotations

from typing import Final

__all__ = ("BUFFERING", "PRINTING", "SILENT")

BUFFERING: Final = """\
import base64, os, sys
from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor

EFFECTS, DIE_AT = sys.argv[1:]

def step(name=""):
    \"\"\"Die at one of the steps of the first life, by its number or name.\"\"\"
    step.count += 1
    if DIE_AT in (name or None, str(step.count)) and not os.path.exists(EFFECTS + ".died"):
        open(EFFECTS + ".died", "w").close()
        os.kill(os.getpid(), 9)

step.count = 0

class Buffering(processor.RecordProcessorBase):
    def initialize(self, given):
        print("initialized at", given.sequence_number)
        self.buffer = []
        step()

    def process_records(self, given):
        for record in given.records:
            step()
            self.buffer.append(record)
            if len(self.buffer) == 4:
                self.flush(given.checkpointer)
        step()

    def flush(self, checkpointer, last=None):
        with open(EFFECTS, "a") as effects:
            for record in self.buffer:
                number = record.sequence_number
                print(number, record.binary_data.decode(), file=effects)
        step()
        if self.buffer:
            last = self.buffer[-1].sequence_number
            checkpointer.checkpoint(last)
        step()
        self.buffer = []

    def lease_lost(self, given):
        pass

    def shard_ended(self, given):
        step("end")
        self.flush(given.checkpointer)
        given.checkpointer.checkpoint()

    def shutdown_requested(self, given):
        self.flush(given.checkpointer)

kcl.KCLProcess(Buffering()).run()
"""
"""Buffers four records and checkpoints the fourth, and the rest at the end."""

PRINTING: Final = """\
from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor

class Printing(processor.RecordProcessorBase):
    def initialize(self, given):
        pass

    def process_records(self, given):
        for n in range(2000):
            print("ERROR: line", n)

    def lease_lost(self, given):
        pass

    def shard_ended(self, given):
        given.checkpointer.checkpoint()

kcl.KCLProcess(Printing()).run()
"""
"""Prints to stdout, where only the protocol should be, and checkpoints at the end."""

SILENT: Final = """\
import sys
from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor

class Silent(processor.RecordProcessorBase):
    def initialize(self, given):
        pass

    def process_records(self, given):
        with open(sys.argv[1], "a") as effects:
            for record in given.records:
                print(record.sequence_number, file=effects)

    def lease_lost(self, given):
        pass

    def shard_ended(self, given):
        pass

kcl.KCLProcess(Silent()).run()
"""
"""Never checkpoints."""
