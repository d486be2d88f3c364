"""Shares that the watches of a train step found, over many steps."""

from collections.abc import Mapping


class ShareTotals:
    """The sums of shares over the steps that were taken, of which each group has its mean.

    Example:
      >>> totals = ShareTotals()
      >>> totals.add({"underflow": {"Dense_0": 0.5}}, taken=True)
      >>> totals.add({"underflow": {"Dense_0": 1.0}}, taken=True)
      >>> totals.add({"underflow": {"Dense_0": 1.0}}, taken=False)
      >>> totals.means()
      {'underflow': {'Dense_0': 0.75}}
    """

    def __init__(self) -> None:
        self._steps = 0
        self._totals: dict[str, dict[str, float]] = {}

    def add(self, shares: Mapping[str, Mapping[str, float]], taken: bool) -> None:
        """Adds a step's shares if it was taken.

        Args:
          shares: `{watch: {group: share}}`.
          taken: whether it was; else it was skipped.
        """
        self._steps += taken
        for watch, groups in shares.items():
            totals = self._totals.setdefault(watch, {})
            for group, share in groups.items():
                totals[group] = totals.get(group, 0.0) + share * taken

    def means(self) -> dict[str, dict[str, float]]:
        """Returns the mean share of each group under each watch; 0 if no step was taken."""
        steps = max(self._steps, 1)
        return {
            watch: {group: total / steps for group, total in groups.items()} for watch, groups in self._totals.items()
        }
