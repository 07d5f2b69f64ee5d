"""Sites, which read one input from all streams and write into all of them, and the end, which makes one stream of all.

Legend: t tokens of a sequence on this rank, b sequences, n streams, D hidden size. i is the stream that is read, j the
one that is written.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from kernels.select import Kernels
from megamem.config.width import Width
from megamem.parameters.declaration import GroupName, Matrices, ReducedOver, declare, parameter_device

from .config import ResidualStreamsConfig, Shapes
from .operations import wide_dtype


@dataclass(frozen=True)
class Read:
    """Input of a site's branch, and the weights with which its output is written.

    Attributes:
        update: u [t, b, D], the branch's input, in the streams' dtype.
        post: [t, b, n], weights of the branch's output in each stream, in at least fp32; None: there is one stream, to
            which it is added.
        mix: [t, b, n, n], the stream read and the stream written, in at least fp32; None: streams stay apart.
        carried: [t, b, n], weights with which the next site reads, in at least fp32; None: it finds its own.
    """

    update: Tensor
    post: Tensor | None
    mix: Tensor | None
    carried: Tensor | None


class OneStream:
    """Site of a model with one residual stream: its branch reads the stream, and adds to it."""

    def read(self, streams: Tensor, carried: Tensor | None) -> Read:
        """See `StreamSite.read`, of one stream [t, b, D]."""
        return Read(streams, None, None, None)

    def written(self, streams: Tensor, out: Tensor, read: Read) -> Tensor:
        """See `StreamSite.written`, of one stream [t, b, D]."""
        return streams + out

    def joined(self, streams: Tensor, out: Tensor, read: Read) -> Tensor:
        """See `StreamSite.joined`, of one stream [t, b, D]."""
        return streams + out


class _StreamsModule(MegatronModule):
    """Owner of maps, which are replicated over tensor-parallel ranks: each sees its own share of the sequence, so Megatron
    sums their gradients over those too.

    Attributes:
        kernels: kernels of what is done to the streams.
        epsilon: added to the mean square in the norm of streams.
    """

    def __init__(
        self, config: TransformerConfig, settings: ResidualStreamsConfig, kernels: Kernels, shapes: Shapes
    ) -> None:
        super().__init__(config=config)
        self.settings, self.kernels, self._shapes = settings, kernels, shapes
        self.epsilon: float = config.layernorm_epsilon if settings.norm_epsilon is None else settings.norm_epsilon

    def _matrix(self, name: str, width: Width) -> nn.Parameter:
        """A hidden matrix [outputs, inputs]."""
        return self._parameter(name, "backbone", width, Matrices())

    def _map(self, name: str) -> nn.Parameter:
        """A map [outputs, inputs] from streams to an output per stream, as gates and routers have."""
        return self._parameter(name, "backbone", Width.INPUTS)

    def _vector(self, name: str, width: Width = Width.NEITHER) -> nn.Parameter:
        """Gains, biases, factors and static weights, which do not decay."""
        return self._parameter(name, "backbone_no_decay", width)

    def _parameter(self, name: str, group: GroupName, width: Width, matrices: Matrices | None = None) -> nn.Parameter:
        data = torch.empty(self._shapes[name], dtype=self.config.params_dtype, device=parameter_device(self.config))
        parameter = nn.Parameter(data)
        declare(parameter, group, reduced_over=ReducedOver.TOKENS, matrices=matrices, width=width)
        return parameter


class StreamSite(_StreamsModule):
    """Maps of one site: attention or a feed-forward.

    Attributes:
        site_number: place among the sites of the whole model, from 0.
    """

    def __init__(
        self, config: TransformerConfig, settings: ResidualStreamsConfig, kernels: Kernels, site_number: int
    ) -> None:
        """Allocate the weights; `megamem.initialisation` fills them, and calls `set_initial` behind it."""
        super().__init__(config, settings, kernels, settings.site_shapes(config.hidden_size))
        self.site_number = site_number

    @abstractmethod
    def forward(self, streams: Tensor, carried: Tensor | None) -> Read:
        """See `read`."""

    def read(self, streams: Tensor, carried: Tensor | None) -> Read:
        """The branch's input, and how its output is to be written.

        Args:
            streams: X [t, b, n, D].
            carried: [t, b, n], weights that the site before found; None for kinds that carry none.
        """
        # Called as a module, because Megatron's DDP waits for gathered weights in a hook before forward.
        found: Read = self(streams, carried)
        return found

    def written(self, streams: Tensor, out: Tensor, read: Read) -> Tensor:
        """X'_j = post_j y + sum_i mix_ij X_i, computed in at least fp32 and rounded to the streams' dtype once.

        Args:
            streams: X [t, b, n, D] as they were read.
            out: y [t, b, D], the branch's output.
            read: result of `read` for these streams.
        """
        assert read.post is not None
        return self.kernels.mix_streams(streams, out, read.post, read.mix)

    def joined(self, streams: Tensor, out: Tensor, read: Read) -> Tensor:
        """X_j + post_j y, rounded once, for an output y of the site that comes after its streams are written."""
        assert read.post is not None
        return self.kernels.mix_streams(streams, out, read.post, None)

    def set_initial(self) -> None:
        """Set what no distribution gives (`initial.distribution`)."""


class StreamsEnd(_StreamsModule):
    """Maps that make one stream of all behind the last site."""

    def __init__(self, config: TransformerConfig, settings: ResidualStreamsConfig, kernels: Kernels) -> None:
        super().__init__(config, settings, kernels, settings.end_shapes(config.hidden_size))

    @abstractmethod
    def forward(self, streams: Tensor, carried: Tensor | None) -> Tensor:
        """One stream [t, b, D], in the streams' dtype, of X [t, b, n, D] and what the last site's `Read` carries."""


def started(hidden: Tensor, settings: ResidualStreamsConfig) -> tuple[Tensor, Tensor | None]:
    """Streams [t, b, n, D] that are copies of `hidden` [t, b, D], and the weights with which the first site reads: the
    first stream alone."""
    streams = hidden.unsqueeze(2).repeat(1, 1, settings.count, 1)
    if not settings.carries_read:
        return streams, None
    carried = torch.zeros(streams.shape[:3], dtype=wide_dtype(hidden.dtype), device=hidden.device)
    carried[..., 0] = 1
    return streams, carried
