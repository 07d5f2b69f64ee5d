"""transformers' OpenAI-compatible server for a folder whose model has code of its own.

`transformers serve` looks a model's class up in transformers alone; this adds the folder's to it, and starts it. It runs
in whichever environment has the packages, and imports nothing of ours.

Usage: python transformers_server.py FOLDER NAME HOST PORT OVERRIDES. NAME is the model's in requests. OVERRIDES is JSON:
keys of the configuration to set.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any


def main(folder: str, name: str, host: str, port: str, overrides: str) -> None:
    """Serve until the process is told to end."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.cli.serve import Serve
    from transformers.cli.serving import chat_completion, completion, model_manager, response
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    folder = os.path.abspath(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    code = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if code is not None:
        model = get_class_from_dynamic_module(code, folder)
        loader = SimpleNamespace(from_pretrained=partial(model.from_pretrained, **json.loads(overrides)))
        (architecture,) = config.architectures
        setattr(model_manager.transformers, architecture, loader)
    # It would list what a cache of downloads holds.
    known = [{"id": name, "object": "model", "created": int(time.time()), "owned_by": "megamem"}]
    model_manager.ModelManager.get_gen_models = staticmethod(lambda *_: known)
    completion.CompletionHandler = _bounded(completion.CompletionHandler, config.max_position_embeddings)
    if AutoTokenizer.from_pretrained(folder).chat_template is None:
        chat_completion.ChatCompletionHandler = _without_template(chat_completion.ChatCompletionHandler)
        response.ResponseHandler = _without_template(response.ResponseHandler)
    with TemporaryDirectory() as here:
        # Its names of models are paths.
        (Path(here) / name).symlink_to(folder)
        os.chdir(here)
        Serve(name, host=host, port=int(port), trust_remote_code=code is not None)


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
