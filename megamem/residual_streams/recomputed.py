"""Streams that backward mixes again, in the place of those that it would keep at every site (`train.recompute_streams`).

Forward keeps the streams before the first of some blocks. From there a chain leads on: the operands with which each site
mixed the next streams. Autograd keeps those anyway, so a chain takes no memory. Backward meets the end of a chain first. It
mixes all streams of the chain then, each once, and frees them as it passes their sites.

The kernel is that of forward, and so are the bits. No module keeps anything: under 1F1B the forward pass of another
microbatch runs before streams are mixed again.

Legend: t tokens of a sequence on this rank, b sequences, n streams, D hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import Size, SymInt, Tensor
from torch.autograd.graph import saved_tensors_hooks

from kernels.mix_streams.op import MixStreams

from .site import OneStream, Read, StreamSite

Result = TypeVar("Result")


class RecomputedStreams:
    """The newest streams X [t, b, n, D] of a forward pass through the blocks of a chunk, and how backward gets them.

    A chain begins with streams that no site has written, as those are that arrive and those behind a memory before attention,
    and where the one so far has blocks enough.
    """

    def __init__(self, mix_streams: MixStreams, num_blocks: int) -> None:
        """
        Args:
            mix_streams: kernel that the sites write with.
            num_blocks: blocks of a chain, at most.
        """
        self._mix_streams, self._most_blocks = mix_streams, num_blocks
        self._newest: weakref.ref[Tensor] | None = None
        self._source: Tensor | _Mixed | None = None
        self._num_blocks = 0

    def sites(
        self, attention: StreamSite | OneStream, ffn: StreamSite | OneStream
    ) -> tuple[RecomputedSite, RecomputedSite]:
        """The next block's sites, to be called in the place of its own."""
        self._num_blocks += 1
        if self._num_blocks > self._most_blocks:
            self._newest = None
        return RecomputedSite(attention, self), RecomputedSite(ffn, self)

    def read(self, reader: Callable[..., Result], streams: Tensor, *others: object) -> Result:
        """`reader(streams, *others)`: for its backward pass streams are mixed again, or kept if a chain begins with them.

        Weights that autograd keeps for the reader come back without their attributes.
        """
        if self._newest is None or self._newest() is not streams:
            self._newest, self._source, self._num_blocks = weakref.ref(streams), streams.detach(), 1
        if not isinstance(self._source, _Mixed):
            return reader(streams, *others)
        pack = _Pack(self._source, streams)
        try:
            with saved_tensors_hooks(pack, _unpack):
                return reader(streams, *others)
        finally:
            # Autograd keeps the hook beside everything that passed it.
            pack.mixed = None

    def wrote(self, streams: Tensor, out: Tensor, post: Tensor, mix: Tensor | None) -> None:
        """Take X' for the newest streams: the last ones read, mixed with these arguments of `mix_streams`."""
        if streams.requires_grad:
            assert self._source is not None
            operands = (out.detach(), post.detach(), None if mix is None else mix.detach())
            self._newest, self._source = weakref.ref(streams), _Mixed(self._mix_streams, self._source, operands)
        else:
            # Backward ends above them, and keeps nothing that they were made of.
            self._newest = self._source = None


class RecomputedSite:
    """A site whose streams backward mixes again."""

    def __init__(self, site: StreamSite | OneStream, recomputed: RecomputedStreams) -> None:
        self._site, self._recomputed = site, recomputed

    def read(self, streams: Tensor, carried: Tensor | None) -> Read:
        """See `StreamSite.read`."""
        return self._recomputed.read(self._site.read, streams, carried)

    def written(self, streams: Tensor, out: Tensor, read: Read) -> Tensor:
        """See `StreamSite.written`."""
        return self._wrote(self._recomputed.read(self._site.written, streams, out, read), out, read, read.mix)

    def joined(self, streams: Tensor, out: Tensor, read: Read) -> Tensor:
        """See `StreamSite.joined`."""
        return self._wrote(self._recomputed.read(self._site.joined, streams, out, read), out, read, None)

    def _wrote(self, streams: Tensor, out: Tensor, read: Read, mix: Tensor | None) -> Tensor:
        assert read.post is not None
        self._recomputed.wrote(streams, out, read.post, mix)
        return streams


class _Mixed:
    """Streams that a site wrote, mixed again when backward first asks for them."""

    def __init__(
        self, mix_streams: MixStreams, before: Tensor | _Mixed, operands: tuple[Tensor, Tensor, Tensor | None]
    ) -> None:
        """
        Args:
            before: streams that the site read.
            operands: the site's output, weights and mix.
        """
        self._mix_streams = mix_streams
        self._made_of: tuple[Tensor | _Mixed, tuple[Tensor, Tensor, Tensor | None]] | None = before, operands
        self._streams: Tensor | None = None

    def streams(self) -> Tensor:
        """X' [t, b, n, D], with the bits of forward."""
        if self._streams is None:
            assert self._made_of is not None
            before, operands = self._made_of
            self._streams = self._mix_streams(before.streams() if isinstance(before, _Mixed) else before, *operands)
            # The streams before are their own readers' to keep.
            self._made_of = None
        return self._streams

    def view(self, size: Size, stride: tuple[int, ...], offset: int | SymInt) -> Tensor:
        """View of X', with an offset in elements."""
        return self.streams().as_strided(size, stride, offset)


class _Pack:
    """Hook of autograd, by which it keeps a function in the place of any view of some streams, and all else as it is.

    Attributes:
        mixed: makes the streams; None behind the call that the hook is for.
    """

    def __init__(self, mixed: _Mixed, streams: Tensor) -> None:
        self.mixed: _Mixed | None = mixed
        self._storage = _storage(streams)

    def __call__(self, saved: Tensor) -> Tensor | Callable[[], Tensor]:
        if _storage(saved) == self._storage:
            assert self.mixed is not None
            return partial(self.mixed.view, saved.size(), saved.stride(), saved.storage_offset())
        # A node that kept its own result as it is would keep itself.
        return saved if saved.grad_fn is None else saved.detach()


def _unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()


def _storage(tensor: Tensor) -> int:
    """Identity of a tensor's storage among those that exist; tensors without data have storages, too."""
    return tensor.untyped_storage()._cdata
