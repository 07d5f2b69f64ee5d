"""Effects of the keys under `model.residual_streams`: sites, the weights that they find, and the end; and of
`train.recompute_streams`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from keys_table import Subject, Table, rms, same, with_model
from torch import Tensor

from kernels.mix_streams import op
from megamem.residual_streams.config import ResidualStreamsConfig
from megamem.residual_streams.mhc import MhcSite

STREAMS = Table()

TWO = ResidualStreamsConfig(count=2)
SITE, END = "decoder.layers.0.attention_streams.", "decoder.streams_end."


def with_streams(**fields: Any) -> Any:
    return with_model(residual_streams=replace(TWO, **fields))


def names_below(subject: Subject, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in subject.weights if name.startswith(prefix)}


def first_site(subject: Subject) -> MhcSite:
    """The first site of mhc, whose maps are identities of the first columns."""
    site = subject.model.decoder.layers[0].attention_streams
    assert isinstance(site, MhcSite)
    with torch.no_grad():
        site.fn.zero_()
        site.fn.fill_diagonal_(1)
    return site


def streams_of(subject: Subject) -> Tensor:
    """[7, 1, 2, D], of a subject's hidden states."""
    return torch.stack((subject.hidden, 2 * subject.hidden.flip(0)), 1).unsqueeze(1)


@STREAMS.key("model.residual_streams", TWO)
def _(base: Subject, second: Subject) -> None:
    """Two sites per block, and an end; all else keeps its name and its bits."""
    added = second.weights.keys() - base.weights.keys()
    sites = {f"decoder.layers.{block}.{site}_streams." for block in (0, 1) for site in ("attention", "ffn")}
    assert added == {f"{owner}{part}" for owner in (*sites, END) for part in ("fn", "base", "scale")}
    assert base.weights.keys() <= second.weights.keys()
    assert all(torch.equal(second.weights[name], weight) for name, weight in base.weights.items())
    assert second.shapes[f"{SITE}fn"] == (8, 64)
    assert second.steps[0].norm != pytest.approx(base.steps[0].norm, rel=1e-3)


@STREAMS.key("model.residual_streams.count", 3, with_streams())
def _(base: Subject, second: Subject) -> None:
    """n^2 + 2 n maps of n D columns."""
    assert (base.shapes[f"{SITE}fn"], second.shapes[f"{SITE}fn"]) == ((8, 2 * 32), (15, 3 * 32))
    assert (base.shapes[f"{END}fn"], second.shapes[f"{END}fn"]) == ((2, 2 * 32), (3, 3 * 32))


@STREAMS.key("model.residual_streams.kind", "single_pass", with_streams())
def _(base: Subject, second: Subject) -> None:
    """No end of its own: the last site's weights are those of the sum. The first input is the embedding, and not its half."""
    assert names_below(second, SITE) == names_below(base, SITE) == {"fn", "base", "scale"}
    assert (names_below(base, END), names_below(second, END)) == ({"fn", "base", "scale"}, set())
    assert not same(second.logits(), base.logits())


@STREAMS.key("model.residual_streams.kind", "gated", with_streams())
def _(base: Subject, second: Subject) -> None:
    """Sites and end read what is normalised: no norm is left of branches, and none at the end."""
    assert names_below(second, SITE) == {"norm", "down", "up", "inject"}
    assert names_below(second, END) == {"norm", "down", "up"}
    norms = {name for name in base.weights if name.rpartition(".")[0].endswith("layernorm")} - second.weights.keys()
    assert {name.split(".")[-2] for name in norms} == {"input_layernorm", "pre_mlp_layernorm", "final_layernorm"}


@STREAMS.key("model.residual_streams.kind", "plain", with_streams())
def _(base: Subject, second: Subject) -> None:
    """A sum at the end, without parameters; site k reads stream k mod n."""
    assert names_below(second, END) == set()
    layers = [
        f"decoder.layers.{block}.{site}_streams.static_alpha" for block in (0, 1) for site in ("attention", "ffn")
    ]
    assert [second.weights[name][:, 0].tolist() for name in layers] == [[1, 0], [0, 1], [1, 0], [0, 1]]


@STREAMS.key("model.residual_streams.iterations", 1, with_streams())
def _(base: Subject, second: Subject) -> None:
    """Sums of columns are divided out last, and those of rows are 1 only after many steps."""
    sums = [first_site(subject).maps(streams_of(subject))[2].sum(-1) for subject in (base, second)]
    errors = [float((each - 1).abs().max()) for each in sums]
    assert errors[0] < 1e-3 < errors[1]


@STREAMS.key("model.residual_streams.epsilon", 0.25, with_streams())
def _(base: Subject, second: Subject) -> None:
    """Added to the weights of reads, and not to those of writes."""
    of_base, of_second = (first_site(subject).maps(streams_of(subject)) for subject in (base, second))
    assert same(of_second[0], of_base[0] - 1e-6 + 0.25)
    assert same(of_second[1], of_base[1])


@STREAMS.key("model.residual_streams.norm_epsilon", 3.0, with_streams())
def _(base: Subject, second: Subject) -> None:
    """Logits of reads are the first columns of the normalised streams here."""
    for subject, epsilon in ((base, 1e-5), (second, 3.0)):
        streams = streams_of(subject)
        pre, _, _ = first_site(subject).maps(streams)
        assert same(pre - 1e-6, torch.sigmoid(rms(streams.flatten(2), epsilon)[..., :2]))


@STREAMS.key("model.residual_streams.rank", 7, with_streams(kind="gated"))
def _(base: Subject, second: Subject) -> None:
    for subject, rank in ((base, 320), (second, 7)):
        for owner in (SITE, END):
            assert subject.shapes[f"{owner}down"] == (rank, 64)
            assert subject.shapes[f"{owner}up"] == (64, rank)


@STREAMS.key("model.residual_streams.dynamic", False, with_streams(kind="plain"))
def _(base: Subject, second: Subject) -> None:
    """Weights that follow the streams are gone; what is left keeps its bits."""
    gone = names_below(base, SITE) - names_below(second, SITE)
    assert gone == {"norm_gain", "norm_bias", "alpha_map", "beta_map", "alpha_scale", "beta_scale"}
    assert all(torch.equal(weight, base.weights[name]) for name, weight in second.weights.items())


def mixes_per_step(subject: Subject) -> int:
    """Calls of the kernel that mixes streams, in a step of two microbatches."""
    run = subject.build()
    with patch.object(op, "_mixed", wraps=op._mixed) as mixed:
        run.train(1)
    return mixed.call_count


@STREAMS.key("train.recompute_streams", 1, with_streams())
def _(base: Subject, second: Subject) -> None:
    """Two sites of two blocks; backward mixes again what each feed-forward reads, and the end. The same bits."""
    assert (mixes_per_step(base), mixes_per_step(second)) == (2 * 4, 2 * (4 + 2 + 1))
    for before, after in zip(base.steps, second.steps, strict=True):
        assert (before.loss, before.norm) == (after.loss, after.norm)
        assert all(torch.equal(before.gradients[name], gradient) for name, gradient in after.gradients.items())
        assert all(torch.equal(before.weights[name], weight) for name, weight in after.weights.items())
