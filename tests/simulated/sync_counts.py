"""How often threads waited for a device, simulated or real."""

from __future__ import annotations

import threading
from collections.abc import Mapping


def of_training(syncs: Mapping[tuple[int, str], int]) -> dict[str, int]:
    """The waits of threads that do not belong to the engine, by kind.

    ``syncs`` has them by the native number of the thread and the kind.
    """
    own = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("ssdtrain")}
    found: dict[str, int] = {}
    for (thread, kind), count in syncs.items():
        if thread not in own:
            found[kind] = found.get(kind, 0) + count
    return found
