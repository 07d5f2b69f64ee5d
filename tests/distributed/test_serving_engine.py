"""Exported folders in vLLM itself, beside the model that was trained: 32 requests at once, in fp32.

`make serve-check` installs the engine in an environment of its own, and names its interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import export
from huggingface_models import BASE, GRID, HEADS, INSERTED, LINEAR, MOE, NGRAMS, V2, VOCAB_SIZE
from tiny_runs import SHARED, build_chunks, joined
from torch import Tensor

from megamem.config import LatentAttentionConfig, ModelConfig
from megamem.families.engram.config import EngramConfig
from megamem.families.lave.config import LaveConfig
from megamem.families.linear_memory.config import LinearConfig
from megamem.families.memory_plus.config import MemoryPlusConfig
from megamem.families.midus.config import MidusConfig
from megamem.families.move.config import MoveConfig
from megamem.families.peer.config import PeerConfig
from megamem.families.pkm.config import PkmConfig
from megamem.families.tide.config import TideConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.sharing import SharingConfig
from megamem.spans import PlacementConfig
from pretrain.convert.huggingface.card import Figures
from pretrain.data.tokenizer import ByteTokenizer
from tests.whole_tensors import whole_tensors

ENGINE = os.environ.get("MEGAMEM_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(
    not ENGINE, reason="MEGAMEM_VLLM_PYTHON is not set: `make serve-check` installs vLLM, and sets it"
)

NUM_REQUESTS, NUM_TOKENS, LENGTH = 32, 12, 128
# The narrowest head of vLLM's attention on CPUs.
SERVED = replace(BASE, hidden_size=128, ffn_hidden_size=128)
LATENT = replace(SERVED, num_query_groups=None, latent_attention=LatentAttentionConfig(24, 16))
SKIPPING = UltraMemConfig(num_keys=12, key_dim=8, value_dim=16, top_k=4, placement=PlacementConfig(spans="0:2/1:1/2:3"))
MODELS: dict[str, ModelConfig] = {
    "v2": replace(SERVED, memory=replace(V2, sharing=SharingConfig("block", 2))),
    "v2, permutation, beside experts, untied": replace(
        SERVED, memory=replace(V2, shuffle="table"), moe=MOE, tied_embeddings=False
    ),
    "experts": replace(SERVED, moe=replace(MOE, renormalise=True), qk_norm=False),
    "ultramem": replace(SERVED, memory=SKIPPING),
    "pkm": replace(SERVED, memory=PkmConfig(value_dim=SERVED.hidden_size, **GRID)),
    "memory_plus": replace(SERVED, memory=MemoryPlusConfig(value_dim=16, biases=True, output_gate=True, **GRID)),
    "peer": replace(SERVED, memory=PeerConfig(value_dim=SERVED.hidden_size, biases=True, **GRID)),
    "linear_memory": replace(
        SERVED, memory=LinearConfig(**{**LINEAR, "value_dim": SERVED.hidden_size}, placement=INSERTED)
    ),
    "midus": replace(
        SERVED, memory=MidusConfig(**HEADS, query_from="stream_and_heads", placement=PlacementConfig(blocks=(1, 2)))
    ),
    "move": replace(
        SERVED, memory=MoveConfig(value_dim=SERVED.query_groups * SERVED.attention_head_dim, num_gate_heads=2)
    ),
    "engram": replace(
        SERVED, memory=EngramConfig(**NGRAMS, max_order=4, conv_kernel=3, placement=PlacementConfig(blocks=(0, 2)))
    ),
    "tide": replace(SERVED, memory=TideConfig(value_dim=SERVED.hidden_size, num_tables=3)),
    "latents": LATENT,
    "lave over latents of values": replace(LATENT, memory=LaveConfig(value_dim=24, num_gate_heads=2)),
    "move over latents, beside experts": replace(
        LATENT,
        moe=MOE,
        latent_attention=LatentAttentionConfig(24, 16, query_latent_dim=20),
        memory=MoveConfig(value_dim=24, num_gate_heads=3, mixed_into="latents"),
    ),
    "biases": replace(SERVED, qk_norm=False, qkv_bias=True, memory=replace(V2, sharing=SharingConfig("block", 2))),
}
SHORT_BLOCKS: dict[str, Any] = {"block_size": 32, "max_model_len": LENGTH}
# By a name: the model, and options of `LLM`. Half of the requests begin alike, longer than some blocks of the cache; the
# second round finds that prefix. Steps of 48 tokens cut prompts into chunks, between which others' tokens are decoded.
CHUNKED = {**SHORT_BLOCKS, "enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 48}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {**SHORT_BLOCKS, "enable_prefix_caching": False}) for name in MODELS},
    "v2, chunks and prefixes": ("v2", CHUNKED),
    "ultramem, chunks and prefixes": ("ultramem", CHUNKED),
    "tide, chunks and prefixes": ("tide", CHUNKED),
    "engram, chunks and prefixes": ("engram", CHUNKED),
    **{
        f"{name}, tensor parallelism": (name, {**SHORT_BLOCKS, "tensor_parallel_size": 2})
        for name in ("v2, permutation, beside experts, untied", "move over latents, beside experts", "move")
    },
    "v2, tables in their files": ("v2", {**CHUNKED, "hf_overrides": {"memory_device": "cpu"}}),
    "v2, some rows out of their files": (
        "v2",
        {**SHORT_BLOCKS, "enable_prefix_caching": False, "hf_overrides": {"memory_device": "cpu", "hot_rows": 16}},
    ),
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    lengths = torch.randint(1, 60, (NUM_REQUESTS,), generator=generator).tolist()
    shared, *others = (torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (40, *lengths))
    return [shared + own if number % 2 else own for number, own in enumerate(others)]


def greedy(chunk: Any) -> tuple[Tensor, Tensor]:
    """Tokens [requests, new] that the trained model prefers, and their log-probabilities, by full passes."""
    given = prompts()
    ends = torch.tensor([len(prompt) for prompt in given])
    tokens = torch.zeros(NUM_REQUESTS, int(ends.max()) + NUM_TOKENS, dtype=torch.int64)
    for row, prompt in zip(tokens, given, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows, chosen, logprobs = torch.arange(NUM_REQUESTS), [], []
    for number in range(NUM_TOKENS):
        # What is behind a row's end, nobody sees who is before it.
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        best, token = chunk(tokens, positions, None)[rows, ends + number - 1, :VOCAB_SIZE].log_softmax(-1).max(-1)
        tokens[rows, ends + number] = token
        chosen.append(token)
        logprobs.append(best)
    return torch.stack(chosen, 1), torch.stack(logprobs, 1)


@pytest.fixture(scope="module")
def trained_and_served(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """By a model's name what it says itself; and by a job's name what vLLM says."""
    root = tmp_path_factory.mktemp("served")
    folders = {name: root / str(number) for number, name in enumerate(MODELS)}

    def main() -> dict[str, tuple[Tensor, Tensor]]:
        found = {}
        generator = torch.Generator().manual_seed(3)
        with joined(SHARED) as groups:
            for name, model in MODELS.items():
                config = replace(SHARED, model=model, train=replace(SHARED.train, sequence_length=LENGTH))
                (chunk,) = build_chunks(config, groups, vocab_size=VOCAB_SIZE)
                with torch.no_grad():
                    for parameter in chunk.parameters():
                        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
                    chunk.begin_step()
                    found[name] = greedy(chunk.eval())
                folders[name].mkdir()
                small: Any = {"tokenizer": ByteTokenizer(), "vocab_size": VOCAB_SIZE, "figures": Figures(1, 2)}
                export(config, whole_tensors(chunk), folders[name], **small)
        return found

    (expected,) = run_ranks(main, 1, timeout_s=300)
    jobs = {
        job: {
            "folder": str(folders[name]),
            "options": options,
            "prompts": prompts(),
            "num_tokens": NUM_TOKENS,
            "rounds": 2 if options.get("enable_prefix_caching") else 1,
        }
        for job, (name, options) in JOBS.items()
    }
    (root / "requests.json").write_text(json.dumps(jobs))
    script = Path(__file__).parents[1] / "vllm_answers.py"
    assert ENGINE is not None
    command = [ENGINE, script, root / "requests.json", root / "answers.json"]
    # In a folder of its own: packages of this one are not the engine's.
    with (root / "engine.log").open("w") as log:
        done = subprocess.run(
            command,
            cwd=root,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=1800,
            env={**os.environ, "PYTHONPATH": "", "HF_HOME": str(root / "home")},
        )
    assert done.returncode == 0, (root / "engine.log").read_text()[-4000:]
    return expected, json.loads((root / "answers.json").read_text())


@pytest.mark.parametrize("job", JOBS)
def test_32_requests_at_once_are_answered_as_by_the_trained_model(trained_and_served: Any, job: str) -> None:
    expected, served = trained_and_served
    name, options = JOBS[job]
    tokens, logprobs = expected[name]
    answers = served[job]
    assert not isinstance(answers, str), answers
    assert [answer["tokens"] for answer in answers] == tokens.tolist()
    found = torch.tensor([answer["logprobs"] for answer in answers])
    torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-4)
    # And not for want of anything to tell apart.
    assert tokens.unique().numel() > 20
    if options.get("enable_prefix_caching"):
        assert all(answer["num_cached"] >= 32 for answer in answers[1::2])
