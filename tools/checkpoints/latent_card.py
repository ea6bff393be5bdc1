"""Measure checkpoints/tiny-python-latent on the CPU and write its card.

python tools/checkpoints/latent_card.py                    # after train_latent.py
"""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path

import click
import numpy as np
from train import (  # imports torch without vendors' extensions
    SAMPLE_PROMPT,
    continue_greedily,
    encode,
    log,
    measure,
    measure_unigram,
    read_library,
)

import torch  # isort: skip
from latent_layers import best, last, make_trained, shifted, worst
from lookups import LONGEST, MARKER, OCCURRENCES, VALUE, WORDS, Lookups
from tokenizers import Tokenizer
from train_latent import ASKED, DISTANCE, FOLDER, looked_up
from transformers import DeepseekV32ForCausalLM, PreTrainedModel

TEXTS = 8
"""Texts of the measured questions."""
CARD = """# tiny-python-latent

A language model of {millions:.2f} million parameters with latent attention, whose tokens attend to the {index_topk}
positions that an index selects. It continues Python source text, and answers with the value of a name that a line
defined {distance} tokens earlier. It is kept in the repository so that tests have a real checkpoint of this kind, small
but trained, with nothing to download. It is far too small to write programs that do anything.

| | |
|---|---|
| architecture | `DeepseekV32ForCausalLM`, bfloat16, tied embeddings |
| layers, hidden size, MLP size | {num_hidden_layers}, {hidden_size}, {intermediate_size}; no layer has experts |
| heads, their sizes without and with rotary embedding, and of values | {num_attention_heads}, {qk_nope_head_dim}, \
{qk_rope_head_dim} and {v_head_dim} |
| ranks of queries, and of keys and values | {q_lora_rank} and {kv_lora_rank} |
| index heads, their size, selected positions | {index_n_heads}, {index_head_dim}, {index_topk} |
| vocabulary | {vocab_size} tokens, byte-level BPE: the tokenizer of `tiny-python` |
| positions | {max_position_embeddings}; the longest windows of the training have {window} |
| training text | {files} files of the standard library of Python {library}: {characters:.1f} MB, {tokens} tokens |
| trained on | {seen:.1f} million tokens, seed {seed} |
| trained by | one thread of a processor that other programs used as well, in {minutes:.0f} minutes |

The latents, rotary rows and index keys have the sizes of DeepSeek-V3.2, which operators of some accelerators require.

## Figures

Measured on the weights as saved, computed with in float32 on a CPU, on {held_files} files ({held_tokens} tokens) that
neither the tokenizer nor the model has seen: the files that measure `tiny-python`.

| | perplexity per token | bits per byte |
|---|---|---|
| this model | {perplexity:.2f} | {bits:.3f} |
| unigram model (how often each token occurs in the training text, add-one smoothed) | {unigram_perplexity:.1f} | \
{unigram_bits:.3f} |

## Selection

Much of the training's text are records: lines of a marker, `{marker}`, a name and its value of up to {longest} words.
Each stands {least} to {most} times in a window. Names and values are random words out of {words}, none of which the
rest of the window has. The index learns the distribution of the attention's weights, at first while tokens attend to
all earlier ones, and then while they attend to what it selects.

The training begins with weights that look up most words of short windows: two heads of the first layer attend to the
token before, and two of the second find that token (`initialize_lookup` in `train_latent.py`). Short
trials from random weights, of 175 to 425 steps, did not learn this. The index begins with random weights.

{count} new records with values of {value} words were defined in texts, {asked} in each, and asked for behind {distance}
tokens of held-out text. The model gave this share of the values whole:

| a token attends to | values |
|---|---|
| all earlier positions | {dense:.1%} |
| the {index_topk} positions with the highest scores | {best:.1%} |
| the {index_topk} positions with the lowest scores | {worst:.1%} |
| the last {index_topk} positions | {last:.1%} |
| the positions before those with the highest scores | {shifted:.1%} |

Its greedy continuation of `{prompt}` is:

```python
{sample}
```

## Making it again

```console
$ python tools/checkpoints/train_latent.py{options}
$ python tools/checkpoints/latent_card.py
```

The stages of the training:

| steps | windows of a step | tokens of a window | most of them in records | attention |
|---|---|---|---|---|
{stages}

It was made with Python {python}, torch {torch} and transformers {transformers}. The number of steps depends on
what else the processor does, and another processor rounds differently.

The training text is the Python Software Foundation's, under the PSF licence. Tests, tables and third-party packages in
it were left out.
"""
CHOICES = {"best": best, "worst": worst, "last": last, "shifted": shifted}


def shares(model: DeepseekV32ForCausalLM, tokenizer: Tokenizer, stream: np.ndarray, seed: int) -> dict[str, float]:
    """Return the share of values that the model gives, by what its tokens attend to."""
    layers, found = make_trained(model), {}
    for name, choice in {"dense": best, **CHOICES}.items():
        for layer in layers:
            layer.sparse, layer.choice = name != "dense", choice
        found[name] = looked_up(model, Lookups(stream, tokenizer, seed), stream, TEXTS)
        log(f"{name}: {found[name]:.3f}")
    return found


@torch.inference_mode()
def check(model: PreTrainedModel, tokenizer: Tokenizer, stream: np.ndarray, seed: int) -> None:
    """Raise RuntimeError unless transformers' own layers find what those of the training find."""
    lookups = Lookups(stream, tokenizer, seed)
    tokens, _ = lookups.asked(stream[:DISTANCE], ASKED)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    wanted = model(ids, use_cache=False).logits.argmax(-1)
    for layer in make_trained(model):
        layer.sparse = True
    found = model(ids, use_cache=False).logits.argmax(-1)
    if (share := (wanted == found).double().mean().item()) < 0.99:
        raise RuntimeError(f"only {share:.1%} of the next tokens are those of transformers' layers")


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER)
def main(folder: Path) -> None:
    torch.set_num_threads(1)
    facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    model = DeepseekV32ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    training_texts, held_out_texts = read_library()
    training, held_out = encode(tokenizer, training_texts), encode(tokenizer, held_out_texts)
    if (len(training_texts), sum(map(len, training_texts))) != (facts["files"], facts["characters"]):
        raise click.ClickException("it was trained on the standard library of another Python")
    nats, unigram = measure(model, held_out), measure_unigram(training, held_out)
    to_bits = len(held_out) / sum(len(text.encode()) for text in held_out_texts) / math.log(2)
    sample, stream, seed = (
        continue_greedily(model, tokenizer, SAMPLE_PROMPT).rstrip(),
        held_out.numpy(),
        facts["seed"] + 1,
    )
    check(model, tokenizer, stream, seed)
    given = {"minutes": facts["limit"], "seed": facts["seed"] or None}
    text = CARD.format(
        **model.config.to_dict(),
        **{key: facts[key] for key in ("files", "tokens", "seed", "minutes", "python", "transformers")},
        **shares(model, tokenizer, stream, seed),
        library=platform.python_version(),
        options="".join(f" --{key} {value}" for key, value in given.items() if value is not None),
        torch=facts["torch"].split("+")[0],
        millions=sum(p.numel() for p in model.parameters()) / 1e6,
        characters=facts["characters"] / 1e6,
        seen=sum(stage["steps"] * stage["rows"] * stage["window"] for stage in facts["stages"]) / 1e6,
        window=max(stage["window"] for stage in facts["stages"]),
        held_files=len(held_out_texts),
        held_tokens=len(held_out),
        perplexity=math.exp(nats),
        bits=nats * to_bits,
        unigram_perplexity=math.exp(unigram),
        unigram_bits=unigram * to_bits,
        marker=MARKER.strip(),
        value=VALUE,
        longest=LONGEST,
        least=OCCURRENCES[0],
        most=OCCURRENCES[1],
        words=WORDS,
        asked=ASKED,
        count=TEXTS * ASKED,
        distance=DISTANCE,
        stages="\n".join(
            f"| {stage['steps']} | {stage['rows']} | {stage['window']} | {stage['share']:.0%} | "
            f"{'selected' if stage['sparse'] else 'all earlier'} |"
            for stage in facts["stages"]
        ),
        prompt=SAMPLE_PROMPT.replace("\n", "\\n"),
        sample=sample,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    log(text)


if __name__ == "__main__":
    main()
