"""A store of torch.distributed that counts the requests."""

from __future__ import annotations

from collections import Counter
from typing import Any


class CountedStore:
    """Hands every call on to a store.

    Args:
        store: a store.
        requests: counts them, by the name of the method.
    """

    def __init__(self, store: Any, requests: Counter[str]) -> None:
        self._store, self._requests = store, requests

    def has_extended_api(self) -> bool:  # which the store is not asked for
        return bool(self._store.has_extended_api())

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def request(*args: Any) -> Any:
            self._requests[name] += 1
            return method(*args)

        return request
