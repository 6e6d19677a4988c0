"""The tables that visitors have open: limited for each of them and for all together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from app.extraction.files import read_file
from app.extraction.reading import read_apart
from app.extraction.sources import LIMITS, Row, Table, TableLimits, make_table

# As many large tables as the server keeps; of small ones it keeps more.
NUM_LARGE = 8
NO_TABLE = Table((), ())


async def open_table(paths: Sequence[str | Path], limits: TableLimits = LIMITS) -> Table:
    """All rows of these files, in the order of their names: uploads lie in folders with random names.

    Raises UnreadableSource: together they are larger than the limits.
    """
    rows: list[Row] = []
    num_cells = num_chars = 0
    for path in sorted(map(Path, paths), key=lambda path: path.name):
        part = await read_apart(path, read_file, path, limits)
        rows += part.rows
        num_cells, num_chars = num_cells + part.num_cells, num_chars + part.num_chars
        limits.check("these files", len(rows), num_cells, num_chars)
    return await read_apart("", make_table, rows)


class OpenTables:
    """One table for each session, with the files it was read from; the ones that were opened first make room."""

    def __init__(self, limits: TableLimits = LIMITS) -> None:
        self.limits = limits
        self._tables: OrderedDict[str, tuple[Table, float]] = OrderedDict()
        self.paths: dict[str, list[str]] = {}

    def put(self, session: str, table: Table, paths: Sequence[str] = ()) -> None:
        """Keep this table in place of the session's last one."""
        self.drop(session)
        self.paths[session] = list(paths)
        if not table.rows:
            return
        rows, cells, chars = len(table.rows), table.num_cells, table.num_chars
        limits = self.limits
        size = max(rows / limits.max_rows, cells / limits.max_cells, chars / limits.max_chars)
        self._tables[session] = (table, size)
        while sum(size for _, size in self._tables.values()) > NUM_LARGE:
            self._tables.popitem(last=False)

    def get(self, session: str) -> Table:
        """Return the session's table, or an empty one."""
        return self._tables.get(session, (NO_TABLE, 0))[0]

    def drop(self, session: str) -> None:
        """Free the session's table."""
        self._tables.pop(session, None)
        self.paths.pop(session, None)
