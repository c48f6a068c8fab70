"""The length of the final training in samples. Pure."""

from __future__ import annotations

from autotune.errors import UsageError
from autotune.records.probe import ProbeReport
from autotune.records.search import PlannedRun


def find_planned_samples(planned: PlannedRun | None, report: ProbeReport) -> float | None:
    """Return how many samples the planned training has; None when its length is not known.

    Raises:
        UsageError: it is given in epochs of a dataset without a length.
    """
    if planned is None:
        return None
    if planned.unit == "samples":
        return planned.amount
    if planned.unit == "seconds":
        return planned.amount * report.measurement.samples_per_second
    count = report.target.data.sample_count
    if count is None:
        raise UsageError(
            "--planned-run is in epochs, and this dataset has no length", hint="give it as a time or in samples"
        )
    return planned.amount * count
