"""Muon for the matrices, Adam for embeddings and norms, on float32 masters of bfloat16 weights.

Beside the masters goes their running mean over some hundred steps. It is what a run exports: it reads better
than the masters themselves while the rate is high (Izmailov et al., 2018, stochastic weight averaging).
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

MUON_RATE, ADAM_RATE = 0.02, 3e-3
MOMENTUM, WEIGHT_DECAY = 0.95, 0.02
BETA_1, BETA_2 = 0.9, 0.98
MEAN_STEPS = 400


def orthogonalize(gradient: Tensor, num_steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices of a stack [N, rows, columns], by Newton-Schulz iteration.

    Source: Jordan et al., 2024 (Muon).
    """
    x = gradient.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Owns the float32 masters, their means and the moments.

    `step` reads the gradients of `model` and writes its weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weights = dict(model.named_parameters())
        self.masters = {name: weight.detach().float().clone() for name, weight in self.weights.items()}
        self.means = {name: master.clone() for name, master in self.masters.items()}
        self.num_steps = 0
        self.groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        self.moments: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            if self._is_matrix(name):
                self.groups[tuple(master.shape)].append(name)
                self.moments[f"momentum.{name}"] = torch.zeros_like(master)
            else:
                self.moments[f"first.{name}"] = torch.zeros_like(master)
                self.moments[f"second.{name}"] = torch.zeros_like(master)

    def _is_matrix(self, name: str) -> bool:
        return self.masters[name].ndim == 2 and "embed" not in name

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update; `rate` in 0..1 scales both learning rates."""
        self.num_steps += 1
        for names in self.groups.values():
            self._step_muon(names, MUON_RATE * rate)
        for name in self.masters:
            if not self._is_matrix(name):
                self._step_adam(name, ADAM_RATE * rate)
        share = 1 / min(self.num_steps, MEAN_STEPS)
        for name, weight in self.weights.items():
            weight.copy_(self.masters[name])
            weight.grad = None
            self.means[name].lerp_(self.masters[name], share)

    def _step_muon(self, names: list[str], rate: float) -> None:
        looked_ahead = []
        for name in names:
            gradient = self._gradient(name)
            momentum = self.moments[f"momentum.{name}"]
            momentum.mul_(MOMENTUM).add_(gradient, alpha=1 - MOMENTUM)
            looked_ahead.append(gradient * (1 - MOMENTUM) + momentum * MOMENTUM)
        updates = orthogonalize(torch.stack(looked_ahead))
        rows, columns = self.masters[names[0]].shape
        scaled = rate * max(1.0, rows / columns) ** 0.5
        for name, update in zip(names, updates, strict=True):
            self.masters[name].mul_(1 - scaled * WEIGHT_DECAY).add_(update, alpha=-scaled)

    def _step_adam(self, name: str, rate: float) -> None:
        gradient = self._gradient(name)
        first, second = self.moments[f"first.{name}"], self.moments[f"second.{name}"]
        first.lerp_(gradient, 1 - BETA_1)
        second.lerp_(gradient.square(), 1 - BETA_2)
        corrected = (second / (1 - BETA_2**self.num_steps)).sqrt_().add_(1e-8)
        self.masters[name].addcdiv_(first, corrected, value=-rate / (1 - BETA_1**self.num_steps))

    def _gradient(self, name: str) -> Tensor:
        gradient = self.weights[name].grad
        assert gradient is not None, f"no gradient for {name}"
        return gradient.float()

    def state(self) -> dict[str, Tensor]:
        """Masters, means and moments by name, to be saved."""
        masters = {f"master.{name}": master for name, master in self.masters.items()}
        return masters | {f"mean.{name}": mean for name, mean in self.means.items()} | self.moments

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor], num_steps: int) -> None:
        """Take over a saved state and write the model's weights from it."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.num_steps = num_steps
        for name, weight in self.weights.items():
            weight.copy_(self.masters[name])
