"""Muon for matrices and Adam for the other parameters, in few launches: matrices of one shape are updated together."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

MUON_RATE, ADAM_RATE, EMBEDDING_RATE = 0.02, 0.003, 0.01
MOMENTUM, BETAS, EPSILON = 0.95, (0.9, 0.95), 1e-8
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5  # of Newton and Schulz


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return the matrices with all singular values near 1."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    made = matrices.transpose(-2, -1) if tall else matrices
    made = made / (made.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = made @ made.transpose(-2, -1)
        made = a * made + (b * square + c * square @ square) @ made
    return made.transpose(-2, -1) if tall else made


class Optimizer:
    """Updates a model's parameters in place, without a synchronization with the host.

    Args:
        model: Its router, embedding, and weights of an index's heads go to Adam.
        decay: The weight decay of the matrices and the embedding.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        named = dict(model.named_parameters())
        self.parameters = list(named.values())
        self.decay = decay
        device = self.parameters[0].device
        self.rate = torch.zeros((), device=device)
        """The share of the full rates with which the next step updates."""
        self.steps = torch.zeros((), device=device)
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        self.others: list[tuple[nn.Parameter, float, float]] = []
        for name, parameter in named.items():
            if "embed" in name:
                self.others.append((parameter, EMBEDDING_RATE, decay))
            elif (
                parameter.ndim == 1
                or "conv1d" in name
                or name.endswith(("gate.weight", "in_proj_ba.weight", "weights_proj.weight"))
            ):
                self.others.append((parameter, ADAM_RATE, 0.0))
            else:
                shapes[tuple(parameter.shape)].append(parameter)
        self.groups = [(group, [torch.zeros_like(p) for p in group]) for group in shapes.values()]
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p, *_ in self.others]

    def forget(self) -> None:
        """Forget all earlier gradients."""
        self.steps.zero_()
        for each in [*(m for _, group in self.groups for m in group), *(m for pair in self.moments for m in pair)]:
            each.zero_()

    def zero(self) -> None:
        """Set the gradients to zero."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, clip: float) -> None:
        """Update the parameters, with gradients whose norm is clipped."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, clip / norm.clamp(min=clip))
        self.steps += 1
        for group, momenta in self.groups:
            found = [p.grad for p in group if p.grad is not None]
            torch._foreach_lerp_(momenta, found, 1 - MOMENTUM)
            stack = torch.stack(torch._foreach_lerp(found, momenta, MOMENTUM))
            rows, columns = stack.shape[-2:]
            update = orthogonalize(stack) * (max(1.0, rows / columns) ** 0.5 * MUON_RATE)
            torch._foreach_mul_(group, 1 - self.rate * MUON_RATE * self.decay)
            torch._foreach_sub_(group, list((update * self.rate).unbind(0)))
        for (parameter, rate, decay), (first, second) in zip(self.others, self.moments, strict=True):
            assert parameter.grad is not None
            first.lerp_(parameter.grad, 1 - BETAS[0])
            second.lerp_(parameter.grad.square(), 1 - BETAS[1])
            mean, scale = first / (1 - BETAS[0] ** self.steps), second / (1 - BETAS[1] ** self.steps)
            parameter.mul_(1 - self.rate * rate * decay)
            parameter.sub_(mean / (scale.sqrt() + EPSILON) * (rate * self.rate))
