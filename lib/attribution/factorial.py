"""The arms of the attribution: which processes there are, and what their records say of one another.

Every arm is a job of its own (`lib.service.jobs`), pinned alike and fed the tokens of the baseline, so
that it differs from its partner in what its name says and in nothing else. What was recorded inside the
attention op is then compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd

from fusion_evidence.lib.attribution import records
from fusion_evidence.lib.attribution.records import Divergence, Within
from fusion_evidence.lib.service.arms import Pins
from fusion_evidence.lib.service.jobs import Job, JobResult, Tokens

PINS = Pins(deterministic=True, sdpa="math", caches_off=True, first_traced=65, workspace=":4096:8")
"""What every arm of the collection holds fixed unless its name says otherwise."""

BASELINE = "baseline"
CONTROL = "control"


def jobs(arms: Iterable[str], forced: Tokens | None = None, **options: Any) -> list[Job]:
    """One recorded job for each arm, named after it, under `PINS`.

    forced: tokens that every arm is fed, by request, in place of its own; None: each is free and then fed
    its own. options: further fields of `Job`, or others in place of these.
    """
    settings: dict[str, Any] = dict(pins=PINS, record="tensors", logits=True)
    if forced is not None:
        settings |= dict(passes=["forced"], forced=forced)
    return [Job(**dict(name=arm, arm=arm) | settings | options) for arm in arms]


@dataclass(frozen=True)
class Compared:
    """How one recorded run differs from another.

    records, logits: frames of `records.compare_records` and `compare_logits`; logits is None where one of
    the two kept none. error: why nothing could be compared; the frames are empty then.
    """

    records: pd.DataFrame = field(default_factory=pd.DataFrame)
    logits: pd.DataFrame | None = None
    error: str = ""

    @property
    def total(self) -> int:
        """Records compared: layers of forward calls."""
        return 0 if self.error else len(records.records(self.records))

    @property
    def differing(self) -> int:
        """Records in which any bit of Q, K or V differs."""
        return 0 if self.error else records.differing(self.records)

    @property
    def first(self) -> Divergence | None:
        """The first of them."""
        return None if self.error else records.first_divergence(self.records)


@dataclass(frozen=True)
class Recording:
    """One recording of a job: its first, or further ones (`Job.recordings`) from 2 on."""

    result: JobResult
    number: int = 1

    @property
    def records(self) -> Path:
        """Raises ValueError where there are none, with the job's error."""
        return self.result.path("records" if self.number == 1 else f"records.{self.number}")

    def logits(self, recorded: bool) -> Path | None:
        """Those of the recorded calls themselves, or of the replays that a service would run."""
        kinds = ["logits.recorded", "logits"] if recorded else ["logits"]
        kinds = kinds if self.number == 1 else [f"logits.{self.number}"]
        found = [kind for kind in kinds if kind in self.result.files]
        return self.result.path(found[0]) if found else None


def compare(
    pairs: Mapping[str, tuple[Recording, Recording]], within: Within | None = None, workers: int = 1
) -> dict[str, Compared]:
    """Compare the second of each pair with the first, by name.

    within: only these requests and their first steps; None: all, which must be the same in both.
    workers: processes to compare in. A pair of which one side failed has the error.
    """
    files = {name: _files(*pair) for name, pair in pairs.items()}
    known = {name: paths for name, paths in files.items() if not isinstance(paths, str)}
    found = {name: Compared(error=text) for name, text in files.items() if isinstance(text, str)}
    if workers > 1 and len(known) > 1:
        count = min(workers, len(known))
        with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
            compared = list(pool.map(_compare, known.values(), [within] * len(known)))
    else:
        compared = [_compare(paths, within) for paths in known.values()]
    found |= dict(zip(known, compared, strict=True))
    return {name: found[name] for name in pairs}


_Files = tuple[Path, Path, Path | None, Path | None]


def _files(one: Recording, other: Recording) -> _Files | str:
    recorded = (one.number, other.number) != (1, 1)
    try:
        return one.records, other.records, one.logits(recorded), other.logits(recorded)
    except ValueError as error:
        return str(error)


def _compare(files: _Files, within: Within | None) -> Compared:
    a, b, logits_a, logits_b = files
    try:
        frame = records.compare_records(a, b, within)
        logits = None
        if logits_a is not None and logits_b is not None:
            logits = records.compare_logits(logits_a, logits_b, within)
        return Compared(frame, logits)
    except ValueError as error:
        return Compared(error=str(error))


def differing_by_arm(
    results: Mapping[str, JobResult],
    baseline: str = BASELINE,
    within: Within | None = None,
    workers: int = 1,
) -> dict[str, Compared]:
    """Every other job compared with the baseline's, and as `CONTROL` the baseline's second recording."""
    base = results[baseline]
    pairs = {
        name: (Recording(base), Recording(result))
        for name, result in results.items()
        if name != baseline
    }
    if "records.2" in base.files:
        pairs = {CONTROL: (Recording(base), Recording(base, 2))} | pairs
    return compare(pairs, within, workers)


def table(compared: Mapping[str, Compared]) -> pd.DataFrame:
    """One row per arm: arm, records_total, records_differing, logits_total, logits_differing, first, error.

    first: the first divergence as a sentence. Where nothing could be compared the counts are missing.
    """
    rows = []
    for arm, one in compared.items():
        logits = one.logits
        rows.append(
            {
                "arm": arm,
                "records_total": None if one.error else one.total,
                "records_differing": None if one.error else one.differing,
                "logits_total": None if logits is None else int(logits["elements"].sum()),
                "logits_differing": None if logits is None else int(logits["mismatches"].sum()),
                "first": str(one.first or ""),
                "error": one.error,
            }
        )
    counts = ["records_total", "records_differing", "logits_total", "logits_differing"]
    frame = pd.DataFrame(rows, columns=["arm", *counts, "first", "error"])
    return frame.astype(dict.fromkeys(counts, "Int64"))
