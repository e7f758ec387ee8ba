"""
Workers of drawn systems, which do what each message asks for.

A message has a number, a key, what to do with it, and the names of the stages that it
has passed. Each output also has a random number of its own (``salt``), so the same
output loaded twice can be told from two outputs.
"""

from __future__ import annotations

from typing import Final

__all__ = ("LOAD", "OUTPUTS", "WORKERS", "transforms")

OUTPUTS: Final = {"none": 0, "two": 2}
"""Number of outputs, by what a message asks for; any other message has one."""

_SINGLE: Final = """\
import json, os, random, sys, time
from etlstage import worker

def answer(message):
    row = json.loads(message)
    if row["do"] == "refuse":
        raise worker.Refuse("asked to")
    if row["do"] == "die":
        os._exit(3)
    if row["do"] == "hang":
        time.sleep(3600)
    if row["do"] == "print":
        os.write(1, b"\\0\\n\\0")
        os._exit(0)
    if row["do"] == "slow":
        time.sleep(0.02)
    for _ in range({"none": 0, "two": 2}.get(row["do"], 1)):
        salt = random.randrange(10**9)
        yield json.dumps(row | {"by": row["by"] + sys.argv[1], "salt": salt}).encode()
"""


def transforms(answer: str) -> dict[str, str]:
    """Return workers that transform by such a function ``answer``, by file name."""
    return {
        "single.py": f"{answer}\nworker.transform(answer)\n",
        "cocaine.py": f"""{answer}
from etlstage.worker import cocaine

def session(request, response):
    for output in answer(request.read()):
        response.write(output)

cocaine.run({{"transform": session}})
""",
        "batch.py": f"""{answer}
def batch(messages):
    for message in messages:
        yield from answer(message)

worker.transform_batch(batch, driver=sys.argv[2], size=3)
""",
    }


WORKERS: Final = {
    **transforms(_SINGLE),
    "count.py": """\
from pathlib import Path
from etlstage import worker

lines = Path("rows").read_bytes().splitlines()
worker.extract_cycle(
    lambda start, end: lines[start:end], offsets="supervisor", latest=lambda: len(lines)
)
""",
    "count-cocaine.py": """\
import json
from pathlib import Path
from etlstage.worker import cocaine

lines = Path("rows").read_bytes().splitlines()

def extract(request, response):
    asked = json.loads(request.read())
    if asked.get("offsets") == "latest":
        response.write(b"%d" % len(lines))
        return
    for line in lines[asked["start"]:asked["end"]]:
        response.write(line)

cocaine.run({"extract": extract})
""",
}
"""Workers that extract and transform, by file name."""

_LOAD: Final = """\
import json, os, sys
from pathlib import Path
from etlstage import worker

class File:
    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / str(os.getpid())).open("ab", buffering=0)

    def load(self, message):
        if json.loads(message)["do"] == "reject":
            raise worker.Refuse("asked to")
        self.file.write(message + b"\\n")
"""
LOAD: Final = {
    "load.py": f"{_LOAD}\nworker.load(File(Path('out')).load)\n",
    "load-cocaine.py": f"""{_LOAD}
from etlstage.worker import cocaine

file = File(Path("out"))
cocaine.run({{"load": lambda request, response: file.load(request.read())}})
""",
    "load-epochs.py": f"""{_LOAD}
of_epoch = Path("staged", os.environ["ETLSTAGE_EPOCH"], os.environ["ETLSTAGE_ATTEMPT"])
worker.load(File(of_epoch).load)
""",
    "settle.py": """\
import json, shutil, sys
from pathlib import Path
from etlstage import worker

def settle(message):
    epoch = json.loads(message)
    staged, final = Path("staged", epoch["epoch"]), Path("out", epoch["epoch"])
    if sys.argv[1] == "abort":
        shutil.rmtree(final, ignore_errors=True)
        shutil.rmtree(staged, ignore_errors=True)
    elif (staged / epoch["attempt"]).exists():
        final.parent.mkdir(exist_ok=True)
        (staged / epoch["attempt"]).rename(final)

worker.load(settle)
""",
    "processor.py": """\
import os, random
from etlstage.worker import kcl

class Processor(kcl.Processor):
    def initialize(self, shard):
        os.makedirs("out", exist_ok=True)
        self.file = open(f"out/{os.getpid()}", "ab", buffering=0)

    def process_records(self, records, checkpointer):
        for record in records:
            self.file.write(record.data + b"\\n")
            if random.random() < 0.1:
                checkpointer.checkpoint(record)
        if random.random() < 0.5:
            checkpointer.checkpoint()

    def shutdown_requested(self, checkpointer):
        checkpointer.checkpoint()

kcl.run(Processor())
""",
}
"""Workers that load, and that commit and abort epochs, by file name."""
