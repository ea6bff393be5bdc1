"""Tests for ``hal compare``: injected faults are found and named, and correct backends pass."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from helpers.checkpoints import random_checkpoint
from helpers.distributions import install
from helpers.thorough import DRAW, DTYPE, EXHAUSTIVE, MODE, thorough

import hal
from hal import ops
from hal.cli import main
from hal.compare.call_comparison import Evidence, transplant, worst_error
from hal.compare.compare_backends import compare_backends
from hal.compare.compare_modes import compare_modes, in_mode
from hal.compare.comparison_results import OUTSIDE, Call, CompareError
from hal.compare.drifts import LOGITS, Drifts
from hal.compare.saved_call import CALL, TENSORS, SavedCall, save
from hal.compare.texts import Prompts
from hal.compare.watch import layer_of
from hal.config import CompilationConfig, PhaseConfig
from hal.errors import BatchError, HalError, NumericsError
from hal.ops.rounding import drift
from hal.quantize.quantize_checkpoint import quantize_checkpoint

BOTH = ("--backend", "cpu", "--backend", "faulty")
CAT = ("--prompt", "the cat")
PROMPTS = ("--prompt", "def read_lines(path):", "--prompt", "class Stack:", "--max-new-tokens", "4")
CHECKPOINTS = Path("checkpoints")
NORM = "model.layers.1.self_attn.k_norm"
ATTENTION = "model.layers.0.self_attn.attention"
TEXT = "the cat sat on the mat and the rat sat on the hat\n" * 8

Faulty = Callable[..., None]


@pytest.fixture(autouse=True)
def _back_to_the_cpu() -> Iterator[None]:
    yield
    hal.open("cpu")


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """Return a function that installs the driver ``faulty``; its arguments are the driver's options."""
    install(tmp_path / "site", "faulty", "[hal.drivers]\nfaulty = helpers.faulty_driver:FaultyDriver\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def options(**given: str) -> None:
        for name, value in given.items():
            monkeypatch.setenv(f"HAL_FAULTY_{name.upper()}", value)

    return options


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of two layers with random weights, in float32."""
    return random_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint")


def hal_compare(*arguments: str | Path, status: int) -> Result:
    result = CliRunner().invoke(main, ["compare", *map(str, arguments)])
    assert result.exit_code == status, (result.output, result.stderr, result.exception)
    return result


def named(option: str, names: str) -> tuple[str, ...]:
    """Return the arguments that give an option for each name of a comma-separated list."""
    return tuple(part for name in names.split(",") for part in (option, name))


def found(*arguments: str | Path, status: int) -> dict[str, Any]:
    (comparison,) = json.loads(hal_compare(*arguments, "--json", status=status).stdout)
    assert isinstance(comparison, dict)
    return comparison


class TestWhatIsPlanted:
    @thorough(DRAW, r"\[.*layernorm")
    @pytest.mark.parametrize(
        "norm", [NORM, "model.layers.1.post_attention_layernorm", "model.layers.0.input_layernorm"]
    )
    def test_a_wrong_epsilon_in_one_norm(self, faulty: Faulty, trained: Path, norm: str) -> None:
        faulty(fault="epsilon", weights=str(trained / "model.safetensors"), norm=f"{norm}.weight")
        arguments = (trained, *BOTH, "--dtype", "float32", *PROMPTS)
        broken = found(*arguments, status=1)["broken"]
        assert (broken["call"]["operation"], broken["call"]["path"]) == ("rms_norm", norm)
        assert broken["call"]["layer"] == norm[: len("model.layers.1")]
        assert broken["error"]["ratio"] > 1
        text = hal_compare(*arguments, status=1).stdout
        assert text.startswith("faulty against cpu: NOT within tolerance (a prefill and 3 decode steps, 8 tokens)\n")
        assert (
            f"first operation out of tolerance: rms_norm in {norm} (layer {norm[13]}), step 0 (prefill), call" in text
        )
        assert "float32[11, 192], weight float32[192], eps 1e-06" in text or norm == NORM

    def test_only_that_layer_is_blamed(self, faulty: Faulty, trained: Path) -> None:
        """Later layers differ too, but their operations are correct."""
        faulty(fault="epsilon", weights=str(trained / "model.safetensors"), norm=f"{NORM}.weight", eps="0.1")
        rows = found(trained, *BOTH, "--dtype", "float32", *PROMPTS, status=1)["rows"]
        assert [row["layer"] for row in rows] == [*(f"model.layers.{layer}" for layer in range(2)), OUTSIDE]
        assert [row["worst"]["error"]["ratio"] > 1 for row in rows] == [False, True, False]
        assert [row["drift"] > 4 * row["rounding"] for row in rows] == [False, True, True]

    @pytest.mark.parametrize(
        ("fault", "operation", "path", "problem"),
        [
            ("strides", "store_kv_cache", ATTENTION, ""),
            ("lengths", "paged_attention", ATTENTION, ""),
            ("nan", "silu_and_mul", "model.layers.0.mlp", ""),
            ("shape", "rotary_embedding", "model.layers.0.self_attn", "it is float32[8, 8, 16] and not"),
        ],
    )
    def test_faulty_kernels(
        self, faulty: Faulty, small: Path, fault: str, operation: str, path: str, problem: str
    ) -> None:
        faulty(fault=fault)
        comparison = found(small, *BOTH, *CAT, status=1)
        call, wrong = comparison["broken"]["call"], comparison["broken"]["error"]
        assert (call["operation"], call["path"], call["step"]) == (operation, path, 0)
        assert wrong["problem"].startswith(problem.partition("[")[0])
        if fault == "lengths":
            turned = found(small, "--backend", "faulty", "--backend", "cpu", *CAT, status=1)
            assert turned["broken"]["call"] == call

    @pytest.mark.parametrize(("draft", "layers"), [("tiny-python-eagle3", 1), ("tiny-python-moe", 4)])
    def test_a_drafter(self, faulty: Faulty, draft: str, layers: int) -> None:
        """The model that drafts is compared, on the hidden states of the model."""
        arguments = (CHECKPOINTS / "tiny-python", "--draft", CHECKPOINTS / draft, *BOTH, "--dtype", "float32", *PROMPTS)
        right = found(*arguments, status=0)
        assert (right["steps"], len(right["rows"])) == (4, layers + 1)
        faulty(fault="lengths")
        call = found(*arguments, status=1)["broken"]["call"]
        assert (call["operation"], call["path"], call["step"]) == ("paged_attention", ATTENTION, 0)

    @pytest.mark.parametrize(
        ("options", "refused"),
        [
            ((*BOTH, "--draft", "ngram", *CAT), "ngram runs no model"),
            (("--backend", "cpu", "--compiler", "eager", "--draft", "ngram", *CAT), "cannot be used with --compiler"),
        ],
    )
    def test_drafters_that_are_not_compared(
        self, faulty: Faulty, trained: Path, options: tuple[str, ...], refused: str
    ) -> None:
        assert refused in hal_compare(trained, *options, status=2).stderr

    def test_what_is_wrong_only_in_the_run_itself(self, faulty: Faulty, small: Path) -> None:
        faulty(fault="between")
        arguments = (small, *BOTH, *CAT)
        comparison = found(*arguments, status=1)
        assert comparison["broken"] is None
        assert (comparison["departure"]["layer"], comparison["departure"]["step"]) == ("model.layers.0", 0)
        assert "check what the model computes between operations" in hal_compare(*arguments, status=1).stdout

    def test_a_kernel_that_raises_is_named(self, faulty: Faulty, small: Path) -> None:
        faulty(fault="raises")
        result = hal_compare(small, *BOTH, *CAT, status=2)
        assert "silu_and_mul of the backend faulty raised ValueError('no such thing') in model.layers.0.mlp" in (
            result.stderr
        )

    def test_what_came_before_a_kernel_that_raises_is_named_too(self, faulty: Faulty, small: Path) -> None:
        faulty(fault="crash")
        stderr = hal_compare(small, *BOTH, *CAT, status=2).stderr
        assert "paged_attention of the backend faulty raised RuntimeError" in stderr
        assert "before that, rotary_embedding in model.layers.0.self_attn, step 0, was out of tolerance" in stderr

    def test_int8(self, faulty: Faulty, small: Path, tmp_path: Path) -> None:
        quantized = quantize_checkpoint(small, tmp_path / "w8a8", "w8a8", calibration=TEXT).path
        faulty(fault="truncating")
        call = found(quantized, *BOTH, *CAT, status=1)["broken"]["call"]
        assert (call["operation"], call["path"]) == ("quantize", "model.layers.0.self_attn.qkv_proj")


class TestWhatIsRight:
    @thorough(DTYPE, r"\[b?float16")
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_another_backend(self, faulty: Faulty, trained: Path, dtype: str) -> None:
        faulty(fault="nothing")
        comparison = found(trained, *BOTH, "--dtype", dtype, *PROMPTS, status=0)
        assert comparison["broken"] is None
        assert (comparison["steps"], comparison["tokens"], comparison["not_compared"]) == (4, 8, [])
        layers = [row["operations"] for row in comparison["rows"]]
        assert layers == [4 * 12, 4 * 12, 4 * 5]  # in each step; outside: embedding, cos, sin, norm, projection
        assert all(0 < row["rounding"] < 1 and row["drift"] <= 4 * row["rounding"] for row in comparison["rows"])

    @pytest.mark.parametrize("scheme", ["w8a8", "w8a8_dynamic"])
    def test_int8(self, faulty: Faulty, trained: Path, tmp_path: Path, scheme: Any) -> None:
        text = {"calibration": TEXT} if scheme == "w8a8" else {}
        quantized = quantize_checkpoint(trained, tmp_path / "quantized", scheme, **text).path
        faulty(fault="nothing")
        comparison = found(quantized, *BOTH, *PROMPTS, status=0)
        assert comparison["rows"][0]["operations"] == 4 * 16

    def test_prepared_weights_and_another_cache(self, faulty: Faulty, small: Path) -> None:
        faulty(fault="prepared")
        arguments = (small, *BOTH, *CAT)
        (note,) = found(*arguments, status=0)["not_compared"]
        assert note.startswith("store_kv_cache: cpu and faulty have different cache")
        assert f"not compared: {note}" in hal_compare(*arguments, status=0).stdout
        turned = found(small, "--backend", "faulty", "--backend", "cpu", *CAT, status=0)
        assert turned["rows"][0]["operations"] == comparison_calls(small)

    def test_limits_of_one_hold_for_both(self, faulty: Faulty, small: Path) -> None:
        faulty(fault="narrow")
        found(small, *BOTH, *CAT, status=0)
        first = hal.active_backend()
        assert first is not None
        assert (first.name, first.config.cache.block_size) == ("cpu", 48)

    def test_prompts_that_take_several_prefill_steps(
        self, faulty: Faulty, small: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HAL_MAX_PREFILL_TOKENS", "5")
        faulty(fault="nothing")
        found(small, *BOTH, "--prompt", "the cat sat on the mat", status=0)
        faulty(fault="lengths")
        found(small, *BOTH, "--prompt", "the cat sat on the mat", status=1)

    def test_prompts_from_a_file(self, faulty: Faulty, small: Path, tmp_path: Path) -> None:
        (tmp_path / "prompts").write_text("the cat\nthe rat\n")
        faulty(fault="nothing")
        arguments = ("--prompts-file", tmp_path / "prompts", "--max-new-tokens", "2")
        assert found(small, *BOTH, *arguments, status=0)["tokens"] == 4


def comparison_calls(checkpoint: Path) -> int:
    """Return the number of calls of the first layer: 12 in each of 16 steps, unless a text stopped early."""
    backend, other = hal.open("cpu"), hal.open("cpu", activate=False)
    tokens = hal.Checkpoint.open(checkpoint).tokenizer().encode("the cat").ids
    stops = hal.Checkpoint.open(checkpoint).stop_token_ids
    return compare_backends(checkpoint, backend, other, Prompts((tuple(tokens),), 16, stops)).rows[0].operations


class TestSaved:
    def saved(self, faulty: Faulty, trained: Path, folder: Path, fault: str, **options: str) -> SavedCall:
        faulty(fault=fault, **options)
        arguments = ("--dtype", "float32", *PROMPTS, "--save", folder)
        result = hal_compare(trained, *BOTH, *arguments, status=1)
        assert f"saved in {folder}" in result.stderr
        return SavedCall.load(folder)

    def test_a_replay_gives_what_each_gave(self, faulty: Faulty, trained: Path, tmp_path: Path) -> None:
        weights = str(trained / "model.safetensors")
        call = self.saved(faulty, trained, tmp_path / "call", "epsilon", weights=weights, norm=f"{NORM}.weight")
        assert (call.operation.name, call.about["path"], call.about["backends"]) == (
            "rms_norm",
            NORM,
            ["cpu", "faulty"],
        )
        for side, name in (("first", "cpu"), ("second", "faulty")):
            backend = hal.open({"backend": name, "options": {}}, activate=False)
            with torch.inference_mode():
                again = backend.ops.rms_norm(*call.arguments(side))
            assert torch.equal(again, call.results(side)["result"])
        assert not torch.equal(call.results("first")["result"], call.results("second")["result"])

    def test_strides_and_what_was_written(self, faulty: Faulty, trained: Path, tmp_path: Path) -> None:
        call = self.saved(faulty, trained, tmp_path / "call", "strides")
        arguments = dict(zip(call.operation.signature.parameters, call.arguments("first"), strict=True))
        assert not arguments["value"].is_contiguous()
        assert arguments["key_cache"][1:].eq(16.0).all()  # the value before the call
        ops.operation("store_kv_cache").reference(*arguments.values())
        assert torch.equal(arguments["value_cache"], call.results("first")["value_cache"])
        backend, second = hal.open({"backend": "faulty"}, activate=False), call.arguments("second")
        backend.ops.store_kv_cache(*second)
        assert torch.equal(second[3], call.results("second")["value_cache"])
        assert not torch.equal(second[3], arguments["value_cache"])

    def test_nothing_to_save(self, faulty: Faulty, small: Path, tmp_path: Path) -> None:
        faulty(fault="nothing")
        arguments = (
            small,
            *BOTH,
            *CAT,
            "--save",
            tmp_path / "call",
        )
        assert "nothing saved" in hal_compare(*arguments, status=0).stderr
        assert not (tmp_path / "call").exists()

    def test_every_kind_of_argument(self, tmp_path: Path) -> None:
        """Save a dtype, None, an expanded tensor, and an argument with another dtype in the second run."""
        operation = ops.operation("linear")
        x, weight = torch.ones(1, 4, dtype=torch.int8).expand(3, 4), torch.ones(2, 4, dtype=torch.int8)
        given = dict.fromkeys(operation.signature.parameters) | {
            "x": x,
            "weight": weight,
            "weight_scale": torch.ones(2, 1),
            "dtype": torch.float16,
            "form": ops.Form("int8", inputs="static_int8"),
        }
        other = {**given, "weight_scale": torch.ones(2, 1, dtype=torch.int64)}
        call = Call(0, 0, operation.name, "a", "a.0")
        result = {"result": torch.full((3, 2), 4.0, dtype=torch.float16)}
        save(Evidence(call, operation, given, other, result, result), ("cpu", "acme"), torch.float16, tmp_path / "call")
        loaded = SavedCall.load(tmp_path / "call")
        first, second = loaded.arguments("first"), loaded.arguments("second")
        assert first[0].stride() == (0, 1)
        assert torch.equal(first[0], x)
        assert first[4:] == [None, None, torch.float16, given["form"]]
        assert (first[3].dtype, second[3].dtype) == (torch.float32, torch.int64)
        assert torch.equal(operation.reference(*first), loaded.results("first")["result"])

    def test_options(self, tmp_path: Path) -> None:
        operation = ops.operation("paged_attention")
        sample = [each for each in operation.samples(ops.Draw()) if each[-1].softcap is not None][1]
        given = dict(zip(operation.signature.parameters, sample, strict=True))
        result = {"result": operation.reference(*sample)}
        evidence = Evidence(Call(0, 0, operation.name, "a", "a.0"), operation, given, given, result, result)
        save(evidence, ("cpu", "acme"), torch.float32, tmp_path / "call")
        loaded = SavedCall.load(tmp_path / "call")
        assert loaded.arguments("first")[-1] == sample[-1]
        assert torch.equal(operation.reference(*loaded.arguments("second")), result["result"])

    def test_a_folder_that_is_taken_or_holds_nothing(self, faulty: Faulty, small: Path, tmp_path: Path) -> None:
        faulty(fault="nothing")
        (tmp_path / CALL).write_text("{}")
        arguments = (small, *BOTH, *CAT, "--save")
        assert "already contains a saved call" in hal_compare(*arguments, tmp_path, status=2).stderr
        assert "the parent folder of" in hal_compare(*arguments, tmp_path / "a" / "b", status=2).stderr
        with pytest.raises(HalError, match="contains no saved call"):
            SavedCall.load(tmp_path / "a")
        (tmp_path / TENSORS).write_bytes(b"cut off")
        with pytest.raises(HalError, match="contains no saved call"):
            SavedCall.load(tmp_path)
        (tmp_path / TENSORS).unlink()
        assert not (tmp_path / TENSORS).exists()


class TestModes:
    def test_a_mode_is_that_of_decode_steps(self) -> None:
        config = CompilationConfig(decode=PhaseConfig(compiler="eager", capture_sizes=(4,)))
        found = in_mode(config, "graph").of("decode")
        assert (found.compiler, found.capture_sizes) == ("graph", (4,))

    @thorough(MODE)
    def test_of_the_cpu(self, small: Path) -> None:
        compilers = named("--compiler", "eager,graph,piecewise,piecewise_eager")
        arguments = ("--backend", "cpu", *compilers, "--dtype", "bfloat16", "--json")
        result = hal_compare(small, *arguments, *PROMPTS, status=0)
        comparisons = json.loads(result.stdout)
        assert [each["second"] for each in comparisons] == ["graph", "piecewise", "piecewise_eager"]
        for each in comparisons:
            layers = [f"layer {layer} (states)" for layer in range(2)]
            assert [row["layer"] for row in each["rows"]] == [*layers, LOGITS]
            assert all(row["rounding"] > 0 for row in each["rows"])

    @thorough(EXHAUSTIVE, r"\[(piecewise|graph)")
    @thorough(MODE, r"\[(eager|graph),|\[piecewise")
    @pytest.mark.parametrize("compilers", ["eager,graph", "graph,eager", "piecewise,graph"])
    def test_stale_lengths_in_a_graph(self, faulty: Faulty, small: Path, compilers: str) -> None:
        faulty(fault="stale")
        arguments = (small, "--backend", "faulty", *named("--compiler", compilers), *CAT)
        text = hal_compare(*arguments, status=1).stdout
        assert "NOT within tolerance" in text
        # Attention is wrong in layer 0, and its result first affects the states of layer 1.
        assert "the runs first differ by more than rounding in layer 1 (states), step 1 (decode)" in text
        assert "from the attention over layer 0 (states) on, up to layer 1 (states)" in text

    @thorough(MODE)
    def test_a_mode_that_has_nothing_stale(self, faulty: Faulty, small: Path) -> None:
        faulty(fault="stale")
        found(small, "--backend", "faulty", *named("--compiler", "eager,piecewise"), *CAT, status=0)

    @thorough(MODE)
    def test_the_configuration_of_all_modes(self, faulty: Faulty, small: Path) -> None:
        faulty(fault="stale")
        arguments = (small, "--backend", "faulty", "--compiler", "eager", "--compiler", "graph", *CAT)
        found(*arguments, "--compilation-config", '{"capture_sizes": [4]}', status=1)
        found(*arguments, "--compilation-config", '{"decode": {"capture_sizes": [4]}}', status=1)
        result = hal_compare(*arguments, "--compilation-config", '{"capture_size": [4]}', status=2)
        assert "did you mean 'capture_sizes'?" in result.stderr


class TestProgress:
    @staticmethod
    def said(stderr: str) -> list[str]:
        """Return what is said with the seconds since the start, each part once."""
        texts = re.findall(r"^\[\d+ s\] (.*)$", stderr, re.MULTILINE)
        return [each for each in texts if not each.endswith((" left", "still running"))]

    def test_two_backends(self, faulty: Faulty, small: Path) -> None:
        faulty(fault="nothing")
        result = hal_compare(small, *BOTH, *PROMPTS, status=0)
        assert self.said(result.stderr) == [
            "loading the model into cpu",
            "loading the model into faulty",
            "comparing faulty with cpu",
        ]
        assert " s] " not in result.stdout

    @thorough(MODE)
    def test_compilers(self, small: Path) -> None:
        arguments = ("--backend", "cpu", *named("--compiler", "graph,piecewise"), *PROMPTS)
        assert self.said(hal_compare(small, *arguments, status=0).stderr) == [
            "loading the model into cpu",
            "preparing eager",
            "preparing graph",
            "preparing piecewise",
            "comparing piecewise with graph",
        ]


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((), "--backend names 0 backends; a comparison needs two"),
            (("--backend", "cpu"), "--backend names 1 backend; a comparison needs two"),
            ((*BOTH, "--backend", "cpu"), "--backend names 3 backends"),
            (("--backends", "cpu,faulty"), "'--backend'"),
            (
                ("--backend", "cpu", "--backend", "fualty"),
                "no driver 'fualty' is installed\nremedy: did you mean 'faulty'?",
            ),
            (
                (*BOTH, "--compiler", "eager", "--compiler", "graph"),
                "--backend names 2",
            ),
            (("--backend", "cpu", "--compiler", "eager"), "the modes to compare are eager\nremedy: name at least two"),
            (("--backend", "cpu", "--compiler", "eager", "--compiler", "eager"), "name at least two modes, each once"),
            (("--backend", "cpu", "--compiler", "eager", "--compiler", "grahp"), "did you mean 'graph'?"),
            (("--backend", "cpu", "--compiler", "eager", "--compiler", "graph", "--save", "x"), "calls no operations"),
            (
                (*BOTH, "--compilation-config", '{"on_capture_error": "eager"}'),
                "--compilation-config needs --compiler",
            ),
            ((*BOTH, "--emulate"), "has no emulated device"),
            (
                (*BOTH, "--dtype", "bfloat16"),
                "faulty does not compute in torch.bfloat16",
            ),
            ((*BOTH, "--dtype", "float8"), "unknown value 'float8'"),
            ((*BOTH, "--max-new-tokens", "0"), "max_new_tokens is 0"),
        ],
    )
    def test_arguments(self, faulty: Faulty, small: Path, arguments: tuple[str, ...], message: str) -> None:
        faulty(fault="narrow")
        assert message in hal_compare(small, *arguments, *CAT, status=2).stderr

    def test_no_prompt(self, small: Path) -> None:
        assert "No prompt given" in hal_compare(small, "--backend", "cpu", "--backend", "cpu", status=2).stderr

    def test_the_checkpoints_own_dtype(self, faulty: Faulty, tmp_path: Path) -> None:
        faulty(fault="narrow")
        path = random_checkpoint(tmp_path / "half", dtype="bfloat16")
        result = hal_compare(path, *BOTH, *CAT, status=2)
        assert "faulty does not compute in bfloat16, the checkpoint's dtype" in result.stderr
        assert "set dtype to one that both support: float32" in result.stderr

    def test_a_reference_that_gives_nan(self, faulty: Faulty, small: Path) -> None:
        faulty(fault="nan")
        result = hal_compare(small, "--backend", "faulty", "--backend", "cpu", *CAT, status=2)
        assert "the reference's logits contain NaN in step 0" in result.stderr

    def test_from_python(self, cpu: hal.Backend, small: Path) -> None:
        prompts = Prompts(((5, 6),), 2)
        with pytest.raises(CompareError, match="the same object"):
            compare_backends(small, cpu, cpu, prompts)
        with pytest.raises(HalError, match="was opened for dtype auto, and cpu for bfloat16"):
            compare_backends(small, cpu, hal.open({"backend": "cpu", "dtype": "bfloat16"}, activate=False), prompts)
        with pytest.raises(HalError, match="has no compiler 'npugraph_ex'"):
            compare_modes(small, cpu, ("eager", "npugraph_ex"), prompts)
        with pytest.raises(BatchError, match="no prompts"):
            Prompts(((),), 2)

    @thorough(MODE)
    def test_more_new_tokens_than_the_model_takes_end_where_it_does(self, cpu: hal.Backend, tmp_path: Path) -> None:
        """Graphs refuse block tables wider than the model's maximum length requires."""
        short = random_checkpoint(tmp_path / "short", max_position_embeddings=80, eos_token_id=None)
        (found,) = compare_modes(short, cpu, ("eager", "graph"), Prompts((tuple(range(5, 81)), (5, 6)), 500))
        assert found.agrees
        assert found.steps == 80 - 2


class TestMeasures:
    def test_a_result_is_judged_by_its_operations_tolerance(self) -> None:
        linear = ops.operation("linear")
        want = torch.tensor([[1.0, 0.5], [0.0, -2.0]])
        got = want + torch.tensor([[0.0, 3e-5], [0.0, 0.0]])
        worst = worst_error(linear, torch.float32, {"result": got}, {"result": want})
        assert worst.at == (0, 1)
        assert worst.allowed == pytest.approx(1e-5 + 0.5e-5)
        assert worst.ratio == pytest.approx(2, rel=0.01)
        # Rows of large values have a larger absolute tolerance, because sums of large products are rounded more.
        large = worst_error(linear, torch.float32, {"result": got * 100}, {"result": want * 100})
        assert large.allowed == pytest.approx(1e-5 * 100 * (1.25 / 2) ** 0.5 + 50e-5)

    def test_int8_may_be_one_off_seldom(self) -> None:
        quantize, want = ops.operation("quantize"), torch.zeros(1000, dtype=torch.int8)

        def ratio(values: list[int]) -> float:
            got = want.clone()
            got[: len(values)] = torch.tensor(values, dtype=torch.int8)
            return worst_error(quantize, torch.float32, {"result": got}, {"result": want}).ratio

        assert ratio([]) == 0
        assert ratio([1, -1] * 5) == pytest.approx(10 / 11)
        assert ratio([1] * 12) > 1
        assert ratio([2]) > 1

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite(self, value: float) -> None:
        norm, want = ops.operation("rms_norm"), torch.tensor([[1.0, 2.0]])
        strange = torch.tensor([[1.0, value]])
        assert worst_error(norm, torch.float32, {"result": strange}, {"result": want}).ratio == float("inf")
        assert worst_error(norm, torch.float32, {"result": strange}, {"result": strange}).ratio == 0
        assert drift(strange, want) == float("inf")
        assert drift(strange, strange) == 0

    def test_another_dtype_or_another_number_of_results(self) -> None:
        norm, want = ops.operation("rms_norm"), torch.ones(1, 2)
        assert "float64[1, 2]" in worst_error(norm, torch.float32, {"result": want.double()}, {"result": want}).problem
        assert "it gave nothing" in worst_error(norm, torch.float32, {}, {"result": want}).problem

    def test_a_token_within_rounding_is_a_tie(self) -> None:
        drifts = Drifts()
        first = torch.tensor([[1.0, 0.99, 0.0], [1.0, 0.5, 0.0]])
        second = torch.tensor([[0.99, 1.0, 0.0], [0.5, 1.0, 0.0]])
        disturbed = first + torch.tensor([[0.01, 0.0, 0.0], [0.0, 0.01, 0.0]])
        states = ({LOGITS: each} for each in (first, second))
        assert drifts.step(*states, ({LOGITS: first}, {LOGITS: disturbed}), [4, 7]) == [0, 0]
        tie, other = drifts.choices()
        assert (tie.prompt, tie.first, tie.second, tie.tie) == (4, 0, 1, True)
        assert tie.margin == pytest.approx(0.01)
        assert tie.margin < tie.rounding < 0.05
        assert (other.prompt, other.tie) == (7, False)
        with pytest.raises(NumericsError, match="step 1"):
            drifts.step({LOGITS: first * float("nan")}, {LOGITS: first}, ({LOGITS: first}, {LOGITS: first}), [4, 7])

    def test_copies_keep_strides(self) -> None:
        base = torch.arange(24.0).view(4, 6)
        for tensor in (base[:, 2:4], base.t(), base[0].expand(3, 6), base[:0]):
            copy = transplant(tensor, torch.device("cpu"))
            assert torch.equal(copy, tensor)
            assert copy.stride() == tensor.stride()
            assert not tensor.numel() or copy.data_ptr() != tensor.data_ptr()

    def test_the_layer_of_a_path(self) -> None:
        assert layer_of("model.layers.12.mlp.experts.3.up_proj") == "model.layers.12"
        assert layer_of("model.norm2") == layer_of("lm_head") == OUTSIDE
