"""A cache of Hugging Face's hub in which the models that vLLM's tests name are a small checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

REVISION = "0" * 40
LONG = 40960
MODELS = {
    "facebook/opt-125m": 2048,
    "hmellor/tiny-random-LlamaForCausalLM": 8192,
    "distilbert/distilgpt2": 1024,
    "openai-community/gpt2": 1024,
    "gpt2": 1024,
    "JackFram/llama-160m": 2048,
    "Qwen/Qwen3-0.6B": LONG,
    "Qwen/Qwen3-1.7B": LONG,
    "Qwen/Qwen2.5-1.5B-Instruct": 32768,
    "Qwen/Qwen2-1.5B-Instruct": 32768,
    "meta-llama/Llama-3.2-1B": LONG,
    "meta-llama/Llama-3.2-1B-Instruct": LONG,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 2048,
    "HuggingFaceH4/zephyr-7b-beta": 32768,
}
"""The hub's names, and the longest sequence of each model in tokens, which some tests expect."""
TEMPLATE = (
    "{% for message in messages %}{{ '# ' + message['role'] + '\\n' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant\\n' }}{% endif %}"
)


def make_cache(folder: Path, checkpoint: Path) -> None:
    """Write the checkpoint under every name into ``folder``, which HF_HOME names then."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    for name, length in MODELS.items():
        model = folder / "hub" / ("models--" + name.replace("/", "--"))
        snapshot = model / "snapshots" / REVISION
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(checkpoint, snapshot, ignore=shutil.ignore_patterns("README.md", "config.json"))
        text = json.dumps({**config, "max_position_embeddings": length})
        (snapshot / "config.json").write_text(text, encoding="utf-8")
        (snapshot / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(REVISION, encoding="utf-8")
