"""The numbers that components and plugins put into `session.metrics`, and their way into TRL's log."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any

from ...errors import PluginError

if TYPE_CHECKING:
    from ...plugins.host import Host
    from ...session import Session


class SessionMetrics:
    """The numbers that components and plugins have put into `session.metrics`, each logged once.

    Args:
        session: the live objects of the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.begin()

    def begin(self) -> None:
        """Keep the present `session.metrics`, the metrics of the trainer's last rollout, for `log`. A later rollout of
        a script or a callback has another dict as `session.metrics`, which is not logged."""
        self._logged: dict[str, Any] = {}
        self._to_log = self._session.metrics

    def log(self, metrics: MutableMapping[str, list[float]]) -> None:
        """Add to TRL's metrics the numbers that were put into the last rollout's metrics since the last call.

        Components may put numbers there after the rollout: a scoring, or an algorithm that adds to the loss.

        Args:
            metrics: TRL's metrics of training or of evaluation, by name.

        Raises:
            PluginError: a value is not a number.
        """
        for name, value in self._to_log.items():
            if self._logged.get(name) is not value:
                self._logged[name] = value
                values = value if isinstance(value, list) else [value]
                _refuse_other_than_numbers(name, values, self._session.host)
                if values:  # TRL cannot take the mean of nothing
                    metrics[name] += values


def _refuse_other_than_numbers(name: str, values: Sequence[object], host: Host) -> None:
    """Raise a PluginError if a metric of a plugin is not a number: TRL would fail on its mean without naming a plugin.

    Args:
        name: name of the metric.
        values: its values.
    """
    for value in values:
        if not isinstance(value, Number) and getattr(value, "shape", None) != ():
            plugins = ", ".join(str(plugin) for plugin in host.plugins)
            raise PluginError(
                f"session.metrics[{name!r}] is {value!r:.80}, and a metric is a number, or a list of them. A plugin "
                f"has set it: one of {plugins}."
            )
