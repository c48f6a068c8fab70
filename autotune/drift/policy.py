"""What a loss check decides by: how its time is shared, how much is trained, how long a trial of it may hang."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossCheckPolicy:
    """The thresholds of the loss checks of one search; all of them are judgement.

    What is the same training (the limits of `drift.compare`) is no policy: it is not to be set.

    Attributes:
        most_finalists: configs that are shown to learn the same at one time.
        most_tested: candidates looked at for these, those with a culprit left out among them.
        candidates: that a look at gradients is planned for.
        early_candidates: the same while the search explores.
        early_share: of the budget, for one seed of what gradients leave open, while the search explores.
        screen_share: of the time that is left, for looks at gradients; trainings have the rest where it will do.
        spare_share: of what is left of the budget, for a training of what was seen to sum in another order alone.
        closer_share: of what is left of it, for a closer look at one candidate.
        early_closer_share: of the budget, for the same at fewer digits while the search explores.
        worth_a_closer_look: times the speed of your own settings that what they are part of ran at.
        least_seconds: with less time nothing is started.

        seeds: of each arm's trainings.
        most_seeds: of these, where there is time.
        least_steps: optimizer steps of each seed.
        good_steps: fewer are run only when there is no time for more.
        most_steps: more would go apart by chance.
        usable_share: of the time for trainings, that is planned with.
        start_seconds: that an arm of a workload spends before its first seed and between them.
        process_seconds: that a process costs beside its start-up: a view of the working folder, the end, the sweep.

        trace_batches: that a workload's data trace reads: the first ones and the ends of an epoch.
        least_trace_steps, most_trace_steps: optimizer steps of a script's data trace.
        trace_seconds: that these may take.
        patience: times the seconds that a trial is expected to take, until it counts as hanging.
        patience_seconds: on top of these.
    """

    most_finalists: int = 1
    most_tested: int = 6
    candidates: int = 4
    early_candidates: int = 1
    early_share: float = 0.06
    screen_share: float = 0.7
    spare_share: float = 0.1
    closer_share: float = 0.3
    early_closer_share: float = 0.3
    worth_a_closer_look: float = 1.3
    least_seconds: float = 2.0

    seeds: int = 4
    most_seeds: int = 8
    least_steps: int = 8
    good_steps: int = 60
    most_steps: int = 300
    usable_share: float = 0.85
    start_seconds: float = 1.0
    process_seconds: float = 1.0

    trace_batches: int = 70
    least_trace_steps: int = 4
    most_trace_steps: int = 24
    trace_seconds: float = 30.0
    patience: float = 4.0
    patience_seconds: float = 20.0


USUAL_LOSS_CHECK = LossCheckPolicy()
