"""Chat templates of the kinds that published models have, and folders with tokenizers that have them.

Every template says by `{% generation %}` what the assistant writes, so that transformers' mask is known; without these
words it is one of those that do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.unit.data.kinds_of_tokenizers import byte_level, metaspace_with_bytes

MARKERS = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>"),
)
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}" + CHATML
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set first = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set first = false %}{% endif %}{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and first != false %}{% set content = '<<SYS>>\\n' + first + '\\n<</SYS>>\\n\\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}"
    "{%- else %}{{ '[INST] ' + m.content + '[/INST]' }}{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set before = messages[0]['content'] + '\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set before = '' %}{% set rest = messages %}{% endif %}"
    "{%- for m in rest -%}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + (before if loop.first else '') }}"
    "{% if role == 'model' %}{% generation %}{{ m['content'] | trim + '<end_of_turn>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)
TRIMS_LEFT = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content.lstrip('\\n') }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}\n\n{% endfor %}"
)
WITHOUT_END = (
    "{% for m in messages %}{% if m.role == 'assistant' %}### Answer:\n"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}### {{ m.role }}:\n{{ m.content }}{% endif %}"
    "{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "qwen": QWEN,
    "llama_3": LLAMA_3,
    "llama_2": LLAMA_2,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "trims_left": TRIMS_LEFT,
}
TURN_ENDS = {
    "chatml": "<|im_end|>",
    "qwen": "<|im_end|>",
    "llama_3": "<|eot_id|>",
    "llama_2": "</s>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "trims_left": "<|im_end|>",
}
BACKENDS = {"byte_level": byte_level, "metaspace": metaspace_with_bytes}


def without_generation(template: str) -> str:
    """A template that does not say what the assistant writes."""
    return re.sub(r"\{% (end)?generation %\}", "", template)


def backend(kind: str) -> Tokenizer:
    """A tokenizer with the markers of all templates, trained on a few lines."""
    made = BACKENDS[kind]()
    made.add_special_tokens([AddedToken(token, normalized=False) for token in MARKERS])
    return made


def folder_of(path: Path, kind: str, template: str | None, settings: dict[str, Any] | None = None) -> Path:
    """A chat model's folder, without the model."""
    path.mkdir(parents=True)
    (path / "tokenizer.json").write_text(backend(kind).to_str())
    (path / "tokenizer_config.json").write_text(json.dumps({**NAMED, **(settings or {})}))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def oracle(kind: str, template: str) -> PreTrainedTokenizerFast:
    """transformers' reader of conversations."""
    read = PreTrainedTokenizerFast(tokenizer_object=backend(kind), **NAMED)
    read.chat_template = template
    return read


def ids_and_mask(read: PreTrainedTokenizerFast, messages: Sequence[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """Ids of a conversation, and flags of those that the assistant writes, as transformers has them."""
    made = read.apply_chat_template(list(messages), return_assistant_tokens_mask=True, return_dict=True, tokenize=True)
    return list(made["input_ids"]), [bool(flag) for flag in made["assistant_masks"]]
