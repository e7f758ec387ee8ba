"""
A system: one pipeline, or two with a set of journals between them.

Everything is drawn: ends, stages, dialects, orders, batches, durable edges,
deliveries, epochs, and what each message asks the workers for. What must be loaded and
dead-lettered follows from that.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

from etlstage.journal import Journals
from etlstage.pipeline.dead_letter.files import letter_files, read_letters
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.journal_source import messages_of
from tests.systems.workers import LOAD, OUTPUTS, WORKERS

__all__ = ("System",)

ALL: Final = {"then": "dead_letter", "budget": "100%"}
RESTART: Final = {"delay": "1ms", "max_delay": "10ms", "max": 1000}
ASKED: Final = ("one",) * 40 + ("none", "two", "refuse", "reject", "slow")
RUN: Final = "application/x-etlstage-run"
DEADLY: Final = ("die", "die", "print", "hang")
HANGING: Final = 300
"""Only messages below this number may ask a worker to hang: each takes 3 deadlines."""
EXACT: Final = ("files", "journal", "epochs")
"""Ends that can load exactly once."""
FILES: Final = {"files": {"path": "in", "format": "text"}}
SCHEMA: Final = "n long, key int, do string, by string, salt long"
Row = dict[str, Any]
Letters = Counter[tuple[str, int]]


@dataclass
class System:
    """
    A system of pipelines that runs in a folder.

    Attributes:
        folder: Folder of the system's files.
        rows: Input messages.
        pipelines: One, or two, of which the second reads what the first appends.

    """

    folder: Path
    rows: list[Row] = field(default_factory=list)
    pipelines: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def draw(cls, folder: Path, dice: random.Random) -> System:
        """Draw a system, and write its files."""
        system = cls(folder)
        deadly = dice.random() < 0.3
        for n in range(dice.choice([0, 1, 10, 300, 300, 3000])):
            deaths = DEADLY if n < HANGING else DEADLY[:-1]
            do = dice.choice(deaths if deadly and n % 50 == 7 else ASKED)
            row = {"n": n, "key": dice.randrange(9), "do": do}
            system.rows.append(row | {"by": "", "salt": 0})
        lead = dice.random() < 0.4
        if lead:
            system.pipelines.append(_pipeline("a", dice, load="journal"))
        extract = {"journal": {"path": "between", "reader": "r"}} if lead else None
        system.pipelines.append(_pipeline("b", dice, extract=extract))
        system._write()
        return system

    def _write(self) -> None:
        for name, text in (WORKERS | LOAD).items():
            (self.folder / name).write_text(text)
        (self.folder / "in").mkdir()
        lines = [f"{json.dumps(row)}\n" for row in self.rows]
        (self.folder / "rows").write_text("".join(lines))
        half = len(lines) // 2
        (self.folder / "in" / "a.txt").write_text("".join(lines[:half]))
        (self.folder / "in" / "b.txt").write_text("".join(lines[half:]))
        if len(self.pipelines) > 1:
            # The reading pipeline may be started before anything is appended.
            partitions = self.pipelines[0]["load"]["journal"].get("partitions", 1)
            between = self.folder / "between"
            Journals.open(between, partitions=partitions, content_type=RUN).close()
        for pipeline in self.pipelines:
            path = self.folder / f"{pipeline['name']}.yaml"
            path.write_text(json.dumps(pipeline, indent=1))

    @property
    def runs(self) -> dict[str, str]:
        """Pipeline files to run, by name; shards with leases have two runners."""
        files = {p["name"]: f"{p['name']}.yaml" for p in self.pipelines}
        if "leases" in self.pipelines[-1]["load"].get("shards", {}):
            files["other"] = files["b"]
        return files

    @property
    def exact(self) -> bool:
        """Whether each pipeline loads exactly once."""
        return all(p["delivery"] == "exactly-once" for p in self.pipelines)

    def check(self, *, drained: bool, workers_killed: bool) -> str:
        """
        Return what is wrong with what was loaded and dead-lettered; empty: nothing.

        Args:
            drained: Whether all runs ended by themselves, or were drained.
            workers_killed: Whether workers were killed.

        """
        loaded, dead = self._loaded(), self._dead()
        wanted, letters = self._expected()
        given_up = set()
        if workers_killed:
            # A message that was in flight at each kill is given up.
            unasked = {letter: dead[letter] for letter in dead.keys() - letters.keys()}
            given_up = {n for (_, n), kinds in unasked.items() if "WorkerLost" in kinds}
        exact = self.exact or (drained and not workers_killed)
        found = Counter(key for key, _ in loaded)
        wrong = []
        for key in wanted.keys() | found.keys():
            there, due = found[key], wanted[key]
            if key[0] in given_up and there <= due:
                continue
            if there != due and (exact or there < due or not due):
                wrong.append(f"{key}: {there} for {due}")
        salted = any(pipeline["transform"] for pipeline in self.pipelines)
        if exact and salted and len({salt for _, salt in loaded}) < len(loaded):
            wrong.append("one output twice")
        for letter in letters.keys() | dead.keys():
            there, due = len(dead.get(letter, ())), letters[letter]
            if letter[1] not in given_up and (
                there < due or (there > due and (exact or not due))
            ):
                wrong.append(f"dead letter {letter}: {there} for {due}")
        return "; ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" * (len(wrong) > 5))

    def check_order(self) -> str:
        """Return what is out of order in files, if every stage keeps an order."""
        stages = [stage for p in self.pipelines for stage in p["transform"]]
        orders = {stage["order"] for stage in stages} | {"total"}
        load = self.pipelines[-1]["load"]
        edges = any("durable" in stage for stage in stages) or len(self.pipelines) > 1
        if "none" in orders or "files" not in load or edges or not self.exact:
            return ""
        by_key = "key" in orders
        lines: dict[int, list[int]] = {}
        for path in sorted((self.folder / "out").glob("part-*"), key=_number):
            for line in path.read_text().splitlines():
                row = json.loads(line)
                lines.setdefault(row["key"] if by_key else 0, []).append(row["n"])
        for key, numbers in lines.items():
            for one, other in pairwise(numbers):
                if one > other:
                    return f"key {key}: {one} before {other}"
        return ""

    def _expected(self) -> tuple[Counter[tuple[int, str]], Letters]:
        letters: Letters = Counter()
        outputs = [(row["n"], "", row["do"]) for row in self.rows]
        for pipeline in self.pipelines:
            for stage in pipeline["transform"]:
                made = []
                for n, by, do in outputs:
                    if do in ("refuse", *DEADLY):
                        letters[stage["name"], n] += 1
                        continue
                    made += [(n, by + stage["name"], do)] * OUTPUTS.get(do, 1)
                outputs = made
            if "worker" in pipeline["load"] and "shards" not in pipeline["load"]:
                letters.update(("load", n) for n, _, do in outputs if do == "reject")
                outputs = [output for output in outputs if output[2] != "reject"]
        return Counter((n, by) for n, by, _ in outputs), letters

    def _loaded(self) -> list[tuple[tuple[int, str], int]]:
        load = self.pipelines[-1]["load"]
        lines: list[bytes] = []
        if "journal" in load and (self.folder / "out").exists():
            with Journals.open(self.folder / "out") as journals:
                for envelope in journals.read_committed():
                    lines += messages_of(envelope.message)
        elif "journal" not in load:
            hidden = (".", "_")
            for path in (self.folder / "out").rglob("*"):
                if path.is_file() and not path.name.startswith(hidden):
                    text = path.read_bytes()
                    # A load worker that is killed may have written a part of a line.
                    lines += text[: text.rfind(b"\n") + 1].splitlines()
        rows = [json.loads(line) for line in lines]
        return [((row["n"], row["by"]), row["salt"]) for row in rows]

    def _dead(self) -> dict[tuple[str, int], list[str]]:
        found: dict[tuple[str, int], list[str]] = {}
        for pipeline in self.pipelines:
            state = self.folder / pipeline.get("state", ".etlstage/b")
            for path in chain(*map(letter_files, [state, *state.glob("edge-*")])):
                for letter in read_letters(path):
                    assert isinstance(letter, DeadLetter)
                    number = json.loads(letter.message)["n"]
                    found.setdefault((letter.stage, number), []).append(letter.kind)
        return found


def _number(path: Path) -> tuple[int, ...]:
    return tuple(int(word) for word in path.stem.split("-")[2:] if word.isdigit())


def _program(name: str, *arguments: str) -> dict[str, Any]:
    return {"command": [sys.executable, name, *arguments]}


def _pipeline(
    name: str,
    dice: random.Random,
    *,
    extract: dict[str, Any] | None = None,
    load: str = "",
) -> dict[str, Any]:
    names = [f"{name}{n}" for n in range(dice.randrange(4))]
    load = load or dice.choice(["files", "journal", "worker", "epochs", "kcl", "files"])
    shared = load == "kcl" and extract is None and dice.random() < 0.7
    if shared:
        names, extract = [], FILES
    exact = load == "epochs" or (load in EXACT and dice.random() < 0.7)
    made: dict[str, Any] = {
        "name": name,
        "state": f"state-{name}",
        "delivery": "exactly-once" if exact else "at-least-once",
        "extract": extract or _extract(dice),
        "transform": [_stage(stage, dice) for stage in names],
        "load": _load(load, dice, "between" if name == "a" else "out"),
    }
    if load == "epochs":
        for stage in made["transform"]:
            stage.pop("durable", None)
    if shared:
        made["load"]["shards"] |= {"leases": "leases.db", "failover": "2s"}
        del made["state"]
    return made


def _extract(dice: random.Random) -> dict[str, Any]:
    program = dice.choice(["", "", "count.py", "count-cocaine.py"])
    if not program:
        return FILES
    dialect = "cocaine" if "cocaine" in program else {"mode": "cyclic"}
    return {
        "worker": _program(program),
        "dialect": dialect,
        "offsets": {"by": "supervisor", "step": dice.choice([3, 100, 1000])},
        "restart": RESTART,
    }


def _stage(name: str, dice: random.Random) -> dict[str, Any]:
    how = dice.choice(["single", "cocaine", "batch"])
    driver = dice.choice(["worker", "supervisor"])
    stage: dict[str, Any] = {
        "name": name,
        "worker": _program(f"{how}.py", name, driver),
        "workers": dice.randint(1, 3),
        "order": dice.choice(["none", "key", "total"]),
        "on_error": ALL,
        "restart": RESTART,
        "timeout": {"message": "2s", "stop": "1s"},
    }
    if dice.random() < 0.2:
        stage["workers"] = {"min": 1, "max": 3, "idle": "50ms"}
    if dice.random() < 0.2:
        stage["recycle"] = {"max_messages": dice.choice([10, 100])}
    if dice.random() < 0.2 and how != "batch":
        stage["expect"] = {"json": True, "where": "n >= 0"}
    if dice.random() < 0.3 and how != "batch":
        stage["window"] = dice.choice([1, 2, 50])
    if stage["order"] == "key":
        stage["key"] = "/key"
    if how == "cocaine":
        stage["dialect"] = {"name": "cocaine", "concurrency": dice.randint(1, 5)}
    elif how == "batch":
        stage["dialect"] = {"driver": driver}
        stage["batch"] = {"size": 3}
    if dice.random() < 0.25:
        stage["durable"] = True
        if stage["order"] != "total" and dice.random() < 0.5:
            stage["durable"] = {"partitions": 2, "key": "/key"}
    return stage


def _load(end: str, dice: random.Random, path: str) -> dict[str, Any]:
    made: dict[str, Any]
    if end == "files":
        files = {"path": path, "format": "text"}
        made = {"files": files | {"epoch": {"messages": dice.choice([50, 1000])}}}
        if dice.random() < 0.5:
            made["files"] |= {"format": "json", "schema": SCHEMA}
            if dice.random() < 0.5:
                made["files"]["partition_by"] = ["key"]
        return made
    if end == "journal":
        journal: dict[str, Any] = {"path": path}
        if dice.random() < 0.5:
            journal |= {"partitions": 3, "key": "/key"}
        return {"journal": journal}
    made = {"restart": RESTART}
    if end == "kcl":
        shards = {"count": dice.randint(1, 4), "key": "/key"}
        made |= {"worker": _program("processor.py"), "dialect": "kcl"}
        made["batch"] = {"size": dice.choice([1, 20])}
        made["shards"] = shards
        if dice.random() < 0.5:
            shards["at_end"] = "shutdown"
    elif end == "epochs":
        made |= {"worker": _program("load-epochs.py"), "on_error": ALL}
        for step in "commit", "abort":
            made[step] = [sys.executable, "settle.py", step]
    else:
        cocaine = dice.random() < 0.5
        made["worker"] = _program("load-cocaine.py" if cocaine else "load.py")
        made["on_error"] = ALL
        if cocaine:
            made["dialect"] = "cocaine"
    if end != "kcl":
        made["workers"] = dice.randint(1, 3)
    return made
