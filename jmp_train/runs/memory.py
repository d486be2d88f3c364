"""Peak memory: of the device if it is counted, otherwise of the process."""

import sys

import jax


def peak_memory() -> tuple[float, str]:
    """Returns the peak memory in MB (10**6 bytes) so far, and "device" or "process".

    CPUs report no device memory; there, the largest resident size of the process counts, data and
    compiler included. With several devices, the largest peak counts.

    Example:
      >>> megabytes, whose = peak_memory()
      >>> megabytes > 0
      True
    """
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(device.get("peak_bytes_in_use", 0) for device in statistics)
    if peak:
        return peak / 1e6, "device"
    return _peak_resident_bytes() / 1e6, "process"


def _peak_resident_bytes() -> int:
    import resource  # not available on Windows, where jax has no GPU anyway

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
