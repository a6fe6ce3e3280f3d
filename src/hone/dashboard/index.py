"""Index of a run in SQLite, so that queries take milliseconds instead of reading all files.

    metrics.jsonl ─────────────► points(metric, step, value)
    rollouts/step_N/*.jsonl ───► rollouts(step, offset in the file, filter columns) ─ texts, by trigram
    results.jsonl of evaluations ┘

Each run has one index in the user's cache directory, which is updated incrementally. Rollouts are
not stored whole: they are read from their files, at the offset of their line.
"""

import contextlib
import hashlib
import json
import math
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hone.dashboard.rollout_columns import is_finite, row_columns, row_of
from hone.dashboard.runs import Run, is_below
from hone.run_directory import steps_in

MOST_STEP = 2**53  # steps beyond are no steps of a run
LAYOUT_VERSION = 5  # of the tables; an index with another layout is rebuilt
STEPS_PER_TRANSACTION = 40  # steps per transaction
ROLLOUTS = "rollouts.jsonl"
SORTED_BY = ("step", "reward", "advantage", "tokens", "seconds", "turns")
TABLES = """
CREATE TABLE about(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE metrics(id INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE points(metric INTEGER, step INTEGER, value REAL, PRIMARY KEY(metric, step)) WITHOUT ROWID;
CREATE TABLE files(step INTEGER PRIMARY KEY, stamp TEXT);
CREATE TABLE rollouts(
  id INTEGER PRIMARY KEY, step INTEGER, start INTEGER, length INTEGER, grp INTEGER, member INTEGER, env TEXT,
  example TEXT, reward REAL, advantage REAL, tokens INTEGER, stop TEXT, error TEXT, unused TEXT, truncated INTEGER,
  seconds REAL, turns INTEGER, version INTEGER, logprob REAL, asked TEXT, said TEXT);
CREATE INDEX by_step ON rollouts(step);
CREATE INDEX by_reward ON rollouts(reward);
CREATE VIRTUAL TABLE texts USING fts5(text, tokenize='trigram', detail='none', columnsize=0);
"""


def cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "hone" / "dashboard"


class Index:
    """SQLite index of one run.

    Only one thread at a time updates it; each reader opens its own connection.
    """

    def __init__(self, root: Path, run: Run, place: Path | None = None) -> None:
        self.root = root
        self.run = run
        name = hashlib.sha256(f"{run.path.resolve()}:{run.kind}".encode()).hexdigest()[:24]
        self.file = (place or cache_directory()) / f"{name}.sqlite"
        self.progress = (0, 0)  # steps of rollouts that are indexed, and all steps
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._is_made = False
        self._seen: tuple[str, ...] | None = None
        self._seen_metrics: str | None = None

    def _open_database(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.file, timeout=30, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=OFF")  # a broken index is rebuilt
        connection.execute("PRAGMA cache_size=-16000")
        return connection

    def _open_ready(self) -> sqlite3.Connection:
        """Open the database with its tables; rebuild it if it is damaged or has another layout."""
        with self._making:
            connection = self._create_database()
            self._is_made = True
        return connection

    def _create_database(self) -> sqlite3.Connection:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            try:
                connection = self._open_database()
                layout = connection.execute("PRAGMA user_version").fetchone()[0]
                if layout == LAYOUT_VERSION:
                    return connection
                if (
                    layout == 0
                    and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
                ):
                    connection.executescript(
                        f"BEGIN; {TABLES} PRAGMA user_version={LAYOUT_VERSION}; COMMIT;"
                    )
                    return connection
                connection.close()
            except sqlite3.DatabaseError:
                pass
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.file}{suffix}").unlink(missing_ok=True)
        raise sqlite3.DatabaseError(f"{self.file} cannot be written")

    def update_index(self, waits: bool = False) -> bool:
        """Index new metrics and rollouts; return True if there were any.

        If another thread is updating the index, wait for it if `waits` is set, else return False.
        """
        if not self._lock.acquire(blocking=waits):
            return False
        try:
            is_new = self._read_metrics()
            seen = tuple(
                _file_stamp(self.run.path / name) for name in ("rollouts", "results.jsonl")
            )
            if seen == self._seen or self.run.kind == "sft":
                return is_new
            with contextlib.closing(self._open_ready()) as connection:
                if self.run.kind == "rl":
                    self._take_steps(connection)
                else:
                    self._take_file(connection, 0, self.run.path / "results.jsonl")
            self._seen = seen
            return True
        finally:
            self._lock.release()

    def update_metrics(self) -> bool:
        """Index new metrics only, which is fast; return True if there were any.

        Returns False at once if another update is running.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._read_metrics()
        finally:
            self._lock.release()

    def _read_metrics(self) -> bool:
        stamp = _file_stamp(self.run.metrics_file)
        if stamp == self._seen_metrics:
            return False
        with contextlib.closing(self._open_ready()) as connection:
            self._take_metrics(connection)
        self._seen_metrics = stamp
        return True

    def _take_metrics(self, connection: sqlite3.Connection) -> None:
        """Index metrics from the last offset, or from the start if the file was rewritten (resume)."""
        file = self.run.metrics_file
        if not is_below(self.root, file):
            return
        of = os.stat(file)
        known = json.loads(_read_fact(connection, "metrics") or "[0, 0]")
        start = known[1] if known[0] == of.st_ino and known[1] <= of.st_size else 0
        with file.open("rb") as opened:
            opened.seek(start)
            added = opened.read()
        whole = added[: added.rfind(b"\n") + 1]
        if start and not whole:
            return
        names: dict[str, int] = dict(connection.execute("SELECT name, id FROM metrics"))
        connection.execute("BEGIN")
        if not start:
            connection.execute("DELETE FROM points")
        for line in whole.split(b"\n"):
            _insert_points(connection, names, row_of(line))
        _write_fact(connection, "metrics", json.dumps([of.st_ino, start + len(whole)]))
        connection.execute("COMMIT")

    def _take_steps(self, connection: sqlite3.Connection) -> None:
        there = {
            step: _file_stamp(place / ROLLOUTS)
            for step, place in steps_in(self.run.path / "rollouts").items()
        }
        known = dict(connection.execute("SELECT step, stamp FROM files"))
        gone = [step for step in known if step not in there or there[step] != known[step]]
        new = sorted(step for step in there if there[step] and known.get(step) != there[step])
        for some in (
            gone[i : i + STEPS_PER_TRANSACTION] for i in range(0, len(gone), STEPS_PER_TRANSACTION)
        ):
            connection.execute("BEGIN")
            for step in some:
                _delete_step(connection, step)
            connection.execute("COMMIT")
        self.progress = (len(there) - len(new), len(there))
        for some in (
            new[i : i + STEPS_PER_TRANSACTION] for i in range(0, len(new), STEPS_PER_TRANSACTION)
        ):
            connection.execute("BEGIN")
            for step in some:
                self._add_step(
                    connection, step, self.run.path / "rollouts" / f"step_{step}" / ROLLOUTS
                )
                connection.execute("INSERT OR REPLACE INTO files VALUES(?, ?)", (step, there[step]))
            connection.execute("COMMIT")
            self.progress = (self.progress[0] + len(some), len(there))

    def _take_file(self, connection: sqlite3.Connection, step: int, file: Path) -> None:
        """Index a growing file as the rollouts of one step; index all of it again if it changed."""
        stamp = _file_stamp(file)
        known = dict(connection.execute("SELECT step, stamp FROM files"))
        if stamp and known.get(step) != stamp:
            connection.execute("BEGIN")
            _delete_step(connection, step)
            self._add_step(connection, step, file)
            connection.execute("INSERT OR REPLACE INTO files VALUES(?, ?)", (step, stamp))
            connection.execute("COMMIT")
        self.progress = (1, 1)

    def _add_step(self, connection: sqlite3.Connection, step: int, file: Path) -> None:
        if not is_below(self.root, file):
            return
        start = 0
        with file.open("rb") as opened:
            for line in opened:
                row = row_of(line)
                if "completion" in row:
                    values, text = row_columns(row)
                    done = connection.execute(
                        f"INSERT INTO rollouts VALUES(NULL, ?, ?, ?, {', '.join('?' * len(values))})",
                        (step, start, len(line), *values),
                    )
                    connection.execute(
                        "INSERT INTO texts(rowid, text) VALUES(?, ?)", (done.lastrowid, text)
                    )
                start += len(line)

    @contextlib.contextmanager
    def open_reader(self) -> Iterator[sqlite3.Connection]:
        """Context manager: a read-only connection to the index, which is built first if needed."""
        if not self._is_made or not self.file.exists():
            self._open_ready().close()
        connection = sqlite3.connect(f"file:{self.file}?mode=ro", uri=True, timeout=30)
        try:
            connection.execute("PRAGMA cache_size=-16000")
            connection.execute("BEGIN")  # all queries of a reader see the same state
            yield connection
        finally:
            connection.close()

    def metric_names(self) -> list[str]:
        with self.open_reader() as connection:
            return [
                name for (name,) in connection.execute("SELECT name FROM metrics ORDER BY name")
            ]

    def metric_series(
        self, names: list[str], since: int = -1, most: int = 2000
    ) -> dict[str, list[list[float]]]:
        """Return {name: [steps, values]} for metrics, from the step after `since` on.

        If a metric has more than `most` points, consecutive steps are averaged.
        """
        found: dict[str, list[list[float]]] = {}
        with self.open_reader() as connection:
            known: dict[str, int] = {
                name: i for i, name in connection.execute("SELECT id, name FROM metrics")
            }
            for name in names:
                if name not in known:
                    continue
                where = (known[name], since)
                first, last, count = connection.execute(
                    "SELECT min(step), max(step), count(*) FROM points WHERE metric = ? AND step > ?",
                    where,
                ).fetchone()
                width = 1 if count <= most else math.ceil((last - first + 1) / most)
                rows = connection.execute(
                    "SELECT max(step), avg(value) FROM points WHERE metric = ? AND step > ? GROUP BY step / ? "
                    "ORDER BY 1",
                    (*where, width),
                ).fetchall()
                found[name] = [[step for step, _ in rows], [value for _, value in rows]]
        return found

    def first_and_last(self, name: str) -> tuple[float | None, float | None]:
        """Return a metric's values at its first and its last step; None if it has none."""
        sql = """SELECT value FROM points JOIN metrics ON metrics.id = points.metric
            WHERE name = ? ORDER BY step {} LIMIT 1"""
        with self.open_reader() as connection:
            found = [
                connection.execute(sql.format(way), (name,)).fetchone() for way in ("", "DESC")
            ]
        return tuple(None if row is None else row[0] for row in found)  # type: ignore[return-value]

    @property
    def metrics_stamp(self) -> str | None:
        """A value that changes when new metrics have been indexed."""
        return self._seen_metrics

    def find_rollouts(
        self, wanted: dict[str, Any], sort: str, descending: bool, most: int, skip: int
    ) -> dict[str, Any]:
        """Return one page of the rollouts that match `wanted`, and their total number.

        Args:
            wanted: filters: step_from, step_to, reward_from, reward_to, tokens_from, tokens_to,
                env, stop, unused, group, example, failed, truncated and text.
            sort: column to sort by, one of SORTED_BY.
            descending: largest values first.
            most: most rows to return.
            skip: number of matching rows to leave out at the beginning.

        Returns:
            {"total": number of matches, "rows": index rows}.

        Raises:
            ValueError: `sort` is unknown.
        """
        if sort not in SORTED_BY:
            raise ValueError(f"sort {sort!r}: {', '.join(SORTED_BY)}")
        where, values = _build_where(wanted)
        order = f"{sort} {'DESC' if descending else 'ASC'}, id"
        with self.open_reader() as connection:
            connection.row_factory = sqlite3.Row
            total = connection.execute(
                f"SELECT count(*) FROM rollouts WHERE {where}", values
            ).fetchone()[0]
            rows = connection.execute(
                f"SELECT * FROM rollouts WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
                (*values, most, skip),
            ).fetchall()
        return {"total": total, "rows": [dict(row) for row in rows]}

    def reward_histogram(self, bins: int = 20, most_columns: int = 80) -> dict[str, Any]:
        """Return how the rewards of a run's rollouts are distributed, by step.

        Returns:
            low, high: the range of the rewards, divided into `bins` equal bins.
            steps: first step of each column; a column covers `width` steps, so that there are at
                most `most_columns`. `last` is the last step.
            counts: for each column the number of rollouts in each bin.
        """
        with self.open_reader() as connection:
            first, last, low, high = connection.execute(
                "SELECT min(step), max(step), min(reward), max(reward) FROM rollouts WHERE error = ''"
            ).fetchone()
            if first is None:
                return {"steps": [], "counts": []}
            low, high = min(low, 0.0), max(high, 1.0 if high > 0 or low == high else high)
            width = math.ceil((last - first + 1) / most_columns)
            rows = connection.execute(
                "SELECT (step - ?) / ?, min(cast((reward - ?) / ? * ? AS INTEGER), ?), count(*) "
                "FROM rollouts WHERE error = '' GROUP BY 1, 2",
                (first, width, low, high - low, bins, bins - 1),
            ).fetchall()
        columns = 1 + (last - first) // width
        counts = [[0] * bins for _ in range(columns)]
        for column, place, count in rows:
            counts[column][place] = count
        steps = [first + width * column for column in range(columns)]
        sizes = {"low": low, "high": high, "width": width, "last": last}
        return sizes | {"steps": steps, "counts": counts}

    def filter_values(self) -> dict[str, list[Any]]:
        """Return the values to filter by: `env`, `stop` reasons, `unused` (why not trained on).

        `steps` holds the first step, the last step and the number of rollouts.
        """
        with self.open_reader() as connection:
            found = {
                name: [
                    row[0]
                    for row in connection.execute(
                        f"SELECT DISTINCT {name} FROM rollouts ORDER BY 1 LIMIT 200"
                    )
                ]
                for name in ("env", "stop", "unused")
            }
            found["steps"] = list(
                connection.execute("SELECT min(step), max(step), count(*) FROM rollouts").fetchone()
            )
        return found

    def find_row(self, number: int) -> dict[str, Any] | None:
        """Return the index row of a rollout by its id, or None."""
        with self.open_reader() as connection:
            connection.row_factory = sqlite3.Row
            row = connection.execute("SELECT * FROM rollouts WHERE id = ?", (number,)).fetchone()
        return None if row is None else dict(row)

    def read_rollout(self, number: int) -> dict[str, Any] | None:
        """Return a rollout as its file has it, with its index row under `at`; None if it is gone."""
        row = self.find_row(number)
        if row is None:
            return None
        file = self.file_of(row["step"])
        if not is_below(self.root, file):
            return None
        with file.open("rb") as opened:
            opened.seek(row["start"])
            found = row_of(opened.read(row["length"]))
        return {"at": row, **found} if found else None

    def file_of(self, step: int) -> Path:
        return self.run.path / (
            "results.jsonl" if self.run.kind == "eval" else f"rollouts/step_{step}/{ROLLOUTS}"
        )


def _build_where(wanted: dict[str, Any]) -> tuple[str, list[Any]]:
    parts = ["1"]
    values = []
    for name, column in (("step", "step"), ("reward", "reward"), ("tokens", "tokens")):
        for end, sign in (("from", ">="), ("to", "<=")):
            if wanted.get(f"{name}_{end}") is not None:
                parts.append(f"{column} {sign} ?")
                values.append(wanted[f"{name}_{end}"])
    for name, column in (
        ("env", "env"),
        ("stop", "stop"),
        ("unused", "unused"),
        ("group", "grp"),
        ("example", "example"),
    ):
        if wanted.get(name) is not None:
            parts.append(f"{column} = ?")
            values.append(wanted[name])
    if wanted.get("failed"):
        parts.append("error != ''")
    if wanted.get("truncated"):
        parts.append("truncated = 1")
    if text := wanted.get("text"):
        # The index has trigrams; shorter texts are searched in the filtered rows.
        where = "said" if len(text) < 3 else "text"
        escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        plain = f"{where} LIKE ?" + ("" if escaped == text else " ESCAPE '\\'")
        parts.append(plain if where == "said" else f"id IN (SELECT rowid FROM texts WHERE {plain})")
        values.append(f"%{escaped}%")
    return " AND ".join(parts), values


def _file_stamp(file: Path) -> str:
    """Return a value that changes when a file or directory changes; "" if it does not exist."""
    try:
        of = os.stat(file, follow_symlinks=False)
    except OSError:
        return ""
    return f"{of.st_ino} {of.st_size} {of.st_mtime_ns}"


def _delete_step(connection: sqlite3.Connection, step: int) -> None:
    connection.execute(
        "DELETE FROM texts WHERE rowid IN (SELECT id FROM rollouts WHERE step = ?)", (step,)
    )
    connection.execute("DELETE FROM rollouts WHERE step = ?", (step,))
    connection.execute("DELETE FROM files WHERE step = ?", (step,))


def _insert_points(
    connection: sqlite3.Connection, names: dict[str, int], row: dict[str, Any]
) -> None:
    """Insert the finite numbers of a row of metrics; new metrics are added to `names`."""
    step = row.pop("step", None)
    if not isinstance(step, int) or isinstance(step, bool) or abs(step) > MOST_STEP:
        return
    points = []
    for name, value in row.items():
        if is_finite(value) and name.isprintable():
            if name not in names:
                names[name] = len(names) + 1
                connection.execute("INSERT INTO metrics VALUES(?, ?)", (names[name], name))
            points.append((names[name], step, float(value)))
    connection.executemany("INSERT OR REPLACE INTO points VALUES(?, ?, ?)", points)


def _read_fact(connection: sqlite3.Connection, key: str) -> str | None:
    row = connection.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
    return None if row is None else row[0]


def _write_fact(connection: sqlite3.Connection, key: str, value: str) -> None:
    connection.execute("INSERT OR REPLACE INTO about VALUES(?, ?)", (key, value))
