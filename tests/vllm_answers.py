"""Answers of vLLM, in an environment that has it and none of this package.

Usage: python engine.py REQUESTS ANSWERS. REQUESTS is JSON: for each job a folder, an adapter (or null) that the second of
every two prompts has, options of `LLM`, prompts as token ids, and how many tokens to write. The answers are, for each prompt, tokens, their log-probabilities, and how many tokens of
the prompt were found in the cache.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

# Read when vLLM is imported. One process: this one's standard output has the reason of whatever fails.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
# Ranks of tensor parallelism share the machine's cores.
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def answers(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers of one job, whose prompts are all given at once."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=job["folder"],
        model_impl="transformers",
        trust_remote_code=True,
        dtype="float32",
        # Retrieval and experts depend on data.
        enforce_eager=True,
        **job["options"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["num_tokens"], ignore_eos=True, logprobs=0)
    adapter = None if job["adapter"] is None else LoRARequest("an adapter", 1, job["adapter"])
    adapters = adapter and [adapter if number % 2 else None for number in range(len(job["prompts"]))]
    found = []
    for _ in range(job["rounds"]):
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters)
        found = [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    step[token].logprob
                    for step, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
                ],
                "num_cached": output.num_cached_tokens,
            }
            for output in outputs
        ]
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            out[name] = answers(job)
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    Path(sys.argv[2]).write_text(json.dumps(out), encoding="utf-8")


if __name__ == "__main__":
    main()
