"""Measure checkpoints/tiny-python-hybrid on the CPU, with transformers' own layers, and write its card.

python tools/checkpoints/hybrid_card.py                    # after train_hybrid.py
"""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path

import click
from train import (  # imports torch without vendors' extensions
    SAMPLE_PROMPT,
    continue_greedily,
    encode,
    log,
    measure,
    measure_unigram,
    read_library,
    shares,
)

import torch  # isort: skip
from hybrid_layers import make_fast
from recall import WORDS, Names
from tokenizers import Tokenizer
from train_hybrid import DISTANCE, EVALUATED_NAMES, FOLDER, recalled
from transformers import PreTrainedModel, Qwen3NextForCausalLM

CARD = """# tiny-python-hybrid

A language model of {millions:.2f} million parameters, with recurrent layers, that continues Python source text and
repeats a name that it has read {distance} tokens earlier. It is kept in the repository so that tests have a real
checkpoint of this kind, small but trained, with nothing to download. It is far too small to write programs that do
anything.
A [layer that predicts further tokens](MTP.md) is in the same file.

| | |
|---|---|
| architecture | `Qwen3NextForCausalLM`, bfloat16, tied embeddings |
| layers, hidden size, MLP size | {num_hidden_layers}, {hidden_size}, {intermediate_size} |
| layers with attention | each {full_attention_interval}th; the others have the gated delta rule |
| key heads, value heads, their sizes | {linear_num_key_heads}, {linear_num_value_heads}, {linear_key_head_dim} and \
{linear_value_head_dim} |
| query heads, key and value heads, head size | {num_attention_heads}, {num_key_value_heads}, {head_dim} |
| layers without experts | {mlp_only_layers} |
| experts, chosen per token, their MLP size | {num_experts}, {num_experts_per_tok}, {moe_intermediate_size} |
| vocabulary | {vocab_size} tokens, byte-level BPE: the tokenizer of `tiny-python` |
| positions | {max_position_embeddings} |
| training text | {files} files of the standard library of Python {library}, its tests included: {characters:.1f} MB, \
{tokens} tokens |
| trained on | {seen:.1f} million tokens ({steps} steps of {rows} windows of {window}), seed {seed} |
| trained by | {device}, in {minutes:.1f} minutes beside other trainings |

## Figures

Measured on the weights as saved, computed with in float32 on a CPU, on {held_files} files ({held_tokens} tokens) that
neither the tokenizer nor the model has seen: the files that measure `tiny-python`.

| | perplexity per token | bits per byte |
|---|---|---|
| this model | {perplexity:.2f} | {bits:.3f} |
| unigram model (how often each token occurs in the training text of `tiny-python`, add-one smoothed) | \
{unigram_perplexity:.1f} | {unigram_bits:.3f} |

The share of the choices that each expert gets on the {held_tokens} held-out tokens:

| layer | experts | largest, relative to the mean |
|---|---|---|
{balance}

## Memory

In {named:.0%} of the training's windows stands a name of {words} random words behind `# name:`, several times.
Attention finds a word by what the recurrent layers have kept of the tokens just before it: losing their states between
the name and its repetition changes little, and losing them inside the name breaks it.

Of {count} new names at the beginning of a text, the model repeats these in full behind that marker, {distance} tokens
of held-out text later:

| | names repeated |
|---|---|
| as it is | {found} |
| attention does not read the name | {found_blind} |
| recurrent states and windows are lost halfway | {found_cut} |
| recurrent states and windows are lost inside the name, after {half} words | {found_inside} |

Its greedy continuation of `{prompt}` is:

```python
{sample}
```

## Making it again

```console
$ python tools/checkpoints/train_hybrid.py --device cuda --minutes {minutes:.1f}{options}
$ python tools/checkpoints/hybrid_card.py
```

It was made with Python {python}, torch {torch} and transformers {transformers}. The number of steps depends on the GPU
and on what else it does, and each run rounds differently.

The training text is the Python Software Foundation's, under the PSF licence. Tables and third-party packages in it were
left out.
"""


@torch.inference_mode()
def repeated(model: PreTrainedModel, stream: torch.Tensor, names: Names) -> int:
    """Return how many names the model repeats whole, greedily and word by word, after DISTANCE tokens."""
    found = 0
    for number in range(EVALUATED_NAMES):
        name, start = torch.from_numpy(names.draw()), number * 1000
        text = torch.cat([name, stream[start : start + DISTANCE], name[:-WORDS]])[None]
        made = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=WORDS)
        found += torch.equal(made[0, -WORDS:], name[-WORDS:])
    return found


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER)
def main(folder: Path) -> None:
    facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    model = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    training_texts, held_out_texts = read_library()
    training, held_out = encode(tokenizer, training_texts), encode(tokenizer, held_out_texts)
    seen = read_library(tests=True)[0]
    if (len(seen), sum(map(len, seen))) != (facts["files"], facts["characters"]):
        raise click.ClickException("it was trained on the standard library of another Python")
    nats, unigram = measure(model, held_out), measure_unigram(training, held_out)
    to_bits = len(held_out) / sum(len(text.encode()) for text in held_out_texts) / math.log(2)
    rows = [
        f"| {number} | {', '.join(f'{float(each):.3f}' for each in layer)} | {float(layer.max() / layer.mean()):.2f} |"
        for number, layer in enumerate(shares(model, held_out), len(model.config.mlp_only_layers))
    ]
    seed = facts["seed"] + 1
    names = Names(tokenizer, seed)
    found = repeated(model, held_out, names)
    sample = continue_greedily(model, tokenizer, SAMPLE_PROMPT).rstrip()
    make_fast(model)
    text = CARD.format(
        **{**model.config.to_dict(), "full_attention_interval": len(model.config.layer_types)},
        **{key: facts[key] for key in ("files", "tokens", "steps", "rows", "window", "seed", "device", "minutes")},
        **{key: facts[key] for key in ("python", "transformers")},
        library=platform.python_version(),
        options=f" --seed {facts['seed']}" if facts["seed"] else "",
        torch=facts["torch"].split("+")[0],
        millions=sum(p.numel() for p in model.parameters()) / 1e6,
        characters=facts["characters"] / 1e6,
        seen=facts["steps"] * facts["rows"] * facts["window"] / 1e6,
        held_files=len(held_out_texts),
        held_tokens=len(held_out),
        perplexity=math.exp(nats),
        bits=nats * to_bits,
        unigram_perplexity=math.exp(unigram),
        unigram_bits=unigram * to_bits,
        balance="\n".join(rows),
        named=facts["named"],
        words=WORDS,
        count=EVALUATED_NAMES,
        distance=DISTANCE,
        found=found,
        found_blind=recalled(model, held_out, Names(tokenizer, seed), blind=True),
        found_cut=recalled(model, held_out, Names(tokenizer, seed), cut=DISTANCE // 2),
        half=WORDS // 2,
        found_inside=recalled(model, held_out, Names(tokenizer, seed), cut=len(names.marker) + WORDS // 2),
        prompt=SAMPLE_PROMPT.replace("\n", "\\n"),
        sample=sample,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    log(text)


if __name__ == "__main__":
    main()
