"""What learning rates of several tasks have in common."""

import optax


def with_warm_up(schedule: optax.Schedule, highest: float, steps: int) -> optax.Schedule:
    """Returns a learning rate that rises linearly before a schedule begins; its first step is not 0.

    Args:
      schedule: what follows, from 0 on; it begins at `highest`.
      highest: the learning rate that the rise leads to.
      steps: how many steps it takes; with 0 it is the schedule.

    Example:
      >>> rate = with_warm_up(optax.constant_schedule(1.0), 1.0, 3)
      >>> [float(rate(step)) for step in range(5)]
      [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if not steps:
        return schedule
    return optax.join_schedules([optax.linear_schedule(highest / (steps + 1), highest, steps), schedule], [steps])
