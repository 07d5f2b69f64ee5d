"""`megamem serve`: the folder that it makes and the server that it becomes; requests over a socket, where an engine is."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import TINY, Megamem, Start, wait_until
from engine_stand_in import engine_stand_in

from tests.free_ports import free_ports
from tests.rotation import in_turn
from tests.unit.data.chat_templates import QWEN, folder_of, without_generation
from tests.unit.data.kinds_of_tokenizers import END

SERVING = ("transformers", "fastapi", "uvicorn", "openai", "accelerate")
ENGINE = os.environ.get("MEGAMEM_VLLM_PYTHON")
# The request that the page shows, word for word.
PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
(CURL,) = re.findall(r"^curl .*\\\n.*$", PAGE, re.MULTILINE)
BODY: dict[str, Any] = json.loads(shlex.split(CURL)[-1])


def test_the_newest_checkpoint_is_exported_once_and_served(megamem: Megamem, saved_run: Path, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "run" / "exported" / "step_00000006"
    shutil.copytree(saved_run, run)
    python, log = engine_stand_in(tmp_path / "both", "vllm", *SERVING)
    options = ("--python", python, "--port", 9000)
    first = megamem("serve", run, *options, "--options=--max-num-seqs 4")
    assert first.code == 7, first.output
    assert "exported: " in first.output
    assert "http://127.0.0.1:9000/v1" in first.output
    called = json.loads(log.read_text())
    served = ["--model", str(folder), "--model-impl", "transformers", "--trust-remote-code", "--enforce-eager"]
    named = ["--host", "127.0.0.1", "--port", "9000", "--served-model-name", "run", "--max-num-seqs", "4"]
    assert called == {"words": ["-m", "vllm.entrypoints.openai.api_server", *served, *named], "safe_path": "1"}
    written = (folder / "config.json").stat().st_mtime_ns
    mapped = megamem("serve", run, *options, "--map-tables")
    assert "exported: " not in mapped.output
    words = json.loads(log.read_text())["words"]
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {"memory_device": "cpu"}
    second = megamem("serve", folder, *options, "--engine", "transformers", "--host", "0.0.0.0", "--map-tables")
    assert second.code == 7, second.output
    script, *given = json.loads(log.read_text())["words"]
    assert Path(script).name == "transformers_server.py"
    assert given == [str(folder), folder.name, "0.0.0.0", "9000", '{"memory_device": "cpu"}', "code"]
    assert (folder / "config.json").stat().st_mtime_ns == written
    hot = megamem("serve", run, *options, "--tables", "int4", "--map-tables", "--hot-rows", 64)
    assert hot.code == 7, hot.output
    words = json.loads(log.read_text())["words"]
    assert words[words.index("--model") + 1] == f"{folder}-int4"
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {"memory_device": "cpu", "hot_rows": 64}
    assert json.loads((Path(f"{folder}-int4") / "config.json").read_text())["memory"]["table_bits"] == 4
    assert megamem("checkpoint", "verify", f"{folder}-int4").code == 0
    assert megamem("serve", run, *options, "--step", 3, "--dtype", "bf16").code == 7
    assert json.loads((run / "exported" / "step_00000003-bf16" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.fixture(scope="module")
def exported(megamem: Megamem, saved_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's newest checkpoint as a folder of Hugging Face's format. Copy it to change it."""
    folder = tmp_path_factory.mktemp("exported") / "exported"
    assert megamem("checkpoint", "convert", saved_run, folder, "--format", "huggingface").code == 0
    return folder


def test_what_cannot_be_served_is_refused(megamem: Megamem, exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "exported"))
    vllm, log = engine_stand_in(tmp_path / "vllm", "vllm")
    transformers, _ = engine_stand_in(tmp_path / "transformers", *SERVING)
    some, _ = engine_stand_in(tmp_path / "some", *SERVING[:3])
    nowhere = megamem("serve", tmp_path / "exporte")
    assert (nowhere.code, "no such file or folder" in nowhere.output) == (4, True), nowhere.output
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = megamem("serve", folder, "--python", vllm, "--port", port)
    assert (busy.code, f"--port is {port}, where nothing can be served (Address already in use)" in busy.output) == (
        2,
        True,
    )
    for words, text in (
        ((folder, "--python", vllm, "--port", 70000), "--port is 70000, where nothing can be served"),
        ((folder, "--python", vllm, "--host", "no.such.host.invalid"), "--host is no.such.host.invalid"),
        ((folder, "--python", vllm, "--step", 3), "--step: "),
        ((folder, "--python", vllm, "--dtype", "bf16"), "--dtype: "),
        ((folder, "--python", vllm, "--hot-rows", 8), "--hot-rows is 8: "),
        ((folder, "--python", vllm, "--engine", "transformers"), "pip install 'transformers[serving]' accelerate"),
        ((folder, "--python", transformers, "--engine", "vllm"), "lacks vllm"),
        ((folder, "--python", some), "transformers lacks accelerate, openai"),
        ((folder, "--python", transformers, "--options=--max-num-seqs 4"), "words for vLLM"),
        ((folder, "--python", tmp_path / "nothing"), "which is no program"),
        ((folder, "--python", "false"), "which does not run"),
    ):
        result = megamem("serve", *words)
        assert result.code == 2, result.output
        assert text in " ".join(result.output.split()), result.output
    code, config = folder / "memory_megamem.py", json.loads((folder / "config.json").read_text())
    whole = code.read_text()
    code.write_text(whole + "print('mine')\n")
    changed = megamem("serve", folder, "--python", vllm)
    assert (changed.code, "(memory_megamem.py)" in changed.output) == (2, True), changed.output
    assert megamem("serve", folder, "--python", vllm, "--trust-remote-code").code == 7
    code.write_text(whole)
    config["auto_map"]["AutoModel"] = "others/model--modeling_megamem.MegamemModel"
    (folder / "config.json").write_text(json.dumps(config))
    log.unlink()
    elsewhere = megamem("serve", folder, "--python", vllm)
    assert (elsewhere.code, "(config.json)" in elsewhere.output) == (2, True), elsewhere.output
    assert not log.exists()
    # A model that transformers knows needs no code, and has no tables.
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    assert megamem("serve", folder, "--python", vllm).code == 7
    assert "--trust-remote-code" not in json.loads(log.read_text())["words"]
    assert "has no memory" in megamem("serve", folder, "--python", vllm, "--map-tables").output


def write_code(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["others/model--tokenization.Tokenizer", null]}}'),
        ("processor_config.json", '{"image_processor": {"auto_map": {"AutoImageProcessor": "mine.Processor"}}}'),
        ("inner/tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["mine.Tokenizer", null]}}'),
        ("generation_config.json", '[{"deep": [{"auto_map": "mine.Generation"}]}]'),
        ("adapter_config.json", '{"base_model_name_or_path": "others/model"}'),
        ("video_preprocessor_config.json", '{"auto_map": '),
        ("custom_generate/generate.py", "print('mine')"),
        ("inner/memory_megamem.py", "print('mine')"),
    ],
)
def test_no_file_of_a_folder_brings_code_unasked(
    megamem: Megamem, exported: Path, tmp_path: Path, name: str, content: str
) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "exported"))
    python, log = engine_stand_in(tmp_path / "engine", *SERVING)
    write_code(folder, name, content)
    refused = megamem("serve", folder, "--python", python)
    assert (refused.code, f"({name})" in refused.output) == (2, True), refused.output
    assert not log.exists()
    assert megamem("serve", folder, "--python", python, "--trust-remote-code").code == 7


def test_a_linked_folder_brings_no_code_unasked(megamem: Megamem, exported: Path, tmp_path: Path) -> None:
    """transformers runs `custom_generate/generate.py` through it."""
    folder = Path(shutil.copytree(exported, tmp_path / "exported"))
    python, log = engine_stand_in(tmp_path / "engine", *SERVING)
    (folder / "custom_generate").symlink_to(write_code(tmp_path, "elsewhere/generate.py", "print('mine')").parent)
    refused = megamem("serve", folder, "--python", python)
    assert (refused.code, "(custom_generate)" in refused.output) == (2, True), refused.output
    assert not log.exists()


def code_of(port: int, path: str, body: dict[str, Any]) -> int:
    """HTTP's code of the answer to a request."""
    address = f"http://127.0.0.1:{port}{path if path.startswith('/') else f'/v1/{path}'}"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


NEEDS_VLLM = pytest.mark.skipif(not ENGINE, reason="MEGAMEM_VLLM_PYTHON is not set: `make serve-check` sets it")


@in_turn(0)
@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=NEEDS_VLLM), "transformers"])
def test_a_request_over_a_socket_is_answered_with_the_models_text(
    megamem: Megamem, start: Start, corpus: Path, tmp_path: Path, engine: str
) -> None:
    wide = {**TINY["model"], "hidden_size": 128, "num_layers": 2}
    config = {
        **TINY,
        "model": wide,
        "train": {**TINY["train"], "num_steps": 60, "sequence_length": 64},
        "data": {"datasets": [{"path": str(corpus)}]},
    }
    (tmp_path / "wide.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "run"
    trained = megamem("train", tmp_path / "wide.yaml", "--run-dir", run)
    assert trained.code == 0, trained.output
    # Which begins a document by itself.
    prompt = BODY["prompt"].removeprefix("<|endoftext|>")
    options = ("--prompt", prompt, "--temperature", BODY["temperature"], "--max-tokens", BODY["max_tokens"])
    expected = megamem("generate", run, *options).generated
    with served(start, run, engine, tmp_path) as port:
        command = ["bash", "-c", CURL.replace(":8000/", f":{port}/")]
        answer = subprocess.run(command, check=True, capture_output=True, timeout=120)
        (choice,) = json.loads(answer.stdout)["choices"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=120) as listed:
            names = [each["id"] for each in json.load(listed)["data"]]
        refused = [
            code_of(port, "completions", wrong)
            for wrong in ({"max_tokens": 3}, {**BODY, "max_tokens": 10**6}, {**BODY, "model": "another"})
        ]
        message = {"role": "user", "content": BODY["prompt"]}
        refused.append(code_of(port, "chat/completions", {"model": "run", "messages": [message]}))
        if engine == "transformers":
            # Paths of its server that load what a request names, and unload the model.
            refused += [code_of(port, path, {"model": str(run)}) for path in ("/load_model", "/reset", "systemone")]
            assert code_of(port, "completions", BODY) == 200
    assert (prompt + choice["text"]).rstrip("\n") == expected.rstrip("\n")
    assert names == ["run"]
    assert all(400 <= code < 500 for code in refused), refused


@in_turn(1)
@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=NEEDS_VLLM), "transformers"])
def test_a_model_of_conversations_answers_chats_and_ends_its_turn(
    megamem: Megamem, start: Start, tmp_path: Path, engine: str
) -> None:
    folder = folder_of(tmp_path / "tokenizer", "byte_level", without_generation(QWEN), {"eos_token": "<|im_end|>"})
    asked, answers = ["the memory", "and the model?"], ["reads a few rows", "ü, it does."]
    messages = [
        {"role": role, "content": content}
        for exchange in zip(asked, answers, strict=True)
        for role, content in zip(("user", "assistant"), exchange, strict=True)
    ]
    lines = [json.dumps({"messages": messages}), json.dumps({"messages": messages[:2]})]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines * 20))
    options = ("--messages-field", "messages", "--tokenizer", folder, "--validation-fraction", 0)
    prepare = ("data", "prepare", tmp_path / "chats.jsonl", *options, "--output", tmp_path / "chats", "--workers", 1)
    refused = megamem(*prepare)
    assert (refused.code, "--eod-token" in refused.output) == (3, True), refused.output
    prepared = megamem(*prepare, "--eod-token", END)
    assert prepared.code == 0, prepared.output
    config = {
        **TINY,
        "model": {**TINY["model"], "hidden_size": 64, "num_layers": 2},
        # The two conversations are soon known by heart.
        "train": {**TINY["train"], "num_steps": 40, "sequence_length": 128},
        "optimizer": {**TINY["optimizer"], "lr": 1e-2},
        "data": {"datasets": [{"path": str(tmp_path / "chats")}], "documents": "separate"},
    }
    (tmp_path / "chats.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "run"
    trained = megamem("train", tmp_path / "chats.yaml", "--run-dir", run)
    assert trained.code == 0, trained.output
    with served(start, run, engine, tmp_path) as port:
        body = {"model": "run", "messages": messages[:3], "max_tokens": 60, "temperature": 0}
        choices = [answer_of(port, {**body, "messages": messages[:number]})["choices"][0] for number in (1, 3)]
    assert [choice["message"]["content"] for choice in choices] == answers
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]


def answer_of(port: int, body: dict[str, Any]) -> dict[str, Any]:
    """Answer to a request for a chat."""
    address, kind = f"http://127.0.0.1:{port}/v1/chat/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(address, json.dumps(body).encode(), kind), timeout=120
    ) as answer:
        return dict(json.load(answer))


@contextmanager
def served(start: Start, run: Path, engine: str, folder: Path) -> Iterator[int]:
    """Port at which a server of the run's model listens while inside."""
    port = free_ports()
    python = ENGINE if engine == "vllm" else sys.executable

    def as_outside() -> None:
        """Leave the server nothing of this environment but what a user's has."""
        os.environ.pop("PYTHONPATH", None)
        os.environ |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}

    # The command becomes the server.
    server = start("serve", run, "--engine", engine, "--python", python, "--port", port, before=as_outside)
    # vLLM listens before it starts, and the other one after.
    ready = "Application startup complete" if engine == "vllm" else "Uvicorn running on"

    def said() -> str:
        return server.log.read_text(errors="replace") if server.log.exists() else ""

    wait_until(lambda: ready in said() or server.poll() is not None, "the server to listen", deadline_s=480)
    assert server.poll() is None, said()[-4000:]
    yield port
    os.kill(server.pid, signal.SIGINT)
    ended = server.wait()
    if engine == "transformers":
        assert ended.code == 0, said()[-4000:]
        assert "Traceback" not in said(), said()[-4000:]
