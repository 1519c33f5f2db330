"""What a round costs by its number of drafts: from the sizes of a model, and as measured."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from qwen_mtp.config import LayerKind, ModelConfig
from qwen_mtp.graphs.spec import GraphKind, GraphSpec
from qwen_mtp.runtime.package import Package

SAMPLES = 5  # of each graph; their median is its cost, so that one slow run counts for nothing
REFRESH = 128  # rounds after which a cost is old: contexts grow
FIRST_REFRESH = 16  # the round from which a graph that was never measured counts as old
# What a row adds to a pass, whose unit is reading the weights once: seen at the 0.8B shape in int8
# on two threads.
ROW = 0.016


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in one unit, whichever.

    Attributes:
        rounds: Entry k is a round of k drafts, k = 0..K: draft graph and verify graph.
        probe: The smallest draft graph.
        backlog: Rows P that may wait for the drafter: without drafts, it runs once in P rounds.
    """

    rounds: tuple[float, ...]
    probe: float
    backlog: int


def bucket(sizes: Sequence[int], least: int) -> int:
    """The smallest of the ascending ``sizes`` that is at least ``least``."""
    return next(size for size in sizes if size >= least)


class Meter:
    """What rounds of one package cost, nominally and by the last runs of their graphs."""

    def __init__(self, package: Package, most: int) -> None:
        """Watch rounds of 0..``most`` drafts of a package with an MTP head."""
        geometry = package.manifest.geometry
        self._backlog = geometry.max_rows
        self._probe = package.graph(f"mtp_draft_k{geometry.lookaheads[0]}")
        self._rounds = [_graphs(package, drafts) for drafts in range(most + 1)]
        self._nominal = _Nominal(package)
        self._samples: dict[str, deque[float]] = {}
        self._seen: dict[str, int] = {}
        self._newest: dict[GraphKind, GraphSpec] = {}
        self._round = 0

    def add(self, spec: GraphSpec, ms: float) -> None:
        """Take a run of a draft or verify graph in, the latter ends a round.

        The first run of a graph also binds it, and does not count.
        """
        self._round += spec.kind == "target_verify"
        if spec.name not in self._samples:
            self._samples[spec.name] = deque(maxlen=SAMPLES)
            return
        self._samples[spec.name].append(ms)
        self._seen[spec.name], self._newest[spec.kind] = self._round, spec

    def overdue(self, drafts: int) -> bool:
        """Whether a graph of a round of so many drafts should be measured again."""
        never = FIRST_REFRESH - REFRESH
        graphs = self._rounds[drafts]
        return any(self._round - self._seen.get(g.name, never) >= REFRESH for g in graphs)

    def nominal(self) -> Costs:
        """Costs that follow from the package alone: the same on every machine, in every run."""
        return self._costs(self._nominal.of)

    def measured(self) -> Costs:
        """Milliseconds; of a graph not measured, what its nominal cost makes of one that was."""
        return self._costs(self._measured)

    def _costs(self, of: Callable[[GraphSpec], float]) -> Costs:
        rounds = (sum(map(of, graphs)) for graphs in self._rounds)
        return Costs(tuple(rounds), of(self._probe), self._backlog)

    def _measured(self, spec: GraphSpec) -> float:
        if samples := self._samples.get(spec.name):
            return median(samples)
        like = self._newest.get(spec.kind, next(iter(self._newest.values()), None))
        if like is None:
            return self._nominal.of(spec)
        return median(self._samples[like.name]) * self._nominal.of(spec) / self._nominal.of(like)


class _Nominal:
    """What a graph reads, in units of reading the target once.

    Decoding waits for weights: a pass of the target costs them once for all its rows, and a
    little for each row; a draft costs its head's own layer and an output head.
    """

    def __init__(self, package: Package) -> None:
        config, geometry = package.manifest.config, package.manifest.geometry
        draft = package.graph(f"mtp_draft_k{geometry.lookaheads[0]}")
        outputs = draft.tensor("draft_logits.0").shape[-1]
        self._draft = _draft_size(config, outputs) / _target_size(config)
        self._row = ROW * geometry.max_num_seqs

    def of(self, spec: GraphSpec) -> float:
        if spec.kind == "mtp_draft":
            return spec.lookahead * self._draft * (1 + self._row)
        return 1 + self._row * spec.rows


def _graphs(package: Package, drafts: int) -> tuple[GraphSpec, ...]:
    """What a round of so many drafts runs."""
    geometry = package.manifest.geometry
    verify = package.graph(f"target_verify_r{bucket(geometry.row_buckets, drafts + 1)}")
    if not drafts:
        return (verify,)
    return package.graph(f"mtp_draft_k{bucket(geometry.lookaheads, drafts)}"), verify


def _draft_size(config: ModelConfig, outputs: int) -> int:
    """Weights that one draft reads."""
    merge = 2 * config.hidden_size * config.hidden_size
    return merge + _layer_size(config, "full_attention") + outputs * config.hidden_size


def _target_size(config: ModelConfig) -> int:
    """Weights that a pass of the target reads."""
    layers = sum(_layer_size(config, kind) for kind in config.layer_kinds)
    return layers + config.vocab_size * config.hidden_size


def _layer_size(config: ModelConfig, kind: LayerKind) -> int:
    """Weights of a layer: its projections and its MLP; all else is small."""
    if kind == "full_attention":
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        mixer = 3 * queries + 2 * keys  # queries with their gates, keys, values, output
    else:
        mixer = config.conv_channels + 2 * config.value_size  # q, k, v, gate, output
    return config.hidden_size * (mixer + 3 * config.intermediate_size)
