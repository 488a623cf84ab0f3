"""SQL over downloaded files of a prediction log, with DuckDB in this process.

The statement may read the view `predictions`, and no other file, address or extension: the files
were written by others' calls, and statements are copied from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pilotlight.errors import InvalidInput

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY: Final = "2GB"


class QueryResult(NamedTuple):
    """Columns, and the first rows of a result; `is_cut`: there are more."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    is_cut: bool


def query_predictions(
    files: Sequence[Path], directory: Path, sql: str, *, limit: int
) -> QueryResult:
    """Run a statement on the files, which are below `directory`. Raises InvalidInput: duckdb is not
    installed, or it does not accept the statement."""
    with open_predictions(files, directory) as database:
        result = database.execute(sql)
        columns = [column[0] for column in result.description or ()]
        rows = result.fetchmany(limit + 1) if columns else []
    return QueryResult(columns, rows[:limit], len(rows) > limit)


@contextmanager
def open_predictions(files: Sequence[Path], directory: Path) -> Iterator[DuckDBPyConnection]:
    """A database with the view `predictions` of the files, which are below `directory`. Raises
    InvalidInput: duckdb is not installed, or fails in the context."""
    try:
        import duckdb
    except ImportError as e:
        raise InvalidInput(
            "queries need duckdb, which is not installed here",
            hint="pip install 'pilotlight[predictions]', or use `pilotlight log download`.",
        ) from e
    with duckdb.connect(":memory:") as database:
        database.execute(f"SET memory_limit = '{MEMORY}'")
        database.execute(f"SET temp_directory = {_quoted(str(directory / 'temporary'))}")
        database.execute(f"SET allowed_directories = [{_quoted(str(directory))}]")
        database.execute("SET enable_external_access = false")
        database.execute("SET lock_configuration = true")
        names = ", ".join(_quoted(str(path)) for path in files)
        source = f"read_parquet([{names}], union_by_name = true)"
        try:
            database.execute(f"CREATE VIEW predictions AS SELECT * FROM {source}")
            yield database
        except duckdb.Error as e:
            raise InvalidInput(f"the query failed: {e}", parameter="sql") from e


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
