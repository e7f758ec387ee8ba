"""
Load messages into files, epoch by epoch.

The files of an epoch are written to a hidden folder and then moved to where they are
read: once the epoch is recorded, or at once in a load that is not; see
``pipeline/delivery/place.py``. So readers of the folder see whole epochs, and a killed
run leaves no half epoch.
"""

from __future__ import annotations

import gzip
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import Any, BinaryIO, Final, Self

import anyio.to_thread
import pyarrow as pa
import pyarrow.compute as pc

from etlstage.columns import Epoch, array_of, one_of
from etlstage.errors import os_reason
from etlstage.files.csv_format import separator
from etlstage.files.find import folder_flaw, folder_name
from etlstage.files.fit import Fitting, Rows
from etlstage.files.lines import BLANKS
from etlstage.files.text import cell_texts, objects
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.place import UNRECORDED, EpochFiles, taken
from etlstage.pipeline.interfaces import Output
from etlstage.pipeline.landing import RowSink
from etlstage.settings.ddl import columns_of
from etlstage.stage import ErrorPolicy

__all__ = ("FileSink",)

_FILE_BYTES: Final = 32 << 20  # of messages in a file, roughly
_MOST: Final = 512 << 20  # bytes that are converted together
_SUFFIXES: Final = {"gzip": ".gz", "zstd": ".zst", "none": ""}


class FileSink(RowSink):
    """
    Loads messages into a folder of files.

    Args:
        path: The folder.
        format: ``csv``, ``json``, ``ndjson``, ``parquet`` or ``text``.
        mode: How existing output is treated: ``append``, ``overwrite`` or ``error``.
        schema: Columns as DDL; without it the column ``value``, the message as text.
        missing: What happens to a message that lacks a column not declared ``NULL``.
        extra: What happens to a message with a field that is not a column.
        options: Options by Spark's names.
        partition_by: Columns that become folders.
        name: Name in reports and errors.
        epoch_messages: Messages in an epoch, at most.
        epoch_bytes: Bytes in an epoch, at most, unless a single message has more.
        on_error: What happens to messages that do not fit the schema.
        dead_letters: Where these messages go; None: the first one ends the run.

    """

    def __init__(
        self,
        path: Path,
        format: str = "parquet",  # noqa: A002 - as Spark calls it
        *,
        mode: str = "error",
        schema: str | None = None,
        missing: str = "dead_letter",
        extra: str = "ignore",
        options: Mapping[str, str] | None = None,
        partition_by: Sequence[str] = (),
        name: str = "load",
        epoch_messages: int = 1_000_000,
        epoch_bytes: int = 128 << 20,
        on_error: ErrorPolicy | None = None,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        self._format, self._mode = format, mode
        super().__init__(
            name,
            where=str(path),
            path=path,
            replaces=mode == "overwrite",
            schema=schema,
            on_error=on_error,
            dead_letters=dead_letters,
            config={
                "name": name,
                "kind": "load",
                "format": format,
                "path": str(path),
                "schema": schema,
                "missing": missing,
                "extra": extra,
            },
        )
        self._folder = path
        self._fitting = Fitting(
            schema,
            missing=missing,
            extra=extra,
            line=_line_of(format, schema, partition_by),
        )
        self._options = {key.lower(): value for key, value in (options or {}).items()}
        self._by = tuple(partition_by)
        columns = columns_of(schema or "value string")
        self._not_null = {c.name for c in columns if c.nullable is False}
        # Larger epochs are split: Arrow's arrays end at 2 GiB.
        self._bounds = (epoch_messages, min(epoch_bytes, _MOST))
        self._epoch = Epoch()
        self._prepared = False
        # For a load that is not recorded: each run is a load of its own.
        self._own = EpochFiles(path, f"{UNRECORDED}{token_hex(4)}")
        self._written = 0  # files of the current epoch

    async def __aenter__(self) -> Self:
        """Check the settings and prepare the folder; raises as :meth:`write`."""
        try:
            await self._prepare()
        except BaseException:
            await self.aclose()
            raise
        return self

    def output(self) -> Output:
        """Return the folder."""
        return Output(self._format, str(self._folder))

    @property
    def _columns(self) -> Sequence[str]:
        return self._fitting.names

    def _why(self, error: Exception) -> str:
        if not isinstance(error, OSError):
            return str(error)
        # Of the two names of a move, the second is the one that readers know.
        place, why = error.filename2 or error.filename, os_reason(error)
        return why if place is None or str(place) == self._where else f"{place}: {why}"

    async def _prepare(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._prepared:
            with self._failing(""):
                await anyio.to_thread.run_sync(self._open)
            self._prepared = True

    def _open(self) -> None:
        path, files = self._folder, self._files
        if not self._takes(self._mode) and self._finds_others:
            raise self._failure(taken(str(path), self._moved_from))
        path.mkdir(parents=True, exist_ok=True)
        if files is not None:
            self._recover()
            return
        self._claim()
        # No other run writes here, so hidden folders were left by a killed run.
        for left in path.glob(f".epoch={UNRECORDED}*"):
            rmtree(left, ignore_errors=True)
        self._mark(self._own, whole=False)

    async def _load_epoch(self, *, last: bool) -> int:
        del last
        epoch = self._epoch
        before = self.account.done + self._fitted + self.account.dead
        rows = await anyio.to_thread.run_sync(self._rows, epoch.binary())
        counts = len(rows.unfit), epoch.messages
        for place, message, why in rows.unfit:
            await self._refuse(
                message, why, before + place, counts, f"epoch {self.epochs + 1}"
            )
        parts = max(1, round(epoch.size / _FILE_BYTES))
        await anyio.to_thread.run_sync(self._write_rows, rows.table, parts)
        for name in self._columns:
            self._filled[name] += len(rows.table) - rows.table[name].null_count
        return len(rows.table)

    def _rows(self, messages: pa.ChunkedArray) -> Rows:
        """Return the rows whose folders can be made, and why others do not fit."""
        table, unfit = self._fitting.rows(messages)
        flaws = self._unplaced(table)
        if not flaws:
            return Rows(table, unfit)
        fit = sorted({*range(len(messages))} - {place for place, _, _ in unfit})
        more = [(fit[n], messages[fit[n]].as_py(), why) for n, why in flaws.items()]
        kept = array_of([n for n in range(len(table)) if n not in flaws], pa.int64())
        return Rows(table.take(kept), sorted([*unfit, *more]))

    def _unplaced(self, table: pa.Table) -> dict[int, str]:
        """Return the rows whose partitions can't be folders, and why, by column."""
        found: dict[int, str] = {}
        for name in self._by:
            texts, nullable = cell_texts(table[name]), name not in self._not_null
            flaws = {
                value: folder_flaw(name, value, nullable=nullable)
                for value in texts.unique().to_pylist()
            }
            if any(flaws.values()):
                values = enumerate(texts.to_pylist())
                found |= {n: flaw for n, value in values if (flaw := flaws[value])}
        return found

    def _write_rows(self, table: pa.Table, parts: int) -> None:
        files, known, number = self._files, self._known, self.epochs + 1
        if files is not None and known is not None:
            number = known.done + 1
        aside = (files or self._own).aside(number)
        step = max(1, -(-len(table) // parts))
        for at in range(0, max(1, len(table)), step):
            for folder, part in self._partitioned(table.slice(at, step)):
                self._write_file(aside / folder, part)
        if files is None:
            try:
                self._own.seal(number, always=self._replaces, check=_unchecked)
                self._own.move(number, replaces=self._replaces, check=_unchecked)
            except OSError:
                # No record would have the next start move the rest.
                with suppress(OSError):
                    self._own.sweep(number - 1, check=_unchecked)
                raise
            if self._replaces and self._letters is not None:
                self._supersede_now()
            self._goes_on, self._written = True, 0

    def _partitioned(self, table: pa.Table) -> Iterator[tuple[Path, pa.Table]]:
        """Yield the folder and the rows of each partition."""
        if not self._by:
            # Even without messages there is a file, which at least has the schema.
            yield Path(), table
            return
        texts = [cell_texts(table[name]).to_pylist() for name in self._by]
        places: dict[Path, list[int]] = {}
        names: dict[tuple[str | None, ...], Path] = {}
        for row, values in enumerate(zip(*texts, strict=True)):
            if values not in names:
                pairs = zip(self._by, values, strict=True)
                names[values] = Path(*(folder_name(n, v) for n, v in pairs))
            places.setdefault(names[values], []).append(row)
        rest = table.drop_columns(list(self._by))
        for folder, rows in places.items():
            yield folder, rest.take(array_of(rows, pa.int64()))

    def _write_file(self, folder: Path, table: pa.Table) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        packed = self._options.get("compression", "").lower()
        if self._format == "parquet":
            from pyarrow import parquet

            path = folder / f"part-{self._written:05}.parquet"
            parquet.write_table(table, path, compression=packed or "snappy")
        else:
            end = _SUFFIXES[packed or "none"]
            kind = "json" if self._format == "ndjson" else _ENDINGS[self._format]
            path = folder / f"part-{self._written:05}.{kind}{end}"
            with _opened(path, packed) as file:
                _WRITERS[self._format](table, file, self._options)
        self._written += 1

    def _supersede_now(self) -> None:
        from etlstage.pipeline.dead_letter.policy import letter_time

        assert self._letters is not None
        self._letters.supersede(letter_time())

    async def _settle_epoch(self) -> int:
        self._written = 0
        return await super()._settle_epoch()

    async def finish(self) -> None:
        """Load the rest and mark the output as complete; raises as :meth:`write`."""
        await super().finish()
        if self._files is None:
            with self._failing("the marker "):
                mark = partial(self._mark, self._own, whole=True)
                await anyio.to_thread.run_sync(mark)

    async def aclose(self) -> None:
        """Discard what has not been loaded; safe to call twice and at any time."""
        if self._files is None:
            with suppress(OSError):
                rmtree(self._own.aside(self.epochs + 1))
        if self._mode == "error" and not self.epochs:
            # An empty folder would make the next run fail.
            with suppress(OSError):
                self._folder.rmdir()
        await super().aclose()


def _line_of(format_: str, schema: str | None, by: Sequence[str]) -> str | None:
    """Return the column that format ``text`` writes as lines; None: another format."""
    names = [column.name for column in columns_of(schema or "value string")]
    left = [name for name in names if name not in by]
    return left[0] if format_ == "text" and left else None


def _unchecked() -> None:
    """Do nothing: a load that is not recorded can't be taken over."""


def _opened(path: Path, packed: str) -> Any:  # noqa: ANN401 - binary, of three kinds
    if packed == "gzip":
        return gzip.open(path, "wb", compresslevel=6)
    if packed == "zstd":
        return pa.output_stream(str(path), compression="zstd")
    return path.open("wb")


def _csv(table: pa.Table, file: BinaryIO, options: Mapping[str, str]) -> None:
    sep = separator(options)
    escape = options.get("escape", "\\")
    # A byte order mark at the beginning of a file would be none of the data.
    odd = re.compile(f'[{re.escape(sep)}"\n\r]|^[\\x00-\\x20\ufeff]|[\\x00-\\x20]$')

    def cell(text: str | None) -> str:
        if text is None:
            return ""
        if not text:
            return '""'
        if odd.search(text):
            if escape != '"':
                text = text.replace(escape, escape * 2)
            return '"{}"'.format(text.replace('"', f'{escape}"'))
        return text

    if options.get("header", "false").lower() == "true":
        file.write(f"{sep.join(map(cell, table.column_names))}\n".encode())
    columns = [cell_texts(column).to_pylist() for column in table.columns]
    lines = (sep.join(map(cell, row)) for row in zip(*columns, strict=True))
    # A blank line would be no row.
    blanks = BLANKS.decode()
    filled = (line if line.strip(blanks) else f'""{line}' for line in lines)
    file.write("".join(f"{line}\n" for line in filled).encode())


def _lines(texts: pa.Array) -> bytes:
    joined = pc.binary_join_element_wise(
        pc.fill_null(texts, one_of("")), one_of("\n"), one_of("")
    )
    return "".join(joined.to_pylist()).encode()


def _json(table: pa.Table, file: BinaryIO, options: Mapping[str, str]) -> None:
    del options
    file.write(_lines(objects(table, nulls=False)))


def _text(table: pa.Table, file: BinaryIO, options: Mapping[str, str]) -> None:
    del options
    column = table.column(0).combine_chunks()
    if column.type == pa.binary():
        data = b"".join((line or b"") + b"\n" for line in column.to_pylist())
    else:
        data = _lines(column)
    # Readers drop one byte order mark at the beginning of a file.
    file.write(BOM_UTF8 + data if data.startswith(BOM_UTF8) else data)


_ENDINGS: Final = {"csv": "csv", "json": "json", "text": "txt"}
Write = Callable[[pa.Table, BinaryIO, Mapping[str, str]], None]
_WRITERS: Final[Mapping[str, Write]] = {
    "csv": _csv,
    "json": _json,
    "ndjson": _json,
    "text": _text,
}
