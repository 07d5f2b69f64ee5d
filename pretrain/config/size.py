"""Rules of `model.size`: shape, batch, length and rates of a run that follow from one number. Imports no torch.

**Shape.** Published decoders grow wider faster than deeper. Width is a power of depth, through two of GPT-3's
(arXiv 2005.14165, table 2.1): 12 blocks of 768 columns and 32 of 4,096. The target gives a depth on that curve, and its
width is rounded to what GPUs and tensor parallelism like. Then as many blocks are taken as come nearest to the target,
in numbers that pipelines like: within 8 % from 10m on, and within 15 % below.

**Length.** 20 tokens per parameter, about what Hoffmann et al. (arXiv 2203.15556) find to be the best use of compute.

**Batch and peak rate.** DeepSeek LLM (arXiv 2401.02954, equation 1) fitted both to searches with 1e17 to 2e19 FLOPs,
and tried them at 1e20. C is the compute of the training:

    B = 0.2920 C^0.3271 tokens        eta = 0.3118 C^-0.1250

**Warm-up.** 2,000 steps as there, but at most a quarter of the run, as this project's searches of short runs took. The
cosine ends at a tenth of the peak, as there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST, MOST = 1_000_000, 100_000_000_000
"""Parameters between which the rules reach."""
LEAST_DEPTH, MOST_DEPTH = 4, 60
"""Blocks of models between these."""
SEQUENCE_LENGTH = 2048
TOKENS_PER_PARAMETER = 20
_NARROW, _WIDE = (12, 768), (32, 4096)
_WIDTH_EXPONENT = math.log(_WIDE[1] / _NARROW[1]) / math.log(_WIDE[0] / _NARROW[0])
# A block has 12 D^2 elements, and so the whole is as the depth to the power of this one's inverse.
_DEPTH_EXPONENT = 1 / (1 + 2 * _WIDTH_EXPONENT)
_LEAST_UNIT, _MOST_FFN_UNIT = 64, 256
_TENSOR_RANKS = 8
_GROUPED_FROM = 2048
_MOST_WARMUP_STEPS = 2000


@dataclass(frozen=True)
class Size:
    """A value of `model.size`: parameters of the backbone to come near, or a depth that it names itself.

    Attributes:
        text: the value, as in "120m" or "d12".
        target: matrices' elements of all blocks, without embeddings and memories.
        depth: blocks, where the value names them; None where they follow.
    """

    text: str
    target: int
    depth: int | None = None

    @classmethod
    def of_depth(cls, depth: int) -> Size:
        """The size that a depth has on the curve."""
        return cls(f"d{depth}", round(12 * depth * _curve(depth) ** 2), depth)


@dataclass(frozen=True)
class Given:
    """Values that a user sets, and rules keep to; None where they are to be found.

    Attributes:
        num_layers: blocks.
        hidden_size: width of the stream.
        num_attention_heads: query heads.
        num_query_groups: key/value heads.
        head_dim: columns of a head.
        ffn_hidden_size: inner width of the feed-forward.
        sequence_length: tokens of a sequence.
        global_batch_size: sequences of a step.
        num_steps: steps of the run.
        lr: peak learning rate.
    """

    num_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    head_dim: int | None = None
    ffn_hidden_size: int | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None
    num_steps: int | None = None
    lr: float | None = None


@dataclass(frozen=True)
class BackboneShape:
    """Widths of a dense backbone.

    Attributes:
        num_layers: L, blocks.
        hidden_size: D, width of the stream.
        num_attention_heads: h, query heads.
        num_query_groups: g, key/value heads.
        head_dim: columns of a head.
        ffn_hidden_size: F, inner width of the SwiGLU.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int

    @property
    def block(self) -> int:
        """Elements of a block's matrices: queries, keys, values and output, and the three of a SwiGLU."""
        attention = 2 * (self.num_attention_heads + self.num_query_groups) * self.head_dim
        return self.hidden_size * (attention + 3 * self.ffn_hidden_size)

    @property
    def parameters(self) -> int:
        """Elements of all blocks' matrices."""
        return self.num_layers * self.block

    def flops_per_token(self, sequence_length: int) -> int:
        """FLOPs of a trained token as DeepSeek LLM counts them: 6 per parameter, and attention over whole sequences."""
        attended = self.num_attention_heads * self.head_dim * sequence_length
        return 6 * self.parameters + 12 * self.num_layers * attended


@dataclass(frozen=True)
class Training:
    """Length, batch and rates.

    Attributes:
        sequence_length: tokens of a sequence.
        global_batch_size: sequences of a step.
        num_steps: steps.
        lr: peak learning rate.
        min_lr: rate at the end.
        warmup_steps: steps of warm-up.
    """

    sequence_length: int
    global_batch_size: int
    num_steps: int
    lr: float
    min_lr: float
    warmup_steps: int


def shape_of(size: Size, given: Given) -> BackboneShape:
    """The backbone of a size.

    Depth follows a width that is given, and width a depth. Heads, groups and the inner width of a feed-forward that are
    given change neither: a narrower feed-forward, which pays for a memory, gets no more blocks.
    """
    width = given.hidden_size or _rounded_width(_wanted_width(size, given))
    num_layers = given.num_layers or size.depth or _rounded_depth(size.target / _shape(1, width, Given()).block)
    return _shape(num_layers, width, given)


def run_of(shape: BackboneShape, given: Given) -> Training:
    """Length, batch and rates of a backbone's training.

    Batch and peak rate are those of 20 tokens per parameter, whatever the number of steps: a few steps, taken to try a
    run, have the memory, speed and rate of the whole one.
    """
    length = given.sequence_length or SEQUENCE_LENGTH
    tokens = TOKENS_PER_PARAMETER * shape.parameters
    compute = float(shape.flops_per_token(length) * tokens)
    batch = given.global_batch_size or _power_of_two(0.2920 * compute**0.3271 / length)
    num_steps = given.num_steps or math.ceil(tokens / (batch * length))
    lr = given.lr or _two_digits(0.3118 * compute**-0.1250)
    return Training(length, batch, num_steps, lr, _two_digits(lr / 10), min(_MOST_WARMUP_STEPS, num_steps // 4))


def head_width(width: int) -> int:
    """Columns of a head: 128 where 8 tensor-parallel ranks can share such heads, else 64."""
    return 128 if width % (128 * _TENSOR_RANKS) == 0 else 64


def _shape(num_layers: int, width: int, given: Given) -> BackboneShape:
    heads = given.num_attention_heads or max(1, width // head_width(width))
    # As in Llama 3 (arXiv 2407.21783) at every size: keys and values of 8 heads, one for each tensor-parallel rank.
    has_groups = width >= _GROUPED_FROM and heads % _TENSOR_RANKS == 0
    return BackboneShape(
        num_layers,
        width,
        heads,
        given.num_query_groups or (_TENSOR_RANKS if has_groups else heads),
        given.head_dim or max(1, width // heads),
        # Three matrices of 8/3 D have as many elements as the two of 4 D that GPT-3 has (arXiv 2002.05202).
        given.ffn_hidden_size or _rounded(8 / 3 * width, min(_unit(width), _MOST_FFN_UNIT)),
    )


def _wanted_width(size: Size, given: Given) -> float:
    """Width of 12 D^2 elements per block: on the curve, or where the depth is given beside it."""
    if given.num_layers is not None:
        return math.sqrt(size.target / (12 * given.num_layers))
    return _curve(size.depth or _NARROW[0] * (size.target / (12 * _NARROW[0] * _NARROW[1] ** 2)) ** _DEPTH_EXPONENT)


def _curve(depth: float) -> float:
    """Width of a depth, before it is rounded."""
    return _NARROW[1] * (depth / _NARROW[0]) ** _WIDTH_EXPONENT


def _rounded_width(width: float) -> int:
    return _rounded(width, _unit(width))


def _unit(width: float) -> int:
    """A quarter of the power of two below a width, and at least a head: 128 at 768, 512 at 2,048, 1,024 at 4,096."""
    return max(_LEAST_UNIT, 2 ** int(math.log2(max(1, width))) // 4)


def _rounded_depth(depth: float) -> int:
    """Blocks that stages of a pipeline can share: even from 12 on, multiples of 4 from 32 on."""
    return _rounded(depth, 1 if depth < 12 else 2 if depth < 32 else 4)


def _rounded(value: float, unit: int) -> int:
    return max(unit, unit * round(value / unit))


def _power_of_two(value: float) -> int:
    """The nearest power of two by ratio: such batches can be shared out over ranks."""
    return int(2 ** max(0, round(math.log2(value))))


def _two_digits(rate: float) -> float:
    return float(f"{rate:.1e}")
