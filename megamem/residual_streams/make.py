"""Sites and ends of the configured kind."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from kernels.select import Kernels

from .config import ResidualStreamsConfig
from .gated import GatedEnd, GatedSite
from .mhc import MhcEnd, MhcSite, SinglePassEnd
from .plain import PlainEnd, PlainSite
from .site import StreamsEnd, StreamSite

_SITES: dict[str, type[StreamSite]] = {
    "mhc": MhcSite,
    "single_pass": MhcSite,
    "gated": GatedSite,
    "plain": PlainSite,
}
_ENDS: dict[str, type[StreamsEnd]] = {
    "mhc": MhcEnd,
    "single_pass": SinglePassEnd,
    "gated": GatedEnd,
    "plain": PlainEnd,
}


def make_site(
    config: TransformerConfig, settings: ResidualStreamsConfig, kernels: Kernels, *, site_number: int
) -> StreamSite:
    """A site, with weights that are not set.

    Args:
        site_number: place among the sites of the whole model: twice the block's number for attention, and one more for
            its feed-forward.
    """
    return _SITES[settings.kind](config, settings, kernels, site_number)


def make_end(config: TransformerConfig, settings: ResidualStreamsConfig, kernels: Kernels) -> StreamsEnd:
    """The end of a model, which makes one stream of all, with weights that are not set."""
    return _ENDS[settings.kind](config, settings, kernels)
