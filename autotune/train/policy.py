"""Every threshold of a final training, of either way in: its unit, and where the number is from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainPolicy:
    """When a training is looked at, stepped down, given up and compared again.

    Steps are optimizer steps. Where nothing else is said the number is a judgement: it is between a value that was seen
    to be too small and one that would be of no more use.

    Attributes:
        retry_within_steps: a fault that comes again after more steps than these counts as a new one.
        most_deaths: deaths of a workload's process in a row, nothing changed about them, that end its training.
        least_new_steps: between two deaths; after more, they are not in a row.
        most_starts: of a script, before its first step: halving a micro batch comes to an end, and so does this.
        kill_after_seconds: from a Ctrl-C that is not the first request to end until a workload's process is killed.
        echo_seconds: a signal to the whole process group reaches the training as soon as its parent; after this it was
            the parent's alone. Long enough for a machine that swaps: sent on too early it would be the second Ctrl-C.
        log_steps: between two lines of metrics.jsonl; the device is waited for once in so many.
        show_seconds: without a line, after which one is written that is between two checks.
        report_seconds: shortest time between two reports; a terminal is not read faster.
        pace_smoothing: weight of the newest pace in the mean that the time left is told from, 0 to 1.
        stop_seconds: a loader's workers hear a signal to the process group this much ahead of the training.
        thrashing_checks: checks in a row at which the allocator had given memory back, until that is a fault.
        last_checkpoint_share: of the slowest checkpoint's time, kept for the one that `--max-time` ends with.
        last_steps: steps' time kept beside it: the one that may begin now, and one as slow again.
        last_seconds: kept beside both.
        epoch_checkpoints: of a run, that are written at an epoch's end whatever they take.
        epoch_checkpoint_share: of the training's time, what later ones may take: an epoch may be a single step.
        best_checkpoints: kept: the newest best one, and the one that an older checkpoint still names.
        spaced_checkpoints: older ones kept for the drift guard, each about twice as old as the one before.
        script_loss_steps: of a script, between two checks of its loss; each waits for the device once.
        script_first_steps: of a script whose progress is written at once: most scripts that fail do so early, and a
            process that is killed leaves no other word.
        script_young_seconds: until this the progress is written each `script_young_progress_seconds`.
        script_young_progress_seconds: see there.
        script_progress_seconds: between two writings after that.
        script_first_lines_seconds: between two lines about a script's pace in its first `script_lines_seconds`.
        script_lines_seconds: between two such lines after that.
        verify_share: of the time left until `--max-time`, at most, for a re-verification.
        verify_seconds: longest re-verification, compilation included.
        verify_pairs: of launches, the profile's settings against the target's own.
        verify_least_pairs: finished pairs that an interval is made of; of fewer its t quantile is above 6.
        verify_measure_seconds: of the measurement of one launch.
        verify_warmup_share: longest warm-up over a measurement, as in a search.
        verify_largest_loss: the one-sided 95 % lower end of the speed-up has to rule out more, as a fraction.
        verify_confidence: two-sided level of the interval: each end holds one-sided at 95 %.
        verify_device_share: of the device's free memory that a launch may use, as in a search.
        verify_host_share: of the host's memory that a launch may use, as in a search.
        verify_least_seconds: a launch with less time than this is not started.
    """

    retry_within_steps: int = 1000
    most_deaths: int = 3
    least_new_steps: int = 100
    most_starts: int = 12
    kill_after_seconds: float = 5.0
    echo_seconds: float = 1.0

    log_steps: int = 10
    show_seconds: float = 10.0
    report_seconds: float = 0.25
    pace_smoothing: float = 0.1
    stop_seconds: float = 0.2
    thrashing_checks: int = 3
    last_checkpoint_share: float = 1.5
    last_steps: float = 2.0
    last_seconds: float = 0.2
    epoch_checkpoints: int = 20
    epoch_checkpoint_share: float = 0.05
    best_checkpoints: int = 2
    spaced_checkpoints: int = 6

    script_loss_steps: int = 10
    script_first_steps: int = 50
    script_young_seconds: float = 60.0
    script_young_progress_seconds: float = 1.0
    script_progress_seconds: float = 5.0
    script_first_lines_seconds: float = 15.0
    script_lines_seconds: float = 60.0

    verify_share: float = 0.25
    verify_seconds: float = 180.0
    verify_pairs: int = 4
    verify_least_pairs: int = 3
    verify_measure_seconds: float = 2.0
    verify_warmup_share: float = 2.0
    verify_largest_loss: float = 0.03
    verify_confidence: float = 0.90
    verify_device_share: float = 0.95
    verify_host_share: float = 0.92
    verify_least_seconds: float = 0.5


TRAIN_POLICY = TrainPolicy()
"""What every training runs with."""
