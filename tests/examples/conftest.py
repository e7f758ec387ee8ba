from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from etlstage.protocol.marker import Markers
from tests.conversation import Conversation
from tests.examples.languages import PACKAGE, Language


class Start(Protocol):
    """Starts a worker of a language; a path instead of a name starts that program."""

    def __call__(
        self,
        language: Language,
        program: str | Path,
        *arguments: object,
        markers: Markers | None = ...,
    ) -> Conversation:
        """Return the conversation with it."""
        ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """
    Return a function that starts workers, which are stopped after the test.

    Their environment is what a supervisor gives: a PATH and the markers; with
    ``markers=None`` only the PATH.
    """

    def start(
        language: Language,
        program: str | Path,
        *arguments: object,
        markers: Markers | None = Markers(),  # noqa: B008 (immutable)
    ) -> Conversation:
        if missing := language.missing():
            pytest.fail(f"not installed: {', '.join(missing)}; see the group 'test'")
        if isinstance(program, str):
            program = language.script(program)
        interpreter, *options = language.interpreter
        words = (shutil.which(interpreter), *options, program, *arguments)
        environment = {"PATH": f"{tools(language)}:/usr/bin:/bin"}
        if language.folder != "plain_python":
            environment["PYTHONPATH"] = str(PACKAGE.parent)
        if markers:
            environment |= markers.environment()
        return workers.enter_context(
            Conversation([str(word) for word in words], environment)
        )

    def tools(language: Language) -> Path:
        folder = tmp_path / "bin" / language.name
        if not folder.exists():
            folder.mkdir(parents=True)
            for name, program in language.tools.items():
                (folder / name).symlink_to(shutil.which(program) or program)
        return folder

    with ExitStack() as workers:
        yield start
