"""transformers' OpenAI-compatible server for a folder whose model has code of its own.

`transformers serve` looks a model's class up in transformers alone; this adds the folder's to it, and starts it. It runs
in whichever environment has the packages, and imports nothing of ours.

Usage: python transformers_server.py FOLDER HOST PORT OVERRIDES. OVERRIDES is JSON: keys of the configuration to set.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from types import SimpleNamespace


def main(folder: str, host: str, port: str, overrides: str) -> None:
    """Serve until the process is told to end."""
    from transformers import AutoConfig
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    code = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if code is not None:
        model = get_class_from_dynamic_module(code, folder)
        loader = SimpleNamespace(from_pretrained=partial(model.from_pretrained, **json.loads(overrides)))
        (architecture,) = config.architectures
        setattr(model_manager.transformers, architecture, loader)
    Serve(folder, host=host, port=int(port), trust_remote_code=code is not None)


if __name__ == "__main__":
    main(*sys.argv[1:])
