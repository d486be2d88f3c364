"""Learning rate schedules that several tasks share."""

import optax


def with_warm_up(schedule: optax.Schedule, highest: float, steps: int) -> optax.Schedule:
    """Returns a learning rate that rises linearly before a schedule begins; its first step is not 0.

    Args:
      schedule: the schedule that follows, from 0 on; it begins at `highest`.
      highest: the learning rate at the end of the rise.
      steps: number of steps of the rise; 0 returns the schedule.

    Example:
      >>> rate = with_warm_up(optax.constant_schedule(1.0), 1.0, 3)
      >>> [float(rate(step)) for step in range(5)]
      [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if not steps:
        return schedule
    return optax.join_schedules([optax.linear_schedule(highest / (steps + 1), highest, steps), schedule], [steps])
