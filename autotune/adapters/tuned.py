"""What a callback is made of in every library: an answer, its settings, and the pace that it promises."""

from __future__ import annotations

from pathlib import Path

from autotune.adapters.live import LiveSettings, load_profile
from autotune.adapters.pace import PaceGuard, find_promised_rate
from autotune.records.profile import Profile


class Tuned:
    """A training with the settings of an answer.

    Attributes:
        pace: samples a second so far, and what was promised.
    """

    def __init__(self, profile: Profile | str | Path = "best.json") -> None:
        """Prepare to train with an answer.

        Args:
            profile: the answer, or its file.

        Raises:
            ProfileError: the file is no answer.
        """
        self._profile = load_profile(profile)
        self._live = LiveSettings(self._profile)
        self.pace = PaceGuard(find_promised_rate(self._profile))
