"""
What a pool remembers over a restart of the router: time estimates, and that it was emptied.

One small JSON file per pool in the state directory, replaced as a whole. Losing it costs a few
wrong guesses, so an unreadable file is reported and ignored.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from ..core.estimates import Estimates
from ..core.spec import PoolName
from ..drivers.statedir import file_name

log = structlog.get_logger("modelpool.record")


@dataclass(slots=True)
class PoolRecord:
    """Memory of one pool."""

    estimates: Estimates = field(default_factory=Estimates)
    released: bool = False


class RecordStore:
    """Reads and writes the records of all pools below *folder*."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, pool: PoolName) -> Path:
        return self._folder / f"{file_name(pool)}.record.json"

    def read(self, pool: PoolName) -> PoolRecord:
        """Return the record of *pool*, an empty one if there is none that can be read."""
        try:
            data = json.loads(self._path(pool).read_text("utf-8"))
            if not isinstance(data, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            return PoolRecord()
        except (OSError, ValueError) as error:
            log.warning("record is unreadable", pool=pool, kind=type(error).__name__)
            return PoolRecord()
        estimates = data.get("estimates")
        return PoolRecord(
            Estimates.from_dict(estimates if isinstance(estimates, dict) else {}),
            data.get("released") is True,
        )

    @staticmethod
    def encode(record: PoolRecord) -> str:
        """Return the text of *record*; separate from `write`, which may run in a thread."""
        data = {"estimates": record.estimates.as_dict(), "released": record.released}
        return json.dumps(data) + "\n"

    def write(self, pool: PoolName, text: str) -> None:
        """Replace the record of *pool*. Blocks for a small file; raises nothing."""
        path = self._path(pool)
        scratch = path.with_suffix(".new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch.write_text(text, "utf-8")
            os.replace(scratch, path)
        except OSError as error:
            log.warning("record was not written", pool=pool, kind=type(error).__name__)
