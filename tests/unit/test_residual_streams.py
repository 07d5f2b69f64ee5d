"""Several residual streams: sites and ends against recorded tensors, in narrow dtypes, and where they begin.

Legend: b sequences, t tokens, n streams, D hidden size. Recorded tensors are [b, t, ...], the product's [t, b, ...].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from kernels.implementations import Implementation
from kernels.select import Kernels, select_kernels
from megamem.banks.bank import Bank
from megamem.chunk.inputs import Inputs, pack
from megamem.config.model import ModelConfig
from megamem.config.width import MupConfig, Width
from megamem.families.engram.config import EngramConfig
from megamem.families.engram.layer import EngramLayer
from megamem.initialisation.distributions import Constant, Normal
from megamem.parameters.declaration import group_of, matrices_of, width_of
from megamem.placement.sharing import BankSpec, LayerView
from megamem.placement.spans import PlacementConfig
from megamem.residual_streams.config import ResidualStreamsConfig
from megamem.residual_streams.gated import GatedSite, gate_logits
from megamem.residual_streams.initial import distribution
from megamem.residual_streams.make import make_end, make_site
from megamem.residual_streams.mhc import MhcEnd, MhcSite
from megamem.residual_streams.operations import gated_mean, stream_norm, wide_product
from megamem.residual_streams.plain import PlainSite
from megamem.residual_streams.site import Read, StreamsEnd, StreamSite, started
from pretrain.config.keys import ineffective_fields
from tests.golden import TOLERANCE, attend, check, read_case, recorded_weights, relative_error, split_heads

SITES = (
    "mhc_n2",
    "mhc_block_n4",
    "mhc_large_eps_n3",
    "mhc_single_pass_n4",
    "gated_block_n4",
    "gated_large_eps_n2",
    "hc_plain_n4",
    "hc_static_n3",
)
ENDS = ("mhc_head_n4", "gated_mixer_n4")
MODELS = ("model_mhc_2blocks", "model_hc_2blocks")
MODELS_WITH_ENGRAM = ("model_mhc_engram", "model_single_pass_engram", "model_gated_ple")

Branch = Callable[[str, Tensor], Tensor]
"""Takes the name of a site and its input [t, b, D]."""
Memory = Callable[[Tensor], Tensor]
"""Output for the streams [t, b, n, D] before its block."""

MHC = {name: name for name in ("fn", "base", "scale")}
GATED = {
    "norm": "hc_norm.weight",
    "down": "input_mix_weight_down.weight",
    "up": "input_mix_weight_up.weight",
    "inject": "block_inject_weight.weight",
}
PLAIN = {
    "static_alpha": "static_alpha",
    "static_beta": "static_beta",
    "norm_gain": "layer_norm.weight",
    "norm_bias": "layer_norm.bias",
    "alpha_map": "dynamic_alpha_fn",
    "beta_map": "dynamic_beta_fn",
    "alpha_scale": "dynamic_alpha_scale",
    "beta_scale": "dynamic_beta_scale",
}
RECORDED = {"mhc": MHC, "single_pass": MHC, "gated": GATED, "plain": PLAIN}
KINDS = tuple(RECORDED)
KERNELS = select_kernels("torch", device_type="cpu")
IMPLEMENTATIONS: tuple[Implementation, ...] = ("naive", "torch", "auto")


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return select_kernels(request.param, device_type="cpu")


def megatron(hidden_size: int, dtype: torch.dtype, epsilon: float = 1e-5) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden_size,
        num_attention_heads=1,
        layernorm_epsilon=epsilon,
        use_cpu_initialization=True,
        params_dtype=dtype,
    )


def swapped(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gain


def settings_of(config: Mapping[str, Any]) -> ResidualStreamsConfig:
    kind = "plain" if config["kind"] == "hc" else config["kind"]
    return ResidualStreamsConfig(
        count=config["streams"],
        kind=kind,
        iterations=config.get("sinkhorn_steps", 1),
        epsilon=config.get("eps_hc", 1.0),
        norm_epsilon=config["eps_layer_norm"] if kind == "plain" else config["eps_norm"],
        rank=config.get("lowrank", 1),
        dynamic=config.get("dynamic", True),
    )


class Case:
    """Recorded sites and end, built with the recorded weights, and all weights that are not theirs."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype, kernels: Kernels
    ) -> None:
        self.config, self.tensors, self.dtype = config, tensors, dtype
        self.settings = settings_of(config)
        # Norms of streams have their own epsilon.
        self.megatron = megatron(config["hidden"], dtype, epsilon=0.1)
        self.weights = recorded_weights(tensors, dtype)
        self.modules: dict[str, nn.Module] = {}
        kind = "hyper_connection" if self.settings.normalises else "hc"
        self.sites: dict[str, StreamSite] = {}
        for block in range(config["blocks"]):
            for place, name in enumerate(config["sites"]):
                site = make_site(self.megatron, self.settings, kernels, site_number=2 * block + place)
                self.sites[f"block{block}.{name}"] = site
                self._load(site, f"layers.{block}.{name}_{kind}")
        self.end: StreamsEnd = make_end(self.megatron, self.settings, kernels)
        if config.get("contracts") or "mid.contracted" in tensors:
            self._load(self.end, "hyper_connection_mixer" if self.settings.normalises else "hc_head")

    def _load(self, module: nn.Module, name: str) -> None:
        for own, parameter in module.named_parameters():
            theirs = f"{name}.{RECORDED[self.settings.kind][own]}"
            with torch.no_grad():
                parameter.copy_(self._turned(own, self.weights.pop(theirs)).view_as(parameter))
            self.modules[theirs] = module

    @staticmethod
    def _turned(own: str, weight: Tensor) -> Tensor:
        return weight.t() if own == "alpha_map" else weight

    def gradients(self) -> dict[str, Tensor | None]:
        found = {f"param.{name}": weight.grad for name, weight in self.weights.items()}
        own_names = {theirs: own for own, theirs in RECORDED[self.settings.kind].items()}
        for name, module in self.modules.items():
            own = next(own for theirs, own in own_names.items() if name.endswith(f".{theirs}"))
            gradient = module.get_parameter(own).grad
            assert gradient is not None, name
            found[f"param.{name}"] = self._turned(own, gradient).view_as(self.tensors[f"param.{name}"])
        return found

    def norm(self, name: str, x: Tensor) -> Tensor:
        if self.settings.normalises:
            return x
        return rms_norm(x, self.weights[f"{name}.weight"], self.config["eps_norm"])

    def run(
        self, streams: Tensor, carried: Tensor | None, branch: Branch, memory: Memory | None = None
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Streams and carried weights behind all blocks, and what is recorded between."""
        middle: dict[str, Tensor] = {}
        for block in range(self.config["blocks"]):
            middle[f"block{block}.in"] = streams
            if carried is not None:
                middle[f"block{block}.in_pre"] = carried
            if memory is not None and block == self.config["memory_block"]:
                streams = streams + memory(streams)
            for place in self.config["sites"]:
                name = f"block{block}.{place}"
                site = self.sites[name]
                read = site.read(streams, carried)
                out = branch(name, read.update)
                found = {**weights_of(site, streams), "u": read.update, "y": out}
                streams, carried = site.written(streams, out, read), read.carried
                middle |= {f"{name}.{key}": value for key, value in found.items()}
                middle[f"{name}.out"] = streams
        return streams, carried, middle

    def assert_recorded(self, middle: Mapping[str, Tensor]) -> None:
        """All that is recorded between but what memories compute."""
        recorded = {
            name.removeprefix("mid."): value
            for name, value in self.tensors.items()
            if name.startswith("mid.") and ".memory." not in name
        }
        assert middle.keys() == recorded.keys()
        errors = {name: relative_error(swapped(value), recorded[name]) for name, value in middle.items()}
        assert max(errors.values()) <= TOLERANCE[self.dtype][0], errors


def weights_of(site: StreamSite, streams: Tensor) -> dict[str, Tensor]:
    """Weights of a site as they are recorded."""
    with torch.no_grad():
        match site:
            case MhcSite():
                return dict(zip(("pre", "post", "comb"), site.maps(streams), strict=True))
            case PlainSite():
                return dict(zip(("alpha", "beta"), site.maps(streams), strict=True))
            case GatedSite():
                gain = (1 + site.norm).view(streams.shape[2:])
                gate = gate_logits(stream_norm(streams, gain, site.epsilon), site.down, site.up).sigmoid()
                return {"gate": gate, "inject": site.read(streams, None).post}
    raise AssertionError(site)


def case_of(golden_dir: Path, name: str, dtype: torch.dtype, kernels: Kernels) -> Case:
    return Case(*read_case(golden_dir / "streams", name), dtype, kernels)


def leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return swapped(x).to(dtype).detach().contiguous().requires_grad_()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", SITES)
def test_sites_compute_what_is_recorded(golden_dir: Path, name: str, dtype: torch.dtype, kernels: Kernels) -> None:
    case = case_of(golden_dir, name, dtype, kernels)
    inputs = {key: leaf(case.tensors[key], dtype) for key in ("in.streams", "in.pre") if key in case.tensors}

    def branch(name: str, x: Tensor) -> Tensor:
        own = name.replace("block", "layers.")
        return torch.tanh(case.norm(f"{own}_norm", x) @ case.weights[f"{own}_branch.weight"].t())

    out, carried, middle = case.run(inputs["in.streams"], inputs.get("in.pre"), branch)
    case.assert_recorded(middle)
    loss = (swapped(out) * case.tensors["r"].to(dtype)).sum()
    if carried is not None:
        assert relative_error(swapped(carried), case.tensors["out_pre"]) <= TOLERANCE[dtype][0]
        loss = loss + (swapped(carried) * case.tensors["r_pre"].to(dtype)).sum()
    loss.backward()
    of_inputs = {key: swapped(value.grad) for key, value in inputs.items() if value.grad is not None}
    check(swapped(out), {**case.gradients(), **of_inputs}, case.tensors)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", ENDS)
def test_ends_compute_what_is_recorded(golden_dir: Path, name: str, dtype: torch.dtype, kernels: Kernels) -> None:
    case = case_of(golden_dir, name, dtype, kernels)
    streams = leaf(case.tensors["in.streams"], dtype)
    out = case.end(streams, None)
    middle = {"block0.in": streams, "contracted": out}
    if isinstance(case.end, MhcEnd):
        middle["head.pre"] = case.end.weights(streams)
    case.assert_recorded(middle)
    (swapped(out) * case.tensors["r"].to(dtype)).sum().backward()
    assert streams.grad is not None
    check(swapped(out), {**case.gradients(), "in.streams": swapped(streams.grad)}, case.tensors)


def run_model(case: Case, memory: Memory | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [b, t, ids], and what is recorded between, of whole models with attention and feed-forwards by PyTorch."""
    weights = case.weights

    def branch(name: str, x: Tensor) -> Tensor:
        own = name.replace("block", "layers.")
        x = case.norm(f"{own}_norm", swapped(x))
        if own.endswith("ffn"):
            w1, w2, w3 = (weights[f"{own}.w{number}.weight"] for number in (1, 2, 3))
            return swapped(F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2))
        q, k, v = (split_heads(F.linear(x, weights[f"{own}.w{part}.weight"]), case.config["heads"]) for part in "qkv")
        return swapped(F.linear(attend(q, k, v), weights[f"{own}.wo.weight"]))

    hidden = swapped(F.embedding(case.tensors["in.tokens"], weights["embed.weight"]))
    streams, carried, middle = case.run(*started(hidden, case.settings), branch, memory)
    middle["contracted"] = case.end(streams, carried)
    if isinstance(case.end, MhcEnd):
        middle["head.pre"] = case.end.weights(streams)
    last = middle["contracted"] if case.settings.normalises else case.norm("norm", middle["contracted"])
    return swapped(F.linear(last, weights["head.weight"])), middle


def check_model(case: Case, memory: EngramOfStreams | None = None) -> None:
    """Logits, what is recorded between, and every gradient of a whole model."""
    out, middle = run_model(case, memory)
    if case.dtype is torch.float64:
        case.assert_recorded(middle)
    between = {f"mid.{key}": value for key, value in middle.items() if f"grad.mid.{key}" in case.tensors}
    for value in between.values():
        value.retain_grad()
    (out * case.tensors["r"].to(case.dtype)).sum().backward()
    gradients = {key: swapped(value.grad) for key, value in between.items() if value.grad is not None}
    gradients |= {} if memory is None else memory.gradients()
    check(out, {**case.gradients(), **gradients}, case.tensors)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_two_blocks_compute_what_is_recorded(
    golden_dir: Path, name: str, dtype: torch.dtype, kernels: Kernels
) -> None:
    case = case_of(golden_dir, name, dtype, kernels)
    check_model(case)


class EngramOfStreams:
    """A recorded Engram of several streams, built with the recorded weights, of which keys, norms and taps are joined."""

    def __init__(self, case: Case) -> None:
        self.case, config = case, case.config
        is_ple = config["memory"] == "ple"
        self.memory = EngramConfig(
            rules="ple" if is_ple else "engram",
            max_order=max(config["orders"]),
            heads_per_order=config["heads_per_order"],
            rows_per_head=config["rows_per_head"],
            rows_multiple=config.get("rows_multiple", 1),
            value_dim=config["memory_columns"],
            conv_kernel=config.get("conv_kernel", 0),
            projection_biases=config["memory"] == "demo",
            key_epsilon=config.get("eps_key", config["eps_norm"]),
            query_epsilon=config.get("eps_query", config["eps_norm"]),
            conv_epsilon=config.get("eps_conv", config["eps_norm"]) if "conv_kernel" in config else None,
            vocab_size=config["vocab"],
            boundary_id=config["boundary_id"],
            hash_seed=config["hash_seed"],
            placement=PlacementConfig(blocks=(1,)),
        )
        names = {"demo": self._of_demonstration, "v41": self._of_v4_1, "ple": self._of_ple}[config["memory"]]()
        self.joined = {own: [f"layers.1.{each}" for each in theirs] for own, theirs in names.items()}
        weights = {own: [case.weights.pop(name) for name in theirs] for own, theirs in self.joined.items()}
        (table,) = weights.pop("table")
        ops, rows = select_kernels("auto", device_type="cpu"), len(table)
        self.bank = Bank(BankSpec(0, rows, (0,)), self.memory, ops, dtype=case.dtype, device="cpu", replica_rank=0)
        view = LayerView(0, 0, rows, rows)
        self.layer = EngramLayer(
            case.megatron, self.memory, view, self.bank, kernels=ops, name="l", seed=0, num_streams=config["streams"]
        )
        if config["memory"] == "v41":
            # One matrix there: keys of all streams, then values.
            keys = config["streams"] * config["hidden"]
            weights["key_proj"], weights["value_proj"] = ([part] for part in weights.pop("wkv")[0].split((keys, 12)))
        with torch.no_grad():
            self.bank.get_parameter("values").copy_(table)
            for own, theirs in weights.items():
                shift = 1.0 if is_ple and own.endswith("gain") else 0.0
                parameter = self.layer.get_parameter(own)
                parameter.copy_(torch.cat([each.flatten() for each in theirs]).view_as(parameter) + shift)
            self.layer.multipliers.copy_(case.tensors["const.multipliers"])
        assert self.layer.sizes.tolist() == case.tensors["const.table_sizes"].tolist()

    def _of_demonstration(self) -> dict[str, list[str]]:
        streams = range(self.case.config["streams"])
        return {
            "table": ["engram.multi_head_embedding.embedding.weight"],
            "key_proj": [f"engram.key_projs.{i}.weight" for i in streams],
            "key_bias": [f"engram.key_projs.{i}.bias" for i in streams],
            "value_proj": ["engram.value_proj.weight"],
            "value_bias": ["engram.value_proj.bias"],
            "key_gain": [f"engram.norm1.{i}.weight" for i in streams],
            "query_gain": [f"engram.norm2.{i}.weight" for i in streams],
            "conv_gain": [f"engram.short_conv.norms.{i}.weight" for i in streams],
            "conv": ["engram.short_conv.conv.weight"],
        }

    def _of_v4_1(self) -> dict[str, list[str]]:
        return {
            "table": ["engram.embed.weight"],
            "wkv": ["engram.wkv.weight"],
            "key_gain": ["engram.k_weight"],
            "query_gain": ["engram.q_weight"],
        }

    def _of_ple(self) -> dict[str, list[str]]:
        names = {"key_gain": "norm_key", "query_gain": "norm_query", "conv_gain": "norm_conv", "conv": "conv1d"}
        own = {own: [f"ple.{theirs}.weight"] for own, theirs in names.items()}
        projections = {each: [f"ple.{each}.weight"] for each in ("key_proj", "value_proj")}
        return {"table": ["ple.ple_embedding.ngram_embedding.weight"], **projections, **own}

    def __call__(self, streams: Tensor) -> Tensor:
        ids = self.case.tensors["in.tokens"]
        inputs = Inputs(pack(ids, torch.arange(ids.shape[1]).expand_as(ids)))
        mask = self.case.tensors.get("in.memory_mask")
        rows = swapped(self.case.tensors["in.rows"]).permute(2, 0, 1)
        if mask is None:
            assert torch.equal(self.layer.alone(inputs).addresses_of(0, len(rows)), rows)
            out: Tensor = self.layer(streams, self.layer.alone(inputs))
            return out
        # No token of a pretraining run is masked: windows around those that are, and their gates, are not the layer's.
        out = self.layer(streams, inputs.with_addresses(rows))
        return out * swapped(mask)[..., None, None]

    def gradients(self) -> dict[str, Tensor]:
        found = {
            own.replace("lookup.values", "table"): parameter.grad for own, parameter in self.layer.named_parameters()
        }
        if "wkv" in self.joined:
            found["wkv"] = torch.cat((found.pop("key_proj"), found.pop("value_proj")))
        named = {}
        for own, theirs in self.joined.items():
            parts = found.pop(own).flatten().chunk(len(theirs))
            for name, part in zip(theirs, parts, strict=True):
                named[f"param.{name}"] = part.view_as(self.case.tensors[f"param.{name}"])
        assert not found
        return named


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", MODELS_WITH_ENGRAM)
def test_models_with_engram_compute_what_is_recorded(
    golden_dir: Path, name: str, dtype: torch.dtype, kernels: Kernels
) -> None:
    """A key, norms and a convolution per stream; the carried weights are those before the memory was added."""
    case = case_of(golden_dir, name, dtype, kernels)
    check_model(case, EngramOfStreams(case))


def test_every_recorded_case_is_tested(golden_dir: Path) -> None:
    recorded = {path.stem for path in (golden_dir / "streams").glob("*.safetensors")}
    assert recorded == {*SITES, *ENDS, *MODELS, *MODELS_WITH_ENGRAM}


def test_gradients_of_operations_are_those_of_differences() -> None:
    """Without a part of the inputs' gradients, too."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    streams = drawn(3, 2, 4, 5)
    assert torch.autograd.gradcheck(stream_norm, (streams, drawn(4, 5), 0.1))
    assert torch.autograd.gradcheck(stream_norm, (streams.detach(), drawn(4, 5), 0.1))
    assert torch.autograd.gradcheck(gated_mean, (streams, drawn(3, 2, 4, 5)))
    assert torch.autograd.gradcheck(wide_product, (streams, drawn(6, 5)))


def everything(settings: ResidualStreamsConfig, dtype: torch.dtype, wide: bool) -> dict[str, Tensor]:
    """Outputs and gradients of a site and the end, in `dtype`, or in float64 of numbers that `dtype` has."""
    hidden_size, n = 64, settings.count
    used = torch.float64 if wide else dtype
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(used)

    config = megatron(hidden_size, used)
    site, end = make_site(config, settings, KERNELS, site_number=1), make_end(config, settings, KERNELS)
    modules = {"site": site, "end": end}
    with torch.no_grad():
        for module in modules.values():
            for parameter in module.parameters():
                std = 0.5 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
                parameter.copy_((std * torch.randn(parameter.shape, generator=generator)).to(dtype))
    streams, out = drawn(6, 2, n, hidden_size).requires_grad_(), drawn(6, 2, hidden_size).requires_grad_()
    carried = drawn(6, 2, n).to(torch.promote_types(used, torch.float32)).requires_grad_()
    read = site.read(streams, carried if settings.carries_read else None)
    after = site.written(streams, out, read)
    last = end(after, read.carried)
    outputs = (read.update, after, last)
    torch.stack([(value * drawn(*value.shape)).sum() for value in outputs]).sum().backward()
    found = {"update": read.update, "after": after, "last": last, "post": read.post}
    found |= {"streams": streams.grad, "out": out.grad}
    found |= {"mix": read.mix} if read.mix is not None else {}
    found |= {"carried": read.carried, "of_carried": carried.grad} if read.carried is not None else {}
    for name, module in modules.items():
        found |= {f"{name}.{own}": parameter.grad for own, parameter in module.named_parameters()}
    return {name: value.detach() for name, value in found.items()}


# Sums over hundreds of columns err by some units in the last place; what is rounded to bf16 thrice, by half a unit each.
LARGEST_ERROR = {torch.float32: 16 * 2.0**-23, torch.bfloat16: 2 * 2.0**-7}


@pytest.mark.parametrize("dtype", list(LARGEST_ERROR), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_streams_are_close_to_wide_ones(kind: Any, dtype: torch.dtype) -> None:
    settings = ResidualStreamsConfig(kind=kind, rank=8)
    found, exact = everything(settings, dtype, wide=False), everything(settings, dtype, wide=True)
    assert found["update"].dtype == found["after"].dtype == found["last"].dtype == found["streams"].dtype == dtype
    maps = {"post", "mix", "carried"} & found.keys()
    assert all(found[name].dtype == torch.float32 for name in maps)
    # Gradients of single numbers are sums of terms that cancel.
    errors = {name: relative_error(value, exact[name]) for name, value in found.items() if value.numel() > 1}
    assert max(errors.values()) <= LARGEST_ERROR[dtype], errors
    if not settings.normalises:
        # They are maps of streams that nothing has rounded before.
        assert max(errors[name] for name in maps) <= LARGEST_ERROR[torch.float32], errors


@pytest.mark.parametrize("kind", KINDS)
def test_backward_keeps_no_streams_in_fp32(kind: Any) -> None:
    settings, config = ResidualStreamsConfig(kind=kind, rank=8), megatron(64, torch.bfloat16)
    site, end = make_site(config, settings, KERNELS, site_number=0), make_end(config, settings, KERNELS)
    for parameter in (*site.parameters(), *end.parameters()):
        nn.init.normal_(parameter)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    streams, carried = started(torch.randn(32, 2, 64, dtype=torch.bfloat16, requires_grad=True), settings)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        read = site.read(streams, carried)
        end(site.written(streams, read.update, read), read.carried)
    large = [tensor for tensor in kept if tensor.numel() >= streams.numel()]
    assert large
    assert {tensor.dtype for tensor in large} == {torch.bfloat16}
    # X itself and what is written; the gated residual keeps normalised streams and logits of each read, too.
    assert len({tensor.untyped_storage().data_ptr() for tensor in large}) <= (6 if settings.normalises else 2)


def made(kind: Any, dtype: torch.dtype = torch.float64, site_number: int = 0, **settings: Any) -> tuple[Any, Any]:
    """A site and an end with initial weights of a model of 16 columns, of which random ones are 0."""
    own = ResidualStreamsConfig(kind=kind, **settings)
    config, model = megatron(16, dtype), MODEL
    site, end = make_site(config, own, KERNELS, site_number=site_number), make_end(config, own, KERNELS)
    with torch.no_grad():
        for name, parameter in (*site.named_parameters(), *end.named_parameters()):
            given = distribution(name, own, model, is_end=False)
            parameter.fill_(given.value if isinstance(given, Constant) else 0.0 if given is not None else torch.nan)
    site.set_initial()
    return site, end


MODEL = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, vocab_size=32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "dynamic"), [(1, True), (1, False), (4, True)])
def test_hyper_connections_begin_as_the_plain_residual(count: int, dynamic: bool, dtype: torch.dtype) -> None:
    """Every stream is what one stream would be, to the bit."""
    plain = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    streams = None
    for number in range(5):
        site, end = made("plain", dtype, number, count=count, dynamic=dynamic)
        if streams is None:
            streams, carried = started(plain, site.settings)
            assert carried is None
        read = site.read(streams, None)
        assert torch.equal(read.update, plain)
        streams, plain = site.written(streams, plain.sin(), read), plain + plain.sin()
        assert torch.equal(streams, plain.unsqueeze(2).expand_as(streams))
    assert torch.equal(end(streams, None), count * plain)


def test_every_site_of_hyper_connections_reads_another_stream() -> None:
    for number in range(7):
        site, _ = made("plain", site_number=number, count=3)
        assert site.static_alpha[:, 0].tolist() == [float(stream == number % 3) for stream in range(3)]
        assert torch.equal(site.static_alpha[:, 1:], torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["mhc", "single_pass"])
def test_streams_are_averaged_where_maps_are_zero(kind: Any) -> None:
    site, end = made(kind)
    hidden = torch.randn(5, 2, 16, dtype=torch.float64)
    streams, carried = started(hidden, site.settings)
    read = site.read(streams, carried)
    n, epsilon = site.settings.count, site.settings.epsilon
    assert torch.equal(read.post, torch.ones_like(read.post))
    assert read.mix is not None
    torch.testing.assert_close(read.mix, torch.full_like(read.mix, 1 / n), rtol=2 * epsilon, atol=0)
    pre = torch.full_like(read.post, 0.5 + epsilon)
    if kind == "mhc":
        torch.testing.assert_close(read.update, n / 2 * (1 + 2 * epsilon) * hidden)
        torch.testing.assert_close(end(streams, None), n / 2 * (1 + 2 * epsilon) * hidden)
    else:
        assert torch.equal(read.update, hidden)
        assert torch.equal(read.carried, pre)
        torch.testing.assert_close(end(streams, read.carried), KERNELS.weigh_streams(streams, pre))


def test_gates_are_half_open_where_maps_are_zero() -> None:
    site, end = made("gated", norm_epsilon=1e-12)
    hidden = torch.randn(5, 2, 16, dtype=torch.float64)
    streams, _ = started(hidden, site.settings)
    read = site.read(streams, None)
    half = rms_norm(hidden, torch.ones(16, dtype=torch.float64), 1e-12) / 2
    torch.testing.assert_close(read.update, half)
    torch.testing.assert_close(end(streams, None), half)
    assert torch.equal(read.post, torch.ones_like(read.post))
    assert read.mix is None


def test_weights_of_a_read_learn_from_the_next_site_alone() -> None:
    """Single pass: the next site's input is the only one that a site's own read weights reach."""
    site, _ = made("single_pass")
    nn.init.normal_(site.fn)
    n = site.settings.count
    streams = torch.randn(5, 2, n, 16, dtype=torch.float64)
    carried = torch.rand(5, 2, n, dtype=torch.float64, requires_grad=True)
    read = site.read(streams, carried)
    first, second = torch.randn_like(read.update), torch.randn_like(read.update)
    after = site.written(streams, read.update, read)
    (site.fn.grad,) = torch.autograd.grad((after.sum(2) * first).sum(), site.fn, retain_graph=True)
    assert site.fn.grad[:n].count_nonzero() == 0
    assert site.fn.grad[n:].count_nonzero() > 0
    assert read.carried is not None
    (of_next,) = torch.autograd.grad(
        (KERNELS.weigh_streams(after, read.carried) * second).sum(), site.fn, retain_graph=True
    )
    assert of_next[:n].count_nonzero() > 0
    (of_carried,) = torch.autograd.grad((read.update * first).sum(), carried)
    torch.testing.assert_close(of_carried, (streams * first.unsqueeze(2)).sum(-1))


@pytest.mark.parametrize("mixes", [False, True])
def test_an_output_that_joins_later_is_added_as_if_it_were_written(mixes: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    streams, out, later = (torch.randn(5, 2, *shape, generator=generator) for shape in ((4, 16), (16,), (16,)))
    mix = torch.rand(5, 2, 4, 4, generator=generator) if mixes else None
    read = Read(out, torch.rand(5, 2, 4, generator=generator), mix, None)
    site = make_site(megatron(16, torch.float32), ResidualStreamsConfig(), KERNELS, site_number=0)
    after = site.joined(site.written(streams, out, read), later, read)
    torch.testing.assert_close(after, site.written(streams, out + later, read))
    loops = torch.stack(
        [
            read.post[..., j, None] * out
            + (streams[:, :, j] if mix is None else sum(mix[..., i, j, None] * streams[:, :, i] for i in range(4)))
            for j in range(4)
        ],
        2,
    )
    torch.testing.assert_close(site.written(streams, out, read), loops)
    assert torch.equal(site.joined(streams, out, read), site.written(streams, out, replace(read, mix=None)))


@pytest.mark.parametrize(
    "settings", [{"kind": kind} for kind in KINDS] + [{"kind": "plain", "dynamic": False}], ids=str
)
def test_plans_count_what_there_is(settings: Any) -> None:
    own = ResidualStreamsConfig(**settings)
    config = megatron(16, torch.float32)
    site, end = make_site(config, own, KERNELS, site_number=0), make_end(config, own, KERNELS)
    for module, shapes, number in (
        (site, own.site_shapes(16), own.num_site_parameters(16)),
        (end, own.end_shapes(16), own.num_end_parameters(16)),
    ):
        assert {name: tuple(parameter.shape) for name, parameter in module.named_parameters()} == shapes
        assert sum(parameter.numel() for parameter in module.parameters()) == number


def test_published_models_have_their_numbers(golden_dir: Path) -> None:
    published = json.loads((golden_dir / "streams" / "published_constants.json").read_text(encoding="utf-8"))
    v4_1, qwen = published["deepseek_v4.1_flash"], published["qwen3.8_flash_next"]
    single_pass, gated = ResidualStreamsConfig(kind="single_pass"), ResidualStreamsConfig(kind="gated")
    assert single_pass.num_site_parameters(v4_1["hidden"]) == v4_1["parameters_per_site"]
    assert single_pass.num_end_parameters(v4_1["hidden"]) == 0
    assert gated.num_site_parameters(qwen["hidden"]) == qwen["parameters_per_site"]
    assert gated.num_end_parameters(qwen["hidden"]) == qwen["parameters_of_last_read"]
    v4 = next(value for key, value in published.items() if key.startswith("deepseek_v4 "))
    for width, number in v4["parameters_per_site"].items():
        assert ResidualStreamsConfig().num_site_parameters(int(width)) == number
        assert ResidualStreamsConfig().num_end_parameters(int(width)) == v4["head_parameters"][width]


def declared(kind: Any) -> Iterator[tuple[str, str, bool, Width]]:
    """Name, group, whether it is a hidden matrix, and rule for the width, of every parameter of a site and of the end."""
    site, end = made(kind)
    for name, parameter in {**dict(site.named_parameters()), **dict(end.named_parameters())}.items():
        yield name, group_of(name, parameter), matrices_of(parameter) is not None, width_of(parameter)


def test_hidden_matrices_and_gates_are_told_apart() -> None:
    maps = {found[0]: found[1:] for kind in KINDS for found in declared(kind) if found[1] == "backbone"}
    gate = ("backbone", False, Width.INPUTS)
    assert maps == {
        "fn": gate,
        "inject": gate,
        "alpha_map": gate,
        "beta_map": gate,
        "down": ("backbone", True, Width.INPUTS),
        "up": ("backbone", True, Width.OUTPUTS),
    }
    rest = {found for kind in KINDS for found in declared(kind) if found[0] not in maps}
    # Gains of the last read of gated streams are the last ones before logits.
    assert {found[1:] for found in rest} == {
        ("backbone_no_decay", False, Width.NEITHER),
        ("backbone_no_decay", False, Width.LOGITS),
    }
    gains = [width for name, _, _, width in declared("gated") if name == "norm"]
    assert gains == [Width.LOGITS]


def test_initial_linears_follow_the_width() -> None:
    wide = replace(MODEL, init_std=0.02, mup=MupConfig(base_hidden_size=4))
    gated, mhc = ResidualStreamsConfig(kind="gated"), ResidualStreamsConfig()
    for name, own, std in (("down", gated, 0.01), ("inject", gated, 0.01), ("up", gated, 0.02), ("fn", mhc, 0.01)):
        assert distribution(name, own, wide, is_end=False) == Normal(std)
        assert distribution(name, own, replace(wide, mup=None), is_end=False) == Normal(0.02)
    assert distribution("static_alpha", ResidualStreamsConfig(kind="plain"), wide, is_end=False) is None
    assert distribution("alpha_scale", ResidualStreamsConfig(kind="plain"), wide, is_end=False) == Constant(0.01)
    with pytest.raises(AssertionError, match="no initial distribution is defined for fn of gated streams"):
        distribution("fn", gated, wide, is_end=False)


def test_values_outside_of_their_limits_are_refused() -> None:
    for name, value, said in (
        ("count", 0, "a model has one stream or more"),
        ("iterations", 0, "at least 1"),
        ("rank", 0, "at least 1"),
        ("epsilon", 0.0, "above 0"),
        ("norm_epsilon", -1.0, "above 0"),
    ):
        with pytest.raises(ValueError, match=rf"ResidualStreamsConfig\.{name} is {value}: .*{said}"):
            ResidualStreamsConfig(**{name: value})


@pytest.mark.parametrize(
    ("settings", "unread"),
    [
        ({"kind": "mhc"}, ("rank", "dynamic")),
        ({"kind": "single_pass"}, ("rank", "dynamic")),
        ({"kind": "gated"}, ("iterations", "epsilon", "dynamic")),
        ({"kind": "plain"}, ("iterations", "epsilon", "rank")),
        ({"kind": "plain", "dynamic": False}, ("iterations", "epsilon", "rank", "norm_epsilon")),
    ],
    ids=str,
)
def test_fields_of_other_kinds_have_no_effect(settings: Any, unread: tuple[str, ...]) -> None:
    own = ResidualStreamsConfig(**settings)
    assert {field.key for field in ineffective_fields(own)} == set(unread)
    assert own.normalises == (own.kind == "gated")
    assert own.carries_read == (own.kind == "single_pass")


def test_norms_take_the_models_epsilon_unless_they_have_their_own() -> None:
    config = megatron(16, torch.float32, epsilon=0.25)
    for own, epsilon in ((None, 0.25), (0.5, 0.5)):
        settings = ResidualStreamsConfig(norm_epsilon=own)
        assert (
            make_site(config, settings, KERNELS, site_number=0).epsilon
            == make_end(config, settings, KERNELS).epsilon
            == epsilon
        )
