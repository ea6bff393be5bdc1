"""Train the small checkpoints kept in this repository: Qwen3 language models of Python's standard library.

    python tools/checkpoints/train.py                          # writes checkpoints/tiny-python
    python tools/checkpoints/train.py --experts                # writes checkpoints/tiny-python-moe
    python tools/checkpoints/train.py --output DIR --steps 50  # a quick trial somewhere else

The text is the standard library of the interpreter that runs the script, so nothing is downloaded. A byte-level BPE
tokenizer is trained first, then the model, both on the same files; every file whose path hashes to the held-out
share is seen by neither and measures the result. Everything is seeded and the number of steps is fixed, so the same
Python, libraries and processor give the same weights again. It takes about a quarter of an hour on two cores.

The shapes are chosen to be awkward rather than typical: head_dim is not hidden_size / heads, keys and values have
fewer heads than queries, and the embedding is tied, so that code loading this checkpoint can assume none of these.
"""

import hashlib
import math
import platform
import sysconfig
import time
from pathlib import Path
from typing import Any

import click
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from hal.bench.transformers_side import only_imported_extensions  # hal imports torch without vendors' extensions

import torch  # isort: skip
from torch.nn import functional  # isort: skip

with only_imported_extensions():
    import transformers
    from transformers import (
        GenerationConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096

SHAPE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}

SPARSE_SHAPE: dict[str, Any] = {
    **SHAPE,
    "moe_intermediate_size": 192,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
"""The mixture of experts: the first layer is dense, and the others have experts."""
BALANCE = 0.02
"""Factor of the loss that grows as experts get unequal shares of the tokens."""

STEPS = 1500
TOKENS_PER_STEP = 4096
TOKENS_PER_PASS = 2048  # Small enough that one pass's activations stay in the caches.
CLIP = 1.0
# Most of the training sees short windows, which are cheap; the last part sees the full length, so that every position
# the configuration promises has been trained.
WINDOW, LONG_WINDOW, LONG_SHARE = 256, 1024, 0.1
MUON_RATE, ADAM_RATE = 0.02, 0.015  # Muon for the matrices inside the blocks, AdamW for the embedding and the norms.
WARM_UP, DECAY_SHARE = 40, 0.6  # steps of warm-up; share of the steps over which the rate falls linearly to zero.
WEIGHT_DECAY = 0.05
THREADS = 2  # Sums split over another number of threads round differently, so the card names it.
HELD_OUT_EVERY = 20
SAMPLE_PROMPT, SAMPLE_TOKENS = "def read_file(path):\n", 80

# Folders that are tests, other people's packages, or tables; and files that are mostly generated or literal tables.
LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
TESTS = ("test/test_", "unittest/test/")
LEFT_OUT_FILES = {"html/entities.py", "msilib/schema.py", "msilib/sequence.py", "stringprep.py", "this.py"}

# Every newline is a token of its own and the indentation after it another, so that a prompt ending in a newline is cut
# as the training text was. Digits stand alone: a small vocabulary is better spent on names.
PIECES = r"\n| {2,}| ?\p{L}+| ?_+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|\s"


def log(text: str) -> None:
    click.echo(text, err=True)


def read_library(root: Path | None = None, tests: bool = False) -> tuple[list[str], list[str]]:
    """The standard library's files as training and held-out texts, split by a stable hash of each path.

    Args:
        root: The library's folder; by default, the interpreter's.
        tests: Whether the library's tests are training texts, too.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    training: list[str] = []
    held_out: list[str] = []
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        generated = name in LEFT_OUT_FILES or name.startswith(("_sysconfigdata", "config-"))
        test = tests and name.startswith(TESTS)
        if generated or (LEFT_OUT_FOLDERS.intersection(name.split("/")) and not test):
            continue
        try:
            text = (root / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        if text.strip():
            (held_out if digest % HELD_OUT_EVERY == 0 and not test else training).append(text)
    return training, held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer: every text is representable and decodes to exactly itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """One stream of tokens: the texts in order, each closed by the end-of-text token."""
    (end,) = tokenizer.encode(END_OF_TEXT).ids
    stream: list[int] = []
    for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if tokenizer.decode(encoding.ids) != text:
            raise RuntimeError("the tokenizer does not give its text back")
        stream += [*encoding.ids, end]
    return torch.tensor(stream)


class Batches:
    """Windows of the stream in a random order, cut at a new random offset in every pass over it."""

    def __init__(self, stream: torch.Tensor, seed: int) -> None:
        self.stream = stream
        self.generator = torch.Generator().manual_seed(seed)
        self.window = 0
        self.starts = torch.empty(0, dtype=torch.long)

    def take(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = TOKENS_PER_STEP // window
        if window != self.window:
            self.window, self.starts = window, self.starts[:0]
        while len(self.starts) < count:
            offset = int(torch.randint(window, (1,), generator=self.generator))
            starts = torch.arange(offset, len(self.stream) - window, window)
            shuffled = starts[torch.randperm(len(starts), generator=self.generator)]
            self.starts = torch.cat([self.starts, shuffled])
        chosen, self.starts = self.starts[:count], self.starts[count:]
        rows = torch.stack([self.stream[start : start + window + 1] for start in chosen.tolist()])
        return rows[:, :-1], rows[:, 1:]


def loss_of(model: PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=inputs, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def training_loss(model: PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of the next tokens and, for a mixture of experts, of unequal shares."""
    if not isinstance(model, Qwen3MoeForCausalLM):
        return loss_of(model, inputs, targets)
    made = model(input_ids=inputs, use_cache=False, output_router_logits=True)
    return functional.cross_entropy(made.logits.float().flatten(0, 1), targets.flatten()) + BALANCE * made.aux_loss


def matrices_of(name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The float32 masters of a parameter: of stacked experts, one for each."""
    wide = parameter.detach().float().clone()
    parts = {f"{name}.{number}": part for number, part in enumerate(wide)} if wide.ndim == 3 else {name: wide}
    return {each: part.clone().requires_grad_() for each, part in parts.items()}


def train(model: PreTrainedModel, stream: torch.Tensor, steps: int, seed: int) -> None:
    """Leave the model, in bfloat16, trained.

    Forward and backward run in bfloat16, the fastest type here and the one the weights are kept in; the optimizers
    update float32 masters, because most updates are smaller than bfloat16 can add to a weight.
    """
    parts = {name: matrices_of(name, p) for name, p in model.named_parameters()}
    masters = {name: p for each in parts.values() for name, p in each.items()}
    model.bfloat16().train()
    model.set_attn_implementation("eager")  # Faster than the fused kernel on short windows; slower on long ones.
    embedding = [p for name, p in masters.items() if "embed" in name]
    matrices = [p for name, p in masters.items() if p.ndim == 2 and "embed" not in name]
    norms = [p for p in masters.values() if p.ndim == 1]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(
            [{"params": embedding, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}],
            lr=ADAM_RATE,
            betas=(0.9, 0.95),
        ),
    ]
    decay = max(1, round(steps * DECAY_SHARE))
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(1.0, (step + 1) / WARM_UP, (steps - step) / decay))
        for one in optimizers
    ]
    batches = Batches(stream, seed)
    long_from = round(steps * (1 - LONG_SHARE))
    started = time.perf_counter()
    for step in range(steps):
        if step == long_from:
            model.set_attn_implementation("sdpa")
        inputs, targets = batches.take(WINDOW if step < long_from else LONG_WINDOW)
        rows = max(1, TOKENS_PER_PASS // inputs.shape[1])
        total = 0.0
        for first in range(0, len(inputs), rows):
            loss = training_loss(model, inputs[first : first + rows], targets[first : first + rows])
            loss.backward()
            total += loss.item()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                mine, grad = list(parts[name].values()), parameter.grad.float()
                for master, part in zip(mine, grad if grad.ndim == 3 else [grad], strict=True):
                    master.grad = part.clone()
                parameter.grad = None
            torch.nn.utils.clip_grad_norm_(masters.values(), CLIP * TOKENS_PER_STEP / TOKENS_PER_PASS)
            for one, scheduler in zip(optimizers, schedulers, strict=True):
                one.step()
                scheduler.step()
            for name, parameter in model.named_parameters():
                mine = list(parts[name].values())
                parameter.copy_(torch.stack(mine) if parameter.ndim == 3 else mine[0])
        if step % 25 == 0 or step == steps - 1:
            mean = total * rows / len(inputs)
            log(f"step {step + 1:5d}/{steps}  loss {mean:.3f}  {time.perf_counter() - started:6.1f} s")


@torch.inference_mode()
def measure(model: PreTrainedModel, stream: torch.Tensor) -> float:
    """The mean negative log-likelihood in nats of every token but the first, in windows of the longest length."""
    model.eval()
    total = 0.0
    for start in range(0, len(stream) - 1, LONG_WINDOW):
        piece = stream[start : start + LONG_WINDOW + 1]
        total += loss_of(model, piece[None, :-1], piece[None, 1:]).item() * (len(piece) - 1)
    return total / (len(stream) - 1)


@torch.inference_mode()
def shares(model: PreTrainedModel, stream: torch.Tensor) -> list[torch.Tensor]:
    """The share of the choices that each expert gets, for each layer with experts."""
    counts: dict[int, torch.Tensor] = {}

    def count(layer: int, chosen: torch.Tensor) -> None:
        counts[layer] = counts.get(layer, 0) + torch.bincount(chosen.flatten(), minlength=SPARSE_SHAPE["num_experts"])

    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out, number=number: count(number, out[2]))
        for number, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    measure(model, stream)
    for hook in hooks:
        hook.remove()
    return [each.double() / each.sum() for _, each in sorted(counts.items())]


def measure_unigram(training: torch.Tensor, stream: torch.Tensor) -> float:
    """The same figure for a model that knows only how often each token occurs (add-one smoothed)."""
    counts = torch.bincount(training, minlength=VOCABULARY).double() + 1
    return -(counts / counts.sum()).log()[stream[1:]].mean().item()


def continue_greedily(model: PreTrainedModel, tokenizer: Tokenizer, prompt: str) -> str:
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=SAMPLE_TOKENS)
    return tokenizer.decode(made[0].tolist())


CARD = """# {name}

A language model of {millions:.2f} million parameters that continues Python source text. It is kept in the repository so
that tests and the demonstration have a real checkpoint, small but trained, with nothing to download. It writes text
that looks like Python; it is far too small to write programs that do anything.

| | |
|---|---|
| architecture | `{architecture}`, bfloat16, tied embeddings |
| layers, hidden size, MLP size | {num_hidden_layers}, {hidden_size}, {intermediate_size} |
{experts}| query heads, key and value heads, head size | {num_attention_heads}, {num_key_value_heads}, {head_dim} |
| vocabulary | {vocabulary} tokens, byte-level BPE |
| positions | {max_position_embeddings} |
| training text | {files} files of the standard library of Python {python}: {characters:.1f} MB, {tokens} tokens |
| trained on | {seen:.2f} million tokens ({steps} steps of {step_tokens}, {passes:.1f} passes), seed {seed} |

## Figures

Measured on the weights as saved, computed with in float32, on {held_files} files ({held_tokens} tokens) that neither
the tokenizer nor the model has seen.

| | perplexity per token | bits per byte |
|---|---|---|
| this model | {perplexity:.2f} | {bits:.3f} |
| unigram model (how often each token occurs, add-one smoothed) | {unigram_perplexity:.1f} | {unigram_bits:.3f} |
{balance}
Its greedy continuation of `{prompt}` is:

```python
{sample}
```

## Making it again

```console
$ python tools/checkpoints/train.py{option}
```

This takes about a quarter of an hour on idle processor cores. It was made with Python {python}, torch {torch} and
transformers {transformers}. Another version of Python is another training text; another version of the libraries, or
another processor, rounds differently.

The training text is the Python Software Foundation's, under the PSF licence. Tests, tables and third-party packages in
it were left out.
"""

EXPERTS = """| layers without experts | {mlp_only_layers} |
| experts, chosen per token, their MLP size | {num_experts}, {num_experts_per_tok}, {moe_intermediate_size} |
"""


def balance(found: list[torch.Tensor], tokens: int) -> str:
    """A table of the experts' shares."""
    rows = [
        f"| {number} | {', '.join(f'{float(each):.3f}' for each in layer)} | {float(layer.max() / layer.mean()):.2f} |"
        for number, layer in enumerate(found, SPARSE_SHAPE["num_hidden_layers"] - len(found))
    ]
    return "\n".join(
        [
            "",
            f"The share of the choices that each expert gets on the {tokens} held-out tokens:",
            "",
            "| layer | experts | largest, relative to the mean |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--output", type=click.Path(path_type=Path), help="The folder to write; one beside this file by default.")
@click.option("--experts", is_flag=True, help="Train the mixture of experts.")
@click.option("--steps", type=click.IntRange(min=1), default=STEPS, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=THREADS, show_default=True)
def main(output: Path | None, experts: bool, steps: int, seed: int, threads: int) -> None:
    name = "tiny-python-moe" if experts else "tiny-python"
    output = output or Path(__file__).parents[2] / "checkpoints" / name
    shape = SPARSE_SHAPE if experts else SHAPE
    started = time.perf_counter()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)

    training_texts, held_out_texts = read_library()
    tokenizer = train_tokenizer(training_texts)
    training, held_out = encode(tokenizer, training_texts), encode(tokenizer, held_out_texts)
    log(f"training: {len(training_texts)} files, {len(training)} tokens")
    log(f"held out: {len(held_out_texts)} files, {len(held_out)} tokens")

    (end,) = tokenizer.encode(END_OF_TEXT).ids
    special = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
    kind = Qwen3MoeForCausalLM if experts else Qwen3ForCausalLM
    model = kind((Qwen3MoeConfig if experts else Qwen3Config)(**special, **shape))
    parameters = sum(p.numel() for p in model.parameters())
    log(f"{parameters} parameters")
    train(model, training, steps, seed)

    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False)
    model.save_pretrained(output)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT).save_pretrained(
        output
    )

    # What is measured is what was saved, read back from the files.
    saved = kind.from_pretrained(output, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    if not torch.equal(encode(tokenizer, held_out_texts), held_out):
        raise RuntimeError("the saved tokenizer is not the one the model was trained with")
    nats, unigram = measure(saved, held_out), measure_unigram(training, held_out)
    nats_to_bits_per_byte = len(held_out) / sum(len(text.encode()) for text in held_out_texts) / math.log(2)
    card = CARD.format(
        **shape,
        name=name,
        architecture=kind.__name__,
        experts=EXPERTS.format(**shape) if experts else "",
        balance=balance(shares(saved, held_out), len(held_out)) if experts else "",
        option=(" --experts" if experts else "")
        + (f" --steps {steps}" if steps != STEPS else "")
        + (f" --threads {threads}" if threads != THREADS else ""),
        millions=parameters / 1e6,
        vocabulary=VOCABULARY,
        python=platform.python_version(),
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
        files=len(training_texts),
        characters=sum(map(len, training_texts)) / 1e6,
        tokens=len(training),
        seen=steps * TOKENS_PER_STEP / 1e6,
        steps=steps,
        step_tokens=TOKENS_PER_STEP,
        passes=steps * TOKENS_PER_STEP / len(training),
        seed=seed,
        held_files=len(held_out_texts),
        held_tokens=len(held_out),
        perplexity=math.exp(nats),
        bits=nats * nats_to_bits_per_byte,
        unigram_perplexity=math.exp(unigram),
        unigram_bits=unigram * nats_to_bits_per_byte,
        prompt=SAMPLE_PROMPT.replace("\n", "\\n"),
        sample=continue_greedily(saved, tokenizer, SAMPLE_PROMPT).rstrip(),
    )
    (output / "README.md").write_text(card, encoding="utf-8")
    log(f"held-out perplexity {math.exp(nats):.2f}, {nats * nats_to_bits_per_byte:.3f} bits per byte")
    log(f"unigram perplexity {math.exp(unigram):.1f}, {unigram * nats_to_bits_per_byte:.3f} bits per byte")
    log(f"{output}: {sum(f.stat().st_size for f in output.iterdir())} bytes, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
