"""
What holds for each mapping of a pipeline file, and the values of several of them.

Unknown keys are refused here; which keys there are is in ``worker.py`` and
``model.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from etlstage.errors import ConfigError

__all__ = ("Argument", "Count", "Keys", "Name", "as_problem")


def _without_nul(text: str) -> str:
    if "\0" in text:
        context = {"text": "can't hold a NUL byte"}
        raise PydanticCustomError("refused", "{text}", context)
    return text


Argument = Annotated[str, AfterValidator(_without_nul)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,63}$")]
Count = Annotated[int, Field(ge=1)]


class Keys(BaseModel):
    """Base of all mappings: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def given(self, *names: str) -> dict[str, Any]:
        """Return the keys that were written, of ``names`` or of all."""
        wanted = names or tuple(type(self).model_fields)
        return {n: getattr(self, n) for n in wanted if n in self.model_fields_set}


@contextmanager
def as_problem(kind: str) -> Iterator[None]:
    """Turn what a class of the library says of its values into a problem here."""
    try:
        yield
    except ConfigError as error:
        context = {"text": str(error)}
        raise PydanticCustomError(kind, "{text}", context) from None
