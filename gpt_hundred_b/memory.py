"""Memory of a rank, counted on paper: what this model keeps, and the published formulas beside it."""

from __future__ import annotations

from dataclasses import dataclass

from common.pipeline.schedule import Schedule
from gpt_hundred_b.config import GptTrainConfig
from gpt_hundred_b.loss import CHUNK_LOGITS
from gpt_hundred_b.shape import GptConfig, embedding_parameters, norm_parameters

GIB = float(2**30)
ELEMENT = {"fp64": 8, "fp32": 4, "bf16": 2}
"""Bytes of a weight or activation."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one pipeline rank (all its tp and dp ranks hold the same)."""

    pp_rank: int
    parameters: int
    """Numbers in the parameters that the rank computes with."""
    weights: float
    gradients: float
    optimizer: float
    activations: float
    """At the peak of the pipeline's schedule."""
    working: float
    """What one layer needs while it is recomputed, and the loss its gradients and a chunk of logits."""

    @property
    def total(self) -> float:
        """All of it; buffers of communication and the allocator's holes come on top."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


def estimate(config: GptTrainConfig, world_size: int) -> list[RankMemory]:
    """What each pipeline rank holds.

    Raises ConfigError where the layout does not fit the ranks.
    """
    layout = config.parallel_layout(world_size)
    stages, schedule = config.stages(), config.schedule(world_size)
    weights, gradients, optimizer = state_bytes(config, layout.dp_shard)
    found = []
    for rank in range(layout.pp):
        numbers = parameters_of_rank(config, stages, rank)
        activations, working = _activations(config, schedule, stages, rank)
        found.append(
            RankMemory(rank, numbers, numbers * weights, numbers * gradients, numbers * optimizer, activations, working)
        )
    return found


def state_bytes(config: GptTrainConfig, dp_shard: int) -> tuple[float, float, float]:
    """Bytes a parameter takes on a rank: weight, gradient, optimizer.

    bf16: 2 + 4 (summed in fp32) + 12 (fp32 master and both moments); otherwise the weight is its own master.
    """
    element, level = ELEMENT[config.precision], config.layout.level
    gradient, optimizer = (4.0, 12.0) if config.precision == "bf16" else (element, 2.0 * element)
    return (
        element / (dp_shard if level >= 3 else 1),
        gradient / (dp_shard if level >= 2 else 1),
        optimizer / (dp_shard if level >= 1 else 1),
    )


def parameters_of_rank(config: GptTrainConfig, stages: list[range], pp_rank: int) -> int:
    """Numbers in the parameters of a rank; a tied embedding is on the first and the last stage."""
    model, tp = config.model, config.layout.tp
    total = 0
    for stage in range(pp_rank, len(stages), config.layout.pp):
        total += len(stages[stage]) * local_layer_parameters(model, tp)
        if stage == 0:
            tokens = -(-model.vocab_size // tp) * model.hidden
            total += tokens + embedding_parameters(model) - model.vocab_size * model.hidden
        if stage == len(stages) - 1:
            total += norm_parameters(model)
            if not model.tied or len(stages) > 1:
                total += -(-model.vocab_size // tp) * model.hidden
    return total


def local_layer_parameters(config: GptConfig, tp: int) -> int:
    """Of one layer on a tp rank: norms and the biases of row-parallel layers are whole on each."""
    h, f, kv = config.hidden, config.ffn_width, config.key_heads * config.head_dim
    up = 2 * f if config.activation == "swiglu" else f
    cut = h * (h + 2 * kv) + h * h + h * up + f * h
    whole = 2 * norm_parameters(config)
    if config.bias:
        cut += (h + 2 * kv) + up
        whole += 2 * h
    return cut // tp + whole


def layer_activations(
    config: GptConfig,
    sequence: int,
    samples: int,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    element: int = 2,
    device: str = "cuda",
) -> float:
    """Bytes that one layer of this model keeps for backward.

    Without attention dropout attention is a fused kernel, which keeps no weights. device: "cpu" counts what only the
    CPU's kernels keep.
    """
    h, f, kv = config.hidden / tp, config.ffn_width / tp, config.key_heads * config.head_dim / tp
    whole = config.hidden / (tp if sequence_parallel else 1)
    cpu, rms = device == "cpu", config.norm == "rmsnorm"
    numbers = 4 * whole  # both norms' inputs and outputs, which the linear layers multiply
    if cpu and rms:
        numbers += 2 * whole  # normalized, before the weight
    rope, repeated = config.positions == "rope", cpu and config.key_heads != config.heads
    if not (rope and repeated):
        numbers += h + 2 * kv  # queries, keys and values as projected
    if rope:
        numbers += h + (0 if repeated else kv)  # turned queries and keys
    if repeated:
        numbers += 2 * h  # keys and values for each query head
    numbers += h + (4 * f if config.activation == "swiglu" else 2 * f)  # attention's output
    bytes_ = numbers * element + core_statistics(config, sequence, tp, element)
    bytes_ += (8 if rms else 16) / (tp if sequence_parallel else 1)  # mean and deviation in fp32
    if config.dropout:
        bytes_ += 2 * whole
    return samples * sequence * bytes_


def core_statistics(config: GptConfig, sequence: int, tp: int, element: int) -> float:
    """Bytes a token that the attention core keeps beside its inputs and output: what selective recompute saves."""
    heads = config.heads / tp
    if config.attention_dropout == 0:
        return 4 * heads
    return 3 * heads * sequence * element  # weights, mask, and weights that were kept


def published_layer_activations(
    config: GptConfig, sequence: int, samples: int, *, tp: int, sequence_parallel: bool, recompute: str
) -> float:
    """Bytes of one layer of a GPT in 16 bits by Korthikanti et al. 2022, table 2: masks and attention weights kept."""
    sbh = sequence * samples * config.hidden
    attention = 5 * config.heads * sequence / config.hidden
    if recompute == "full":
        return 2 * sbh / (tp if sequence_parallel else 1)
    core = 0.0 if recompute == "selective" else attention / tp
    return sbh * ((34 / tp if sequence_parallel else 10 + 24 / tp) + core)


def _activations(config: GptTrainConfig, schedule: Schedule, stages: list[range], pp_rank: int) -> tuple[float, float]:
    """Bytes at the peak of the schedule, and the working set beside them."""
    model, layout, samples = config.model, config.layout, config.batch.micro
    element, tokens, device = ELEMENT[config.precision], samples * config.sequence, config.device
    own = tokens / (layout.tp if layout.sequence_parallel else 1)
    layer = layer_activations(
        model,
        config.sequence,
        samples,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        element=element,
        device=device,
    )
    core = tokens * core_statistics(model, config.sequence, layout.tp, element)
    kept = {"none": layer, "selective": layer - core, "full": own * model.hidden * element}[model.recompute]
    sizes, peak, held = {}, 0.0, 0.0
    for stage in schedule.stages_of(pp_rank):
        chosen = min(model.recompute_layers or model.layers, len(stages[stage]))
        sizes[stage] = chosen * kept + (len(stages[stage]) - chosen) * layer
        if stage == len(stages) - 1:
            sizes[stage] += 2 * own * model.hidden * element  # last norm's input, and the loss's gradient
    for action in schedule.orders[pp_rank]:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] * sizes[action.stage]
        peak = max(peak, held)
    working = {"none": 0.0, "selective": core, "full": layer}[model.recompute]
    if pp_rank == layout.pp - 1:
        vocab = -(-model.vocab_size // layout.tp)
        chunk = CHUNK_LOGITS["cpu" if device == "cpu" else "cuda"]
        # The embedding's gradient in fp32, and logits with their gradient in the type of the weights.
        working += vocab * model.hidden * max(element, 4) + min(tokens * vocab, chunk) * (max(element, 4) + element)
    return peak, working
