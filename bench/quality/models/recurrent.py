"""Recurrent models of text, with their cells written out as a loop over time."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
