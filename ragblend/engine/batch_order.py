"""Many prompts at once, in the order in which shared chunks are loaded once and stay.

Chunk KV that the memory tier has no room for is read again whenever it comes again. So of the prompts that are left the
next one is always that which asks for the fewest bytes beyond what is in memory by then: prompts that share chunks come
one behind the other. Knows keys and sizes; nothing of models, engines or stores.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np


def order_by_shared_chunks(
    prompts: Sequence[Sequence[str]], nbytes: Mapping[str, int], capacity_bytes: int
) -> list[int]:
    """The places of `prompts`, each given by the keys of its chunks, in the order in which little is loaded.

    nbytes: by key; one that is not there costs nothing, wherever it comes. capacity_bytes: of the tier that they are
    loaded into, which forgets what was used longest ago. Equal prompts stay in their order. Takes time and memory of
    the uses of all chunks and the square of the prompts: a second for a few thousand.

    >>> grouped([["a", "b"], ["c", "d"], ["b", "a"]], {"a": 1, "b": 1, "c": 1, "d": 1}, 2)
    [0, 2, 1]
    """
    users: defaultdict[str, list[int]] = defaultdict(list)
    missing = np.zeros(len(prompts), np.int64)  # bytes that a prompt would have to load now
    for place, keys in enumerate(prompts):
        for key in set(keys):
            users[key].append(place)
            missing[place] += nbytes.get(key, 0)
    held: OrderedDict[str, int] = OrderedDict()  # least recently used first
    used_bytes, order = 0, list[int]()
    is_done = np.iinfo(np.int64).max
    for _ in prompts:
        place = int(missing.argmin())
        order.append(place)
        for key in prompts[place]:
            if key not in held and 0 < nbytes.get(key, 0) <= capacity_bytes:
                held[key] = nbytes[key]
                used_bytes += nbytes[key]
                _add(missing, users[key], -nbytes[key], is_done)
            if key in held:
                held.move_to_end(key)
            while used_bytes > capacity_bytes:
                gone, size = held.popitem(last=False)
                used_bytes -= size
                _add(missing, users[gone], size, is_done)
        missing[place] = is_done
    return order


def _add(missing: np.ndarray, places: Sequence[int], nbytes: int, is_done: int) -> None:
    for place in places:
        if missing[place] != is_done:
            missing[place] += nbytes
