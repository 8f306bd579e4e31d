"""The least time in which a machine could run a workload: bytes over bandwidth, or FLOPs over rate.

Pure arithmetic from a checkpoint's config and the requests' lengths; knows nothing about engines.  A step
costs the larger of two times.  It moves all weights once (of experts, those it hits), the KV of every running
sequence and the KV it writes; it computes 2 FLOPs a weight and token, and attention.  A prompt is computed
in the step in which its sequence gets a slot.  Activations, sampling and launches cost nothing here, and
sliding windows are counted as full attention.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as configs call it


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a machine can do at best: bytes/s and FLOP/s."""

    bandwidth: float
    flops: float

    def times(self, num: int) -> Machine:
        """So many of them, with nothing to tell each other."""
        return Machine(bandwidth=num * self.bandwidth, flops=num * self.flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What a step of a model costs.  The embedding is not counted: a step reads few rows of it."""

    dense_weights: int  # of all layers: attention, and the MLP where it is dense
    head_weights: int
    expert_weights: int = 0  # of one expert index, over all layers
    num_experts: int = 0
    num_chosen: int = 0  # experts a token goes to
    num_copies: int = 1  # of all but the experts, which so many engines divide: each reads its own
    kv_bytes_per_token: int
    attention_flops: int  # for one query and one key, over all layers
    bytes_per_weight: int

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], *, bytes_per_weight: int = 2, bytes_per_kv: int | None = None
    ) -> ModelCost:
        """Read a checkpoint's config.json.  bytes_per_kv: of a number in the KV cache; None is a weight's."""
        layers, dim = _number(config, "num_hidden_layers"), _number(config, "hidden_size")
        experts = max(_number(config, name, 0) for name in NUM_EXPERTS)
        hidden = _number(config, "intermediate_size", 0)
        of_expert = _number(config, "moe_intermediate_size", hidden)
        shared = _number(config, "shared_expert_intermediate_size", 0)
        shared += _number(config, "n_shared_experts", 0) * of_expert
        sparse = max(0, layers - _number(config, "first_k_dense_replace", 0)) if experts else 0
        bytes_per_kv = bytes_per_weight if bytes_per_kv is None else bytes_per_kv
        attention = (latent_cost if config.get("kv_lora_rank") else heads_cost)(config)
        mlps = (layers - sparse) * 3 * dim * hidden + sparse * dim * (experts + 3 * shared)
        return cls(
            dense_weights=layers * attention.weights + mlps,
            head_weights=_number(config, "vocab_size") * dim,
            expert_weights=sparse * 3 * dim * of_expert,
            num_experts=experts,
            num_chosen=_number(config, "num_experts_per_tok", 0) if experts else 0,
            kv_bytes_per_token=layers * attention.kv * bytes_per_kv,
            attention_flops=layers * attention.flops,
            bytes_per_weight=bytes_per_weight,
        )

    def step(self, step: Step) -> tuple[float, float]:
        """(bytes, FLOPs) of one step."""
        weights = self.num_copies * (self.dense_weights + self.head_weights)
        weights += self.num_hit(step) * self.expert_weights
        moved = weights * self.bytes_per_weight + (step.read + step.num_tokens) * self.kv_bytes_per_token
        each = self.dense_weights + self.num_chosen * self.expert_weights
        computed = 2 * (each * step.num_tokens + self.head_weights * step.num_samples)
        return moved, computed + self.attention_flops * step.pairs

    def num_hit(self, step: Step) -> float:
        """Experts of a layer that a step reads, on average, if each token chooses its own by chance."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.num_chosen / self.num_experts) ** step.num_tokens)


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """One layer of attention."""

    weights: int
    kv: int  # numbers kept of a token
    flops: int  # for one query and one key


def heads_cost(config: Mapping[str, object]) -> AttentionCost:
    """With heads of keys and values."""
    dim, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", heads)
    head_dim = _number(config, "head_dim", dim // heads)
    weights = 2 * dim * (heads + kv_heads) * head_dim
    return AttentionCost(weights, 2 * kv_heads * head_dim, 4 * heads * head_dim)


def latent_cost(config: Mapping[str, object]) -> AttentionCost:
    """With latents, of which keys and values are made: to attend over those is the less work a key."""
    dim, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    nope, rope = _number(config, "qk_nope_head_dim"), _number(config, "qk_rope_head_dim")
    value, rank = _number(config, "v_head_dim"), _number(config, "kv_lora_rank")
    q_rank, width = _number(config, "q_lora_rank", 0), heads * (nope + rope)
    queries = q_rank * (dim + width) if q_rank else dim * width
    weights = queries + dim * (rank + rope) + heads * ((nope + value) * rank + value * dim)
    return AttentionCost(weights, rank + rope, 2 * heads * (nope + rope + value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step of a run computes, over all its sequences."""

    num_tokens: int  # computed, each written to the KV cache
    num_samples: int  # rows that want logits
    read: int  # tokens of KV read from the cache: contexts of decodes
    pairs: int  # (query, key) pairs of attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The least that a run costs on a machine."""

    seconds: float
    num_bytes: float
    flops: float
    num_steps: int
    num_hit: float  # experts of a layer that a step reads, the mean over steps


def run_limit(
    cost: ModelCost, requests: Sequence[tuple[int, int]], max_num_seqs: int, machine: Machine
) -> Limit:
    """The least time for requests of (prompt tokens, output tokens), `max_num_seqs` at a time."""
    steps = list(ideal_steps(requests, max_num_seqs))
    costs = [cost.step(step) for step in steps]
    return Limit(
        seconds=sum(max(moved / machine.bandwidth, flops / machine.flops) for moved, flops in costs),
        num_bytes=sum(moved for moved, _ in costs),
        flops=sum(flops for _, flops in costs),
        num_steps=len(costs),
        num_hit=sum(map(cost.num_hit, steps)) / max(1, len(steps)),
    )


def ideal_steps(requests: Iterable[tuple[int, int]], max_num_seqs: int) -> Iterator[Step]:
    """Run requests, first come first served, with no limit on a step's tokens."""
    waiting = deque(requests)
    running: list[tuple[int, int]] = []  # tokens in the cache, tokens still to come
    while waiting or running:
        contexts = [context + 1 for context, _ in running]  # a decode attends to itself, too
        running = [(context + 1, left - 1) for context, left in running]
        num_tokens, pairs = len(contexts), sum(contexts)
        while waiting and len(running) < max_num_seqs:
            prompt, output = waiting.popleft()
            num_tokens += prompt
            pairs += prompt * (prompt + 1) // 2
            running.append((prompt, output - 1))
        yield Step(
            num_tokens=num_tokens,
            num_samples=len(running),
            read=sum(contexts) - len(contexts),
            pairs=pairs,
        )
        running = [(context, left) for context, left in running if left > 0]


def _number(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if isinstance(value, int):
        return value
    if default is None:
        raise ValueError(f"the checkpoint's config has no {name}, which the machine's limit is computed from")
    return default
