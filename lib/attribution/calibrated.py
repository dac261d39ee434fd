"""The calibration file: numerics found for one machine, and its refusal anywhere else.

Numerics that made a kernel equal to compiled code hold for that code alone: another compiler version,
device, shape or pin may change any of it without a word. So the file says what it was made for, refuses
everything else by name, and is checked again at start-up on a sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from torch import Tensor

from fusion_evidence.kernels import reference
from fusion_evidence.kernels.numerics import Numerics
from fusion_evidence.kernels.shapes import AttentionShape
from fusion_evidence.lib.attribution.calibration import Fit
from fusion_evidence.lib.measure.compare import Comparison, compare, upper_bound
from fusion_evidence.lib.measure.inputs import Inputs, run
from fusion_evidence.lib.measure.machine import Machine

Graph = Literal["decode", "prefill"]
"""The compiled model's graph of one token, and the one dynamic in T."""

VERSIONS = ("python", "torch", "triton", "cuda", "hip")
"""Whose versions a compiled kernel's bits may depend on."""


class StaleCalibration(RuntimeError):
    """A calibration that does not hold here; the message says why and that it must be made again."""


class Candidate(BaseModel):
    """Numerics that were tried, and the mismatches by which they were rejected, or none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    numerics: Numerics
    mismatches: int
    elements: int


class GraphCalibration(BaseModel):
    """What one graph computes.

    elements: computed elements (Q and K) without a mismatch; bound: the mismatch rate they leave possible,
    95 %. alike: other candidates without a mismatch, which they cannot tell from it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    numerics: Numerics
    elements: int
    bound: float
    alike: tuple[Candidate, ...] = ()
    rejected: tuple[Candidate, ...] = ()

    @classmethod
    def of(cls, fits: Sequence[Fit]) -> GraphCalibration:
        """From `calibration.fit`. ValueError, naming the nearest candidate, where none fits."""
        best, *others = fits
        if best.mismatches:
            raise ValueError(
                f"no candidate fits: the nearest, {best.numerics}, leaves {best.mismatches:,} of "
                f"{best.elements:,} elements"
            )
        candidates = [
            Candidate(numerics=one.numerics, mismatches=one.mismatches, elements=one.elements)
            for one in others
        ]
        return cls(
            numerics=best.numerics,
            elements=best.elements,
            bound=best.bound,
            alike=tuple(one for one in candidates if not one.mismatches),
            rejected=tuple(one for one in candidates if one.mismatches),
        )

    def rejected_by_fewer_than(self, least: int = 20) -> tuple[Candidate, ...]:
        """Candidates rejected by too few mismatches to be sure that no accident did it."""
        return tuple(one for one in self.rejected if one.mismatches < least)


@dataclass(frozen=True)
class Revalidation:
    """A start-up check that found nothing: so many elements without a mismatch, in so many seconds."""

    elements: int
    seconds: float

    @property
    def bound(self) -> float:
        """The mismatch rate that this sample leaves possible, 95 %."""
        return upper_bound(self.elements)


class CalibrationFile(BaseModel):
    """Numerics by graph, and all they were found for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    machine: str
    arch: str
    versions: dict[str, str]
    shape: AttentionShape
    pins: dict[str, JsonValue]
    graphs: dict[Graph, GraphCalibration]

    @classmethod
    def of(
        cls,
        machine: Machine,
        shape: AttentionShape,
        pins: Mapping[str, Any],
        graphs: Mapping[Graph, GraphCalibration],
    ) -> CalibrationFile:
        """For this machine with its versions, this shape and these pins."""
        return cls(
            machine=machine.name,
            arch=machine.arch,
            versions=_versions(machine),
            shape=shape,
            pins=dict(pins),
            graphs=dict(graphs),
        )

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> CalibrationFile:
        """Read it. StaleCalibration: there is none, or it cannot be read as this version's."""
        try:
            return cls.model_validate_json(path.read_text())
        except FileNotFoundError as error:
            raise StaleCalibration(f"there is no calibration at {path}: calibrate first") from error
        except ValidationError as error:
            fields = "; ".join(
                f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}"
                for one in error.errors()
            )
            raise StaleCalibration(
                f"{path} is no calibration of this version ({fields}): calibrate again"
            ) from error

    def check(self, machine: Machine, shape: AttentionShape, pins: Mapping[str, Any]) -> None:
        """Does it speak of this machine, these versions, this shape and these pins?

        The name of a shape means nothing here, its sizes do.

        Raises:
            StaleCalibration: naming every key that differs, with both values.
        """
        here = CalibrationFile.of(machine, shape, pins, {})._keys()
        there = self._keys()
        differing = [
            f"{key} was {there.get(key, 'not set')!r}, is {here.get(key, 'not set')!r}"
            for key in {**there, **here}
            if key not in there or key not in here or there[key] != here[key]
        ]
        if differing:
            raise StaleCalibration(
                f"the calibration is of something else: {'; '.join(differing)}; calibrate again"
            )

    def revalidate(
        self,
        graph: Graph,
        observe: Callable[[Inputs], Mapping[str, Tensor]],
        batches: Iterable[Inputs],
        implementation: Callable[
            ..., tuple[Tensor, Tensor, Tensor, Tensor]
        ] = reference.qkv_prologue,
    ) -> Revalidation:
        """Compare the graph's numerics, as ``implementation`` computes them, with what runs now.

        Args:
            observe: outputs ``q`` and ``k`` of the compiled code.
            batches: inputs it was not calibrated on; all are taken. The whole must stay under two
                seconds, which thousands of tokens do on a GPU.

        Raises:
            StaleCalibration: a single element differs, or there is no calibration of this graph.
        """
        if graph not in self.graphs:
            raise StaleCalibration(f"there is no calibration of {graph}: calibrate again")
        numerics = self.graphs[graph].numerics
        started = time.perf_counter()
        found = Comparison()
        for inputs in batches:
            expected = observe(inputs)
            actual = run(implementation, inputs, self.shape, numerics)
            for name in ("q", "k"):
                found = found + compare(actual[name], expected[name])
        if found.elements == 0:
            raise ValueError("revalidate needs at least one batch of inputs")
        if found.mismatches:
            raise StaleCalibration(
                f"the calibration of {graph}, {numerics}, no longer holds: {found}; calibrate again"
            )
        return Revalidation(found.elements, time.perf_counter() - started)

    def _keys(self) -> dict[str, JsonValue]:
        """What it depends on, flat."""
        sizes = {k: v for k, v in asdict(self.shape).items() if k != "name"}
        return {
            "machine": self.machine,
            "arch": self.arch,
            **{f"versions.{key}": value for key, value in self.versions.items()},
            **{f"shape.{key}": value for key, value in sizes.items()},
            **{f"pins.{key}": value for key, value in self.pins.items()},
        }


def _versions(machine: Machine) -> dict[str, str]:
    return {name: machine.versions[name] for name in VERSIONS if name in machine.versions}
