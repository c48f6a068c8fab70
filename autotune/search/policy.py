"""What a search decides by: how it shares its time, how long it waits, what it takes for a gain worth following."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from autotune.drift.policy import USUAL_LOSS_CHECK, LossCheckPolicy
from autotune.records.objective import LEAST_SPEED, MOST_MEMORY, Objective


@dataclass(frozen=True)
class SearchPolicy:
    """The thresholds of one search; judgement where no source is named.

    What a claim needs (`finals.finalist`) and how noise is modelled (`scores.baseline_level`) are no policy: they are
    not to be set.

    Attributes:
        probe_share: of the budget, the most that a probe may take; a healthy one takes far less.
        probe_warmup_seconds: longest warm-up of the probe.

        least_gain: of the objective, as a logarithm: speed-up, or memory saved; a candidate that did not even gain this
            much in the search is not taken any further.
        least_speed: log speed-up; what is slower is not taken any further, whatever else it gains.
        least_change_gain: that each change has to be worth, likewise: of two configs that differ by less, the simpler
            one leads.
        least_trial_seconds: that any trial of the exploring stage is given.
        patience: times the seconds that a trial is expected to take, until it is killed.
        most_compile_patience: of the budget; for a trial that compiles, however long that is expected to take.
        dear_compile_share: of the budget; what takes more to compile is weighed against the best that does not.
        most_proof_share: of the budget; what takes more to be shown to learn the same is weighed likewise, and is not
            looked at before its turn to be proven.
        first_proof_factor: times that such a loss check is priced until something is proven, where it takes much of
            what is left as well.
        fitting_proof_share: of what is left; a loss check that takes no more is at its own price.
        own_share: of the budget; the values of the user's own knobs that are tried alone first take no more.
        least_explored: launches before the first proof, while there is time to come back from it.
        bound_reached: share of the probe's bound from which nothing that matters is left to find.
        bound_refuted: share of the same from which the bound is itself refuted.

        anchor_seconds: after which the baseline is launched again.
        least_between_anchors: launches between two of the baseline where the canary asks for the second.
        canary_change: log ratio of the canary's times that says that the machine has changed.
        top_k: configs of which whichever has the fewest launches is launched again.
        most_repeats: launches of one of these, after which it has none any more.
        last_repeats: the same once there is nothing new to try, of those the noise cannot tell from the fastest.
        least_before_repeats: launches of other settings than the user's own before the first of them.
        repeat_every: one launch of so many goes to them.
        repeat_contender_after: launches of something new, after which what looks best is launched a second time.
        racing_confidence: one-sided; a config equal to the incumbent is called clearly slower for its launch's luck
            less often than this.
        least_racing_degrees: degrees of freedom of the launch noise, the guess included, from which its margin counts.
        unseen_margin: log ratio; until then only what is hopeless is ended early.

        most_leaders: looked at for one that there is still time to prove.
        worth_another: gain that a config has to be ahead of the proven winner by: finals cost time, and a share of the
            risk.
        sure_launches: of the baseline; fewer do not tell a slow one from a machine that has become faster.

        most_reserve_share: of the budget, kept back for the proof of one leader.
        hopeless_reserve: times this share; a leader whose proof asks for more is not kept time for.
        short_check_share: of the budget, the most that is kept for a loss check while nothing leads.
        check_share: of the budget, what a loss check may take where its rounds leave that.
        generous_check: times the least that a loss check needs, which it may take likewise.
        least_check: times the same, what it may take in any case: one that is given more only trains for longer.
        least_check_seconds: that it may take in any case.
        look_share: of the budget, what looks at leaders' gradients may take in all while the search explores, unless
            one needs more.
        spare_rounds: times the rounds that the gain asks for: the search's reading flatters the best of many.
        spare_budget: times the least budget, what is told where the one given is too small.

        most_pilot_degrees: degrees of freedom that the search's launches may lend to the finals.
        pilot_share: of the degrees that the search has seen: its launches are not quite those of the finals.
        noise_in_turns: of a pair that is timed in turns, as a share of two launches in a row (seen: 0.1 to 0.5).
        least_in_turns: launches beside the baseline that a budget has room for, where the search explores so.
        loud_noise: of a launch alone; where it is more, so many fewer launches beside the baseline are enough.
        quiet_noise: of a launch alone; where it is no more, none is timed in turns while the search explores.
        least_noise_degrees: of freedom, from which on that is known.
        second_look: times the pairs planned, both looks together: three times as many prove 0.6 of the gain.
        least_second_look: of the rounds planned; fewer are no second look, they are run at once.
        spare_time: times the rounds that fit by their price, planned where so many are needed: launches are priced at
            what they take at most.
        claimed_share: of the log gain of what is proven, to be claimed by more pairs where the time allows it.
        more_pairs_share: of the budget, the most that is kept for these while the search goes on exploring.
        finals_patience: times the seconds that a launch of the finals is expected to take, until it is killed.
        finals_patience_seconds: on top of these.

        loss_check: of the loss checks.
    """

    probe_share: float = 0.50
    probe_warmup_seconds: float = 30.0

    least_gain: float = math.log(1.005)
    least_speed: float = math.log(1.005)
    least_change_gain: float = 0.01
    least_trial_seconds: float = 10.0
    patience: float = 3.0
    most_compile_patience: float = 0.25
    dear_compile_share: float = 0.2
    most_proof_share: float = 0.1
    first_proof_factor: float = 8.0
    fitting_proof_share: float = 0.4
    own_share: float = 0.2
    least_explored: int = 16
    bound_reached: float = 0.95
    bound_refuted: float = 1.10

    anchor_seconds: float = 120.0
    least_between_anchors: int = 3
    canary_change: float = math.log(1.15)
    top_k: int = 5
    most_repeats: int = 4
    last_repeats: int = 12
    least_before_repeats: int = 5
    repeat_every: int = 4
    repeat_contender_after: int = 2
    racing_confidence: float = 0.997
    least_racing_degrees: float = 5.0
    unseen_margin: float = math.log(3.0)

    most_leaders: int = 6
    worth_another: float = math.log(1.02)
    sure_launches: int = 3

    most_reserve_share: float = 0.5
    hopeless_reserve: float = 4.0
    short_check_share: float = 0.15
    check_share: float = 0.15
    generous_check: float = 2.0
    least_check: float = 1.4
    least_check_seconds: float = 3.0
    look_share: float = 0.2
    spare_rounds: float = 1.3
    spare_budget: float = 1.1

    most_pilot_degrees: float = 6.0
    pilot_share: float = 0.5
    noise_in_turns: float = 0.5
    least_in_turns: float = 30.0
    loud_noise: float = 0.05
    quiet_noise: float = 0.02
    least_noise_degrees: float = 6.0
    second_look: float = 3.0
    least_second_look: float = 1.0
    spare_time: float = 1.5
    claimed_share: float = 0.8
    more_pairs_share: float = 0.2
    finals_patience: float = 4.0
    finals_patience_seconds: float = 10.0

    loss_check: LossCheckPolicy = USUAL_LOSS_CHECK

    def fit_to(self, objective: Objective) -> SearchPolicy:
        """Return the thresholds of a search with an objective: these are of one for speed."""
        if objective is not Objective.MEMORY:
            return self
        return dataclasses.replace(self, least_gain=-math.log(MOST_MEMORY), least_speed=math.log(LEAST_SPEED))


USUAL_POLICY = SearchPolicy()
