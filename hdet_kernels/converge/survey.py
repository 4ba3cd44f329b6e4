"""Survey the tensors of a model: facts that an average needs, and that hold until a tensor is replaced.

There may be very many tensors, and between two syncs their values change, hardly ever their place. So labels, ties,
kinds and the hash that processes compare are found again only when a tensor was replaced or has another layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hdet_kernels.converge.labels import Names, labels_of, with_ties
from hdet_kernels.sharded import is_distributed
from hdet_kernels.tensors import distinct, layout_hash, local


@dataclass(frozen=True)
class Survey:
    """The tensors of a model by kind, and their names and layouts. Each memory is in one kind only.

    Attributes:
        params: parameters that have elements.
        buffers: floating-point buffers.
        masks: floating-point buffers that were not finite at the start.
        integers: integer buffers.
        tensors: all of them, of all kinds, as the model has them.
        labels: kind and name, or number, for each of these.
        noted: the same, with the ties between them.
        layout: a hash of labels, ties and layouts.
        excused: the labels of the masks.
        distributed: the parameters that are distributed tensors.
    """

    params: list[Tensor]
    buffers: list[Tensor]
    masks: list[Tensor]
    integers: list[Tensor]
    tensors: list[Tensor]
    labels: list[str]
    noted: list[str]
    layout: int
    excused: frozenset[str]
    distributed: list[Tensor]


def take_survey(kinds: Mapping[str, Sequence[Tensor]], masks: Iterable[Tensor], names: Names) -> Survey:
    """Look at all tensors.

    Args:
        kinds: the tensors by kind, among them ``"parameter"`` and ``"buffer"``.
        masks: the buffers that were not finite at the start.
        names: see :func:`.labels.labels_of`.

    Raises:
        ValueError: if two tensors share a part of their memory.
    """
    # A buffer may be a view of a parameter, and two buffers may share their memory.
    pairs = [(tensor, local(tensor)) for kind in ("parameter", "buffer") for tensor in kinds[kind]]
    given = {id(part): tensor for tensor, part in pairs}
    parts = [part for part in distinct(part for _, part in pairs) if part.numel()]
    own = {local(param).data_ptr() for param in kinds["parameter"]}
    constant = {local(mask).data_ptr() for mask in masks} - own
    covered = [local(tensor) for tensors in kinds.values() for tensor in tensors]
    labels = labels_of(kinds, names())
    noted = with_ties(labels, covered)

    def those(wanted: Callable[[Tensor], bool]) -> list[Tensor]:
        return [given[id(part)] for part in parts if wanted(part)]

    def is_other(part: Tensor) -> bool:
        return part.data_ptr() not in own and part.data_ptr() not in constant

    def has_mean(part: Tensor) -> bool:
        return part.is_floating_point() or part.is_complex()

    return Survey(
        params=those(lambda part: part.data_ptr() in own),
        buffers=those(lambda part: is_other(part) and has_mean(part)),
        masks=those(lambda part: part.data_ptr() in constant),
        integers=those(lambda part: is_other(part) and not has_mean(part)),
        tensors=[tensor for tensors in kinds.values() for tensor in tensors],
        labels=labels,
        noted=noted,
        layout=layout_hash(covered, noted),
        excused=frozenset(label for label, t in zip(labels, covered, strict=True) if t.data_ptr() in constant),
        distributed=[param for param in kinds["parameter"] if is_distributed(param)],
    )
