"""The user's prices, for the least cost of a step."""

from collections.abc import Mapping, Sequence

from jmp_train.aot import TPU, Device


def checked_prices(price: Mapping[str, float] | None, kinds: Sequence[Device]) -> dict[str, float]:
    """Returns the prices of an hour, by the name of a GPU or of a generation of TPUs.

    Args:
      price: see `plan`.
      kinds: the planned devices.

    Raises:
      TypeError: `price` is not a mapping.
      ValueError: a name is not a planned device, or a price is not above 0.
    """
    if not isinstance(price, Mapping | None):
        raise TypeError(f"price={price!r} must be a dict, such as {{'v5e': 1.2}}")
    names = {_name(kind) for kind in kinds}
    for name, value in (price or {}).items():
        if name not in names:
            raise ValueError(f"price has {name!r}, which is not planned for; the names are {', '.join(sorted(names))}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"price[{name!r}]={value!r} must be a number above 0, for an hour")
    return dict(price or {})


def price_of(kind: Device, devices: int, prices: Mapping[str, float]) -> float | None:
    """Returns the price of an hour of all devices, or None if it is unknown.

    Args:
      kind: the GPU, or the slice of TPUs, whose price is that of a chip.
      devices: number of devices.
      prices: from `checked_prices`.
    """
    if _name(kind) not in prices:
        return None
    units = devices // kind.devices_per_chip if isinstance(kind, TPU) else devices
    return units * prices[_name(kind)]


def _name(kind: Device) -> str:
    return kind.name.partition(":")[0] if isinstance(kind, TPU) else kind.name
