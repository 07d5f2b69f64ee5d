"""Nothing in a training step of the memory, or in attention, waits for the device, or makes a tensor whose shape
depends on data.

Two nets: the source is searched for calls that do, and the memory and attention of one of 512 ranks run forward and
backward on fake tensors, which have no data to look at.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.families.peer.config import PeerConfig
from megamem.families.ultramem.config import UltraMemConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.placement.sharing import SharingConfig
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from tests.microbatch import some_inputs

REPOSITORY = Path(__file__).parents[2]

SYNCHRONISING = {"item", "tolist", "cpu", "numpy", "synchronize"}
DATA_DEPENDENT_SHAPES = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"}
CONVERSIONS = {"float", "int", "bool"}
KNOWN_TO_THE_HOST = {"rank", "size"}

OUTSIDE_OF_STEPS = {
    "kernels/parity.py",
    "megamem/initialisation/initialise.py",
    "megamem/initialisation/outputs.py",
    "megamem/releases/names.py",
    # Tables that are only read.
    "megamem/token_tables/codec.py",
    "megamem/token_tables/fetched.py",
}
STEP_PATH = [
    *sorted((REPOSITORY / "megamem").rglob("*.py")),
    *sorted((REPOSITORY / "kernels").rglob("*.py")),
    *(REPOSITORY / "parallel" / name for name in ("exchange.py", "sharded_bank.py")),
    *sorted((REPOSITORY / "parallel").glob("context*.py")),
]
FILES = [path for path in STEP_PATH if path.relative_to(REPOSITORY).as_posix() not in OUTSIDE_OF_STEPS]


def waits(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Calls that wait for the device, or have a shape that does, and no comment above that says why."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
            # `where` with a condition alone is `nonzero`.
            found = name in SYNCHRONISING | DATA_DEPENDENT_SHAPES or (name == "where" and len(node.args) == 1)
            found |= name in ("svd", "svdvals", "eigh")
        elif isinstance(node.func, ast.Name):
            name = node.func.id
            # Converting a number costs nothing; converting what a tensor's method returned waits.
            inner: Any = node.args[0] if node.args else None
            is_result = isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute)
            found = name in CONVERSIONS and is_result and inner.func.attr not in KNOWN_TO_THE_HOST
        else:
            continue
        if found and not any("Host sync" in line for line in lines[max(0, node.lineno - 4) : node.lineno]):
            yield node.lineno, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_call_waits_for_the_device_without_saying_why(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = [f"line {line}: {name}" for line, name in waits(ast.parse(text), text.splitlines())]
    assert not found, "say `Host sync: <why>` in a comment above, or do without"


@pytest.mark.parametrize(
    "line",
    [
        "n = x.item()",
        "n = x.sum().tolist()",
        "i = x.nonzero()",
        "i = torch.where(x)",
        "f = float(x.sum())",
        "torch.linalg.svd(x)",
    ],
)
def test_a_call_that_waits_is_found(line: str) -> None:
    assert list(waits(ast.parse(line), [line]))
    excused = f"# Host sync: once per run.\n{line}"
    assert not list(waits(ast.parse(excused), excused.splitlines()))


def test_what_does_not_wait_is_left_alone() -> None:
    text = "x = torch.where(a, b, c)\nn = int(text)\ny = x.float()\nz = x.cuda()\n"
    assert not list(waits(ast.parse(text), text.splitlines()))


MODELS = {
    "ultramem_v2": UltraMemV2Config(
        num_keys=64,
        value_dim=128,
        pre_value_dim=64,
        top_k=16,
        sharing=SharingConfig("block", 2),
        key_balance_weight=0.1,
    ),
    "ultramem": UltraMemConfig(num_keys=64, value_dim=192, top_k=16, num_cores=3, num_heads=2),
    "peer": PeerConfig(num_keys=64, value_dim=256, top_k=16),
}


def config_of(memory: MemoryConfig) -> RunConfig:
    """TP 8 x CP 2 x PP 4 x DP 8, tables over 64 ranks."""
    model = ModelConfig(
        num_layers=8, hidden_size=256, num_attention_heads=8, ffn_hidden_size=512, vocab_size=1024, memory=memory
    )
    return RunConfig(
        model=model,
        parallel=ParallelConfig(tensor=8, context=2, pipeline=4, memory=64),
        train=TrainConfig(sequence_length=1024, micro_batch_size=1, precision="bf16"),
    )


def passes_of_a_rank(rank: int) -> dict[str, tuple[int, ...]]:
    """Forward and backward of every memory layer and an attention of a rank's stage on fake tensors; the shape of its
    table.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from parallel.groups import initialise_groups
    from parallel.machine.cpu import cuda_on_cpu
    from pretrain.engine import build
    from pretrain.engine.megatron import parallel_sizes

    # Fake tensors have no values to draw. This process is a fork that ends here: nothing has to be put back.
    build.initialise = lambda *_, **__: None  # type: ignore[assignment]
    # There is no gloo group without its other ranks.
    with_gloo = parallel_state.initialize_model_parallel
    parallel_state.initialize_model_parallel = lambda **sizes: with_gloo(
        **{**sizes, "create_gloo_process_groups": False}
    )
    dist.init_process_group("fake", rank=rank, world_size=512, store=FakeStore())
    shapes = {}
    with cuda_on_cpu():
        sizes = parallel_sizes(config_of(MODELS["peer"]))
        groups = initialise_groups(sizes, device=torch.device("cpu"), timeout_minutes=1, seed=1)
        for name, memory in MODELS.items():
            with FakeTensorMode(allow_non_fake_inputs=True):
                (chunk,) = build.build_chunks(config_of(memory), groups, vocab_size=1024)
                chunk.begin_step()
                # A microbatch's 1024 tokens over 8 tensor- and 2 context-parallel ranks.
                hidden = torch.randn(64, 1, 256, dtype=torch.bfloat16, requires_grad=True)
                for table in chunk.banks.parameters():
                    table.main_grad = torch.zeros(table.shape)
                out = hidden
                for layer in chunk.memory_layers:
                    out = out + layer(out, some_inputs(out))
                out.sum().backward()
                assert hidden.grad is not None
                assert all(p.grad is not None for layer in chunk.memory_layers for p in layer.parameters())
                assert all(table.grad_added_to_main_grad for table in chunk.banks.parameters())
                # The tokens of a context-parallel rank, one of 8 heads.
                heads = torch.randn(3, 512, 1, 1, 32, dtype=torch.bfloat16, requires_grad=True)
                chunk.decoder.layers[0].self_attention.core_attention(*heads, None).sum().backward()
                assert heads.grad is not None
                shapes[name] = tuple(next(iter(chunk.banks.values())).values.shape)
    dist.destroy_process_group()
    return shapes


def test_one_of_512_ranks_runs_without_data_to_look_at() -> None:
    from tests.deadline import launch_within

    for rank in (0, 511):
        (shapes,) = launch_within(lambda rank=rank: passes_of_a_rank(rank), 1, timeout_s=120, num_threads=1)
        assert shapes == {"ultramem_v2": (2 * 64**2, 2), "ultramem": (64**2, 3), "peer": (64**2, 4)}
