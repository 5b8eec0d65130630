"""The model that the optimizer benchmark trains, and one contender for each library; each with its best options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from common.optimizers import LAMB, AdamW, Piece, UpdateRule
from common.runtime import Runtime
from common.sharded_optimizer import ShardedOptimizer

BASELINE = "forward and backward alone"
LR, BETAS, DECAY, CLIP = 1e-4, (0.9, 0.999), 0.01, 1.0
ADAM_EPS, LAMB_EPS = 1e-8, 1e-6


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    layers: int
    hidden: int
    vocab_size: int
    positions: int = 512

    def samples(self, tokens: int, seed: int) -> Tensor:
        """Token ids, [sequences, at most 64]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocab_size, (tokens // min(tokens, 64), min(tokens, 64)), generator=generator)

    def millions(self) -> float:
        """Parameters, in millions."""
        with torch.device("meta"):
            return sum(p.numel() for p in Bert(self).parameters()) / 1e6


class Block(nn.Module):
    """A transformer layer, norm after each part as in BERT."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // 64
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.attention_norm, self.norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[sequences, tokens, hidden] -> the same."""
        # [sequences, tokens, 3 * hidden] -> 3 of [sequences, heads, tokens, 64]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.out(mixed))
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """Token ids -> summed cross entropy of an eighth of the positions; decoder tied to the word embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(shape.vocab_size, shape.hidden), nn.Embedding(512, shape.hidden)
        nn.init.normal_(self.word.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.norm = nn.LayerNorm(shape.hidden)
        self.blocks = nn.ModuleList(Block(shape.hidden) for _ in range(shape.layers))
        self.transform, self.bias = nn.Linear(shape.hidden, shape.hidden), nn.Parameter(torch.zeros(shape.vocab_size))

    def forward(self, ids: Tensor) -> Tensor:
        """[sequences, tokens] -> []."""
        x = self.norm(self.word(ids) + self.position.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.transform(x[:, ::8]), self.word.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, ::8].flatten())


def excluded(name: str, parameter: nn.Parameter) -> bool:
    """Biases and norms: not decayed, not adapted."""
    return parameter.ndim <= 1


class Contender:
    """A model and how one library trains it; what is common to those with torch's optimizer interface."""

    def __init__(self, model: nn.Module, clip: Callable[[], Any], update: Callable[[], Any]) -> None:
        self._model, self._clip, self._update = model, clip, update

    def step(self, ids: Tensor) -> float:
        """Forward, backward, clip to the global norm, update; returns the loss."""
        loss = self._model(ids)
        loss.backward()
        self._clip()
        self._update()
        self._model.zero_grad(set_to_none=True)
        return loss.item()

    def settle(self) -> None:
        """Returns when nothing is under way."""


class Ours(Contender):
    """ShardedOptimizer."""

    def __init__(self, runtime: Runtime, shape: Shape, rule: UpdateRule, level: Any) -> None:
        self._model = Bert(shape)
        self._optimizer = ShardedOptimizer(
            self._model, rule, runtime=runtime, level=level, clip_norm=CLIP, exclude=excluded, reduction="mean"
        )

    def step(self, ids: Tensor) -> float:
        """Forward, backward, update."""
        loss = self._model(ids)
        loss.backward()
        self._optimizer.step(LR)
        return loss.item()

    def settle(self) -> None:
        """Waits for the parameters."""
        self._optimizer.wait_parameters()


class ForeachLamb:
    """LAMB on whole tensors with torch's multi-tensor operations, the way replicated LAMB is written."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        self._parameters = [p for name, p in named]
        self._adapted = [index for index, (name, p) in enumerate(named) if not excluded(name, p)]
        self._first = [torch.zeros_like(p) for p in self._parameters]
        self._second = [torch.zeros_like(p) for p in self._parameters]
        self._step = 0

    @torch.no_grad()
    def step(self) -> None:
        """One update; overwrites the gradients with the update's direction."""
        self._step += 1
        correction1, correction2 = (1 - beta**self._step for beta in BETAS)
        weights: list[Tensor] = list(self._parameters)
        grads = [p.grad for p in self._parameters if p.grad is not None]
        torch._foreach_lerp_(self._first, grads, 1 - BETAS[0])
        torch._foreach_mul_(self._second, BETAS[1])
        torch._foreach_addcmul_(self._second, grads, grads, 1 - BETAS[1])
        root = torch._foreach_sqrt(self._second)
        torch._foreach_div_(root, correction2**0.5)
        torch._foreach_add_(root, LAMB_EPS)
        direction = torch._foreach_div(self._first, root)
        torch._foreach_div_(direction, correction1)
        adapted, steps = ([tensors[i] for i in self._adapted] for tensors in (weights, direction))
        torch._foreach_add_(steps, adapted, alpha=DECAY)
        ratios = torch.stack(torch._foreach_norm(adapted)) / torch.stack(torch._foreach_norm(steps))
        torch._foreach_mul_(steps, torch.where(ratios.isfinite() & (ratios > 0), ratios, 1.0).tolist())
        torch._foreach_add_(weights, direction, alpha=-LR)


class WholeTensorRule:
    """Our own update rule on whole tensors of every rank: what is left of the difference is the sharding's."""

    def __init__(self, model: nn.Module, rule: UpdateRule) -> None:
        self._rule, self._steps = rule, 0
        self._parameters = list(model.named_parameters())
        self._slots = [{slot: torch.zeros_like(p).view(-1) for slot in rule.slots} for _, p in self._parameters]

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        self._steps += 1
        pieces = [
            Piece(name, index, 0, p.shape, excluded(name, p), p.data.view(-1), p.grad.view(-1), slots)
            for index, ((name, p), slots) in enumerate(zip(self._parameters, self._slots, strict=True))
            if p.grad is not None
        ]
        sums = self._rule.prepare(pieces, len(pieces), torch.ones((), dtype=torch.float64), self._steps)
        self._rule.apply(pieces, LR, sums)


def _replicated(model: nn.Module, update: Callable[[nn.Module], Any]) -> Contender:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    return Contender(ddp, lambda: clip_grad_norm_(model.parameters(), CLIP, foreach=True), update(model).step)


def _groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """The two parameter groups of torch's optimizers: decayed and not."""
    named = list(named)
    return [
        {"params": [p for n, p in named if not excluded(n, p)], "weight_decay": DECAY},
        {"params": [p for n, p in named if excluded(n, p)], "weight_decay": 0.0},
    ]


def alone(runtime: Runtime, shape: Shape) -> Contender:
    """No communication, no update."""
    return Contender(Bert(shape), lambda: None, lambda: None)


def ddp_adamw(runtime: Runtime, shape: Shape) -> Contender:
    """DDP, fused AdamW on every rank."""
    return _replicated(
        Bert(shape),
        lambda model: torch.optim.AdamW(
            _groups(model.named_parameters()), lr=LR, betas=BETAS, eps=ADAM_EPS, fused=True
        ),
    )


def zero_redundancy(runtime: Runtime, shape: Shape) -> Contender:
    """torch's ZeroRedundancyOptimizer on DDP."""
    return _replicated(
        Bert(shape),
        lambda model: ZeroRedundancyOptimizer(
            _groups(model.named_parameters()), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, betas=BETAS,
            eps=ADAM_EPS, fused=True,
        ),
    )  # fmt: skip


def fsdp2(runtime: Runtime, shape: Shape) -> Contender:
    """torch's fully_shard, a unit a block; parameters stay gathered between forward and backward."""
    model = Bert(shape)
    mesh = init_device_mesh("cpu", (runtime.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(_groups(model.named_parameters()), lr=LR, betas=BETAS, eps=ADAM_EPS, fused=True)
    return Contender(model, lambda: clip_grad_norm_(model.parameters(), CLIP, foreach=True), optimizer.step)


def fairscale(runtime: Runtime, shape: Shape) -> Contender:
    """fairscale's OSS and ShardedDataParallel."""
    model = Bert(shape)
    optimizer = OSS(_groups(model.named_parameters()), torch.optim.AdamW, lr=LR, betas=BETAS, eps=ADAM_EPS, fused=True)
    sharded = ShardedDataParallel(model, optimizer)
    return Contender(sharded, lambda: optimizer.clip_grad_norm(CLIP), optimizer.step)


def ddp_lamb(runtime: Runtime, shape: Shape) -> Contender:
    """DDP, LAMB of multi-tensor operations on every rank."""
    return _replicated(Bert(shape), ForeachLamb)


def ddp_our_lamb(runtime: Runtime, shape: Shape) -> Contender:
    """DDP, our LAMB on every rank."""
    return _replicated(Bert(shape), lambda model: WholeTensorRule(model, _lamb()))


def _lamb() -> LAMB:
    return LAMB(betas=BETAS, eps=LAMB_EPS, weight_decay=DECAY)


def _adamw() -> AdamW:
    return AdamW(betas=BETAS, eps=ADAM_EPS, weight_decay=DECAY)


Make = Callable[[Runtime, Shape], Contender]
PEERS: dict[str, dict[str, Make]] = {
    "adamw": {
        BASELINE: alone,
        "ours, level 1": lambda runtime, shape: Ours(runtime, shape, _adamw(), 1),
        "ours, level 2": lambda runtime, shape: Ours(runtime, shape, _adamw(), 2),
        "DDP + fused AdamW": ddp_adamw,
        "DDP + ZeroRedundancyOptimizer": zero_redundancy,
        "FSDP2 fully_shard": fsdp2,
        "fairscale OSS + ShardedDataParallel": fairscale,
    },
    "lamb": {
        BASELINE: alone,
        "ours, level 1": lambda runtime, shape: Ours(runtime, shape, _lamb(), 1),
        "ours, level 2": lambda runtime, shape: Ours(runtime, shape, _lamb(), 2),
        "DDP + LAMB (foreach)": ddp_lamb,
        "DDP + our LAMB, replicated": ddp_our_lamb,
    },
}
"""By update rule; the first of ours is what ratios are against."""
