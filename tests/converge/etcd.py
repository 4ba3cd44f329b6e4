"""torchelastic's ``EtcdStore``, with a client that keeps the keys in memory instead of asking a server of etcd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore


class Client:
    """The requests of a client of etcd that ``EtcdStore`` makes to set, get and check keys."""

    def __init__(self) -> None:
        self._nodes: dict[str, SimpleNamespace] = {}

    def set(self, key: str, value: str) -> None:
        self._nodes[key] = SimpleNamespace(key=key, value=value)

    def get(self, key: str) -> SimpleNamespace:
        """Return the nodes below a folder."""
        children = [node for path, node in list(self._nodes.items()) if path.startswith(key)]
        return SimpleNamespace(children=children, etcd_index=len(children))

    def watch(self, **_: Any) -> None:
        """Return at once, as if something had changed: the store looks again until its time is over."""


def etcd_store() -> dist.Store:
    """Return a new store, which threads may share."""
    store: dist.Store = EtcdStore(Client(), "/torch/elastic/p2p")
    return store
