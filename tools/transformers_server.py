"""transformers' OpenAI-compatible server for a folder whose model has code of its own.

`transformers serve` looks a model's class up in transformers alone; this adds the folder's to it, and starts it. It runs
in whichever environment has the packages, and imports nothing of ours.

It answers for this model alone: of the server's paths those that load others, unload it, or do something else are not
there, as they would run whatever code a request names.

Usage: python transformers_server.py FOLDER NAME HOST PORT OVERRIDES TRUST. NAME is the model's in requests. OVERRIDES is
JSON: keys of the configuration to set. TRUST is `code`, or `no-code` where the folder's code may not run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/health"})
"""Paths that are answered."""


def main(folder: str, name: str, host: str, port: str, overrides: str, trust: str) -> None:
    """Serve until the process is told to end."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.cli.serve import Serve
    from transformers.cli.serving import chat_completion, completion, model_manager, response, server
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    folder = os.path.abspath(folder)
    is_trusted = trust == "code"
    config = AutoConfig.from_pretrained(folder, trust_remote_code=is_trusted)
    code = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if is_trusted and code is not None:
        model = get_class_from_dynamic_module(code, folder)
        loader = SimpleNamespace(from_pretrained=partial(model.from_pretrained, **json.loads(overrides)))
        (architecture,) = config.architectures
        setattr(model_manager.transformers, architecture, loader)
    # It would list what a cache of downloads holds.
    known = [{"id": name, "object": "model", "created": int(time.time()), "owned_by": "megamem"}]
    model_manager.ModelManager.get_gen_models = staticmethod(lambda *_: known)
    server.build_server = _answering(server.build_server, _PATHS)
    completion.CompletionHandler = _bounded(completion.CompletionHandler, config.max_position_embeddings)
    if AutoTokenizer.from_pretrained(folder, trust_remote_code=is_trusted).chat_template is None:
        chat_completion.ChatCompletionHandler = _without_template(chat_completion.ChatCompletionHandler)
        response.ResponseHandler = _without_template(response.ResponseHandler)
    with TemporaryDirectory() as here:
        # Its names of models are paths.
        (Path(here) / name).symlink_to(folder)
        os.chdir(here)
        # Ctrl-C ends it when it has answered what it was asked.
        with suppress(KeyboardInterrupt):
            Serve(name, host=host, port=int(port), trust_remote_code=is_trusted)


def _answering(build: Any, paths: Collection[str]) -> Any:
    """The maker of a server, of which no other paths answer."""

    def built(*args: Any, **kwargs: Any) -> Any:
        app = build(*args, **kwargs)
        app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in paths]
        return app

    return built


def _bounded(handler: Any, most: int) -> Any:
    """The handler of completions that refuses requests without a prompt, on which the model would fail, and for texts of
    more than `most` tokens, for which all others would wait."""

    def validate(self: Any, body: dict[str, Any]) -> None:
        from fastapi import HTTPException

        handler._validate_request(self, body)
        if not body.get("prompt"):
            raise HTTPException(status_code=400, detail="prompt is missing or empty: give a text to go on with")
        if (wanted := body.get("max_tokens") or 0) > most:
            detail = f"max_tokens is {wanted}, and the model was trained on texts of {most} tokens: ask for fewer"
            raise HTTPException(status_code=400, detail=detail)

    return type(handler.__name__, (handler,), {"_validate_request": validate})


def _without_template(handler: Any) -> Any:
    """The handler of conversations, which are texts by a template that the model does not have."""

    def validate(self: Any, body: dict[str, Any]) -> None:
        from fastapi import HTTPException

        raise HTTPException(status_code=400, detail="the model has no chat template: ask for /v1/completions")

    return type(handler.__name__, (handler,), {"_validate_request": validate})


if __name__ == "__main__":
    main(*sys.argv[1:])
