"""Muon (Jordan et al. 2024) for the matrices: momentum whose update is made orthogonal by five Newton-Schulz steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon:
    """Steps matrices of one shape together; the learning rate is for an update of spectral norm about one."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.02):
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in matrices:
            self.groups.setdefault(tuple(matrix.shape), []).append(matrix)
        self.buffers = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply the gradients with learning rate `scale * lr`."""
        for shape, group in self.groups.items():
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            buffer = self.buffers[shape]
            buffer.mul_(self.momentum).add_(gradient, alpha=1 - self.momentum)
            update = orthogonal(gradient.lerp(buffer, self.momentum))
            rate = self.lr * scale
            for parameter, direction in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay)
                parameter.add_(direction, alpha=-rate * max(1.0, shape[0] / shape[1]) ** 0.5)

    def state_dict(self) -> dict[tuple[int, ...], Tensor]:
        """Momentum, by shape."""
        return dict(self.buffers)

    def load_state_dict(self, state: dict[tuple[int, ...], Tensor]) -> None:
        """Restore `state_dict`'s answer."""
        self.buffers = dict(state)


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly orthogonal matrices [N, rows, columns] with the singular vectors of the input, float32."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = x if wide else x.transpose(1, 2)
    return result
