"""Models of the tasks, small enough that a run takes seconds on a GPU; ``transformers.py`` has the transformers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.quality.transformers import Block

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(4, channels),
    "none": lambda channels: nn.Identity(),
}


class ImageModel(nn.Module):
    """Images [batch, 1, 28, 28] → logits of ten classes: three convolutions, norms or none, and a linear layer."""

    def __init__(self, width: int = 16, norm: str = "group") -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for channels in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(before, channels, 3, stride=2, padding=1), NORMS[norm](channels), nn.ReLU()]
            before = channels
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).flatten(1))
        return logits


class PixelModel(nn.Module):
    """Images [batch, 1, 28, 28] → logits of ten classes: an MLP of the pixels."""

    def __init__(self, *hidden: int, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise((28 * 28, *hidden, 10)):
            layers += [nn.Linear(before, after), activation()]
        self.network = nn.Sequential(*layers[:-1])

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images.flatten(1))
        return logits


class DigitsModel(nn.Module):
    """Pixels [batch, 64] → logits of ten classes; ``dropout`` is a probability, a tensor where it is explored."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, pixels: Tensor, dropout: Tensor | float = 0.0) -> Tensor:
        hidden = F.relu(self.first(pixels))
        if not isinstance(dropout, float) or dropout > 0:
            keep = (torch.rand_like(hidden) >= dropout) / (1 - dropout)
            hidden = hidden * keep
        logits: Tensor = self.head(F.relu(self.second(hidden)))
        return logits


class Autoencoder(nn.Module):
    """Autoencoder of images [batch, 1, 28, 28] with a code of sixteen numbers."""

    def __init__(self, widths: tuple[int, ...] = (784, 256, 64, 16, 64, 256, 784)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.SiLU()]
        self.network = nn.Sequential(*layers[:-1])

    def forward(self, images: Tensor) -> Tensor:
        shown: Tensor = self.network(images.flatten(1))
        return shown.view_as(images)


class ConvolutionalAutoencoder(nn.Module):
    """Autoencoder of images [batch, 1, 28, 28] by convolutions, with a code of ``code`` numbers."""

    def __init__(self, width: int = 16, code: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GELU(),
            nn.Flatten(),
            nn.Linear(2 * width * 49, code),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(code, 2 * width * 49), nn.GELU(),
            nn.Unflatten(1, (2 * width, 7, 7)),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.GELU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        shown: Tensor = self.decoder(self.encoder(images))
        return shown


class ByteConvolutions(nn.Module):
    """Bytes [batch, length] → logits of the next byte [batch, length, 256]: causal, ever more dilated convolutions."""

    def __init__(self, width: int = 96, layers: int = 5) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**layer) for layer in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text).transpose(1, 2)
        for layer, convolution in enumerate(self.convolutions):
            x = x + F.relu(convolution(F.pad(x, (2**layer, 0))))
        logits: Tensor = self.head(x.transpose(1, 2))
        return logits


class ByteWindow(nn.Module):
    """The last bytes [batch, length] → logits of the next byte [batch, 256]: embeddings and an MLP."""

    def __init__(self, context: int, width: int = 32, hidden: int = 256) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.network = nn.Sequential(
            nn.Linear(context * width, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 256),
        )  # fmt: skip

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.network(self.bytes(text).flatten(1))
        return logits


class WordWindow(nn.Module):
    """The last words [batch, length] → logits of the next word [batch, words]: embeddings and one hidden layer."""

    def __init__(self, words: int, context: int, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=0.5)
        self.hidden = nn.Linear(context * width, hidden)
        self.head = nn.Linear(hidden, words)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.hidden(self.words(text).flatten(1))))
        return logits


class GatedBytes(nn.Module):
    """Bytes [batch, length] → logits of the next byte [batch, length, 256] by a gated recurrent unit.

    For every byte x and the state h before it: update z and reset r are sigmoids of W·x + U·h, the candidate n is
    tanh(W·x + r · (U·h)), and the next state is (1 − z) · n + z · h.
    """

    def __init__(self, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.from_input = nn.Linear(width, 3 * hidden)
        self.from_state = nn.Linear(hidden, 3 * hidden)
        self.head = nn.Linear(hidden, 256)

    def forward(self, text: Tensor) -> Tensor:
        inputs = self.from_input(self.bytes(text))
        hidden = self.from_state.in_features
        state = inputs.new_zeros(len(text), hidden)
        states = []
        for x in inputs.unbind(1):
            h = self.from_state(state)
            update, reset = torch.sigmoid(x[:, : 2 * hidden] + h[:, : 2 * hidden]).chunk(2, 1)
            candidate = torch.tanh(x[:, 2 * hidden :] + reset * h[:, 2 * hidden :])
            state = torch.lerp(candidate, state, update)
            states.append(state)
        logits: Tensor = self.head(torch.stack(states, 1))
        return logits


class MemoryWords(nn.Module):
    """Words [batch, length] → logits of the next word [batch, length, words] by a long short-term memory.

    For every word x and the state h before it: input i, forget f and output o are sigmoids and the candidate g is the
    tanh of W·x + U·h; the memory becomes f · c + i · g, and the state o · tanh(c).
    """

    def __init__(self, words: int, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=0.1)
        self.from_input = nn.Linear(width, 4 * hidden)
        self.from_state = nn.Linear(hidden, 4 * hidden, bias=False)
        self.head = nn.Linear(hidden, words)

    def forward(self, text: Tensor) -> Tensor:
        inputs = self.from_input(self.words(text))
        hidden = self.from_state.in_features
        state = memory = inputs.new_zeros(len(text), hidden)
        states = []
        for x in inputs.unbind(1):
            gates = x + self.from_state(state)
            take, forget, give = torch.sigmoid(gates[:, : 3 * hidden]).chunk(3, 1)
            memory = forget * memory + take * torch.tanh(gates[:, 3 * hidden :])
            state = give * torch.tanh(memory)
            states.append(state)
        logits: Tensor = self.head(torch.stack(states, 1))
        return logits


class RatingsModel(nn.Module):
    """A DLRM with one attention block over its fields: categories [batch, fields] and dense features [batch, dense] →
    logits [batch, 7]: liked, loved, and five classes of stars.

    Every category has an embedding, the dense features a small network; the products of all pairs of the resulting
    vectors go, with the dense vector, into the network of the heads.
    """

    def __init__(self, sizes: list[int], dense: int, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.05)  # type: ignore[arg-type]
        self.bottom = nn.Sequential(nn.Linear(dense, 64), nn.ReLU(), nn.Linear(64, width))
        self.block = Block(width, 2, causal=False)
        fields = len(sizes) + 1
        self.register_buffer("pairs", torch.triu_indices(fields, fields, 1), persistent=False)
        self.top = nn.Sequential(
            nn.Linear(width + fields * (fields - 1) // 2, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()
        )
        self.heads = nn.ModuleList((nn.Linear(64, 1), nn.Linear(64, 1), nn.Linear(64, 5)))

    def forward(self, categories: Tensor, dense: Tensor) -> Tensor:
        from_dense = self.bottom(dense)
        vectors = torch.stack([*(table(categories[:, i]) for i, table in enumerate(self.tables)), from_dense], 1)
        vectors = self.block(vectors)
        first, second = self.pairs  # type: ignore[misc]
        products = (vectors[:, first] * vectors[:, second]).sum(-1)
        hidden = self.top(torch.cat([from_dense, products], 1))
        return torch.cat([head(hidden) for head in self.heads], 1)


class FlightsModel(nn.Module):
    """Categories [batch, fields] and numbers [batch, numbers] → [batch]: embeddings and a tanh network."""

    def __init__(self, sizes: list[int], numbers: int, width: int = 16, hidden: int = 128) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.network = nn.Sequential(
            nn.Linear(width * len(sizes) + numbers, hidden), nn.Tanh(),
            nn.Linear(hidden, hidden), nn.Tanh(),
            nn.Linear(hidden, 1),
        )  # fmt: skip

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        embedded = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        values: Tensor = self.network(torch.cat([*embedded, numbers], 1))
        return values[:, 0]


class TableMLP(nn.Module):
    """Categories [batch, fields] of one joint table and numbers [batch, numbers] → [batch]: embeddings and an MLP."""

    def __init__(
        self, count: int, fields: int, numbers: int, width: int = 8, hidden: tuple[int, ...] = (128, 64)
    ) -> None:
        super().__init__()
        self.tables = nn.Embedding(count, width)
        nn.init.normal_(self.tables.weight, std=0.1)
        layers: list[nn.Module] = []
        for before, after in pairwise((fields * width + numbers, *hidden)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(hidden[-1], 1))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        values: Tensor = self.network(torch.cat([self.tables(categories).flatten(1), numbers], 1))
        return values[:, 0]


class WideModel(nn.Module):
    """Categories [batch, fields] of one joint table and numbers [batch, numbers] → [batch]: one weight for each."""

    def __init__(self, count: int, numbers: int) -> None:
        super().__init__()
        self.tables = nn.Embedding(count, 1)
        nn.init.zeros_(self.tables.weight)
        self.linear = nn.Linear(numbers, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        values: Tensor = self.tables(categories).sum(1) + self.linear(numbers)
        return values[:, 0]


class ResidualModel(nn.Module):
    """Categories [batch, fields] and numbers [batch, numbers] → [batch]: embeddings and pre-norm residual layers."""

    def __init__(self, count: int, fields: int, numbers: int, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.tables = nn.Embedding(count, 8)
        self.into = nn.Linear(8 * fields + numbers, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        x = self.into(torch.cat([self.tables(categories).flatten(1), numbers], 1))
        for layer in self.layers:
            x = x + layer(x)
        values: Tensor = self.head(self.norm(x))
        return values[:, 0]


class TinyMLP(nn.Module):
    """Numbers [batch, numbers] → [batch]: two layers of sixteen."""

    def __init__(self, numbers: int, width: int = 16) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(numbers, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, numbers: Tensor) -> Tensor:
        values: Tensor = self.network(numbers)
        return values[:, 0]


class Towers(nn.Module):
    """Users [batch, fields] and films [batch, list] with genres [batch, list, genres] → scores [batch, list].

    The tower of the users and the tower of the films end in one vector each; the score is their product.
    """

    def __init__(self, users: int, fields: int, films: int, genres: int, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList((nn.Embedding(users, width), nn.Embedding(films, width)))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)  # type: ignore[arg-type]
        self.user = nn.Sequential(nn.Linear(fields * width, 64), nn.ReLU(), nn.Linear(64, width))
        self.film = nn.Sequential(nn.Linear(width + genres, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, users: Tensor, films: Tensor, genres: Tensor) -> Tensor:
        user = self.user(self.tables[0](users).flatten(1))
        film = self.film(torch.cat([self.tables[1](films), genres], 2))
        scores: Tensor = (film * user[:, None]).sum(2)
        return scores


class Factors(nn.Module):
    """Users [batch] and films [batch] → [batch]: the product of two vectors and a bias of each."""

    def __init__(self, users: int, films: int, width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList((nn.Embedding(users, width + 1), nn.Embedding(films, width + 1)))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)  # type: ignore[arg-type]

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        user, film = self.tables[0](users), self.tables[1](films)
        values: Tensor = (user[:, 1:] * film[:, 1:]).sum(1) + user[:, 0] + film[:, 0]
        return values


class DocumentModel(nn.Module):
    """Features [batch, list, features] → scores [batch, list]: an MLP for every document."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(features, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.network(features)
        return scores[:, :, 0]


class Recurrence(nn.Module):
    """Series [batch, length, measurements] → [batch, outputs]: a recurrent cell without gates, written out.

    Two hours x make one step from the state h to tanh(W·x + U·h), so that 24 hours are twelve steps.
    U starts orthogonal.
    """

    def __init__(self, measurements: int, outputs: int, width: int = 64) -> None:
        super().__init__()
        self.into = nn.Linear(2 * measurements, width)
        self.again = nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.again.weight)
        self.head = nn.Linear(width, outputs)

    def forward(self, series: Tensor) -> Tensor:
        batch, length, measurements = series.shape
        inputs = self.into(series.reshape(batch, length // 2, 2 * measurements))
        state = torch.zeros_like(inputs[:, 0])
        for x in inputs.unbind(1):
            state = torch.tanh(x + self.again(state))
        values: Tensor = self.head(state)
        return values


class TemporalConvolution(nn.Module):
    """Series [batch, length, measurements] → [batch, outputs]: three convolutions over time with growing dilation.

    The features of the last four hours go into the head.
    """

    def __init__(self, measurements: int, outputs: int, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = measurements
        for dilation in (1, 2, 4):
            layers += [nn.Conv1d(before, width, 3, padding=dilation, dilation=dilation), nn.ReLU()]
            before = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width, outputs)

    def forward(self, series: Tensor) -> Tensor:
        values: Tensor = self.head(self.features(series.transpose(1, 2))[:, :, -4:].flatten(1))
        return values
