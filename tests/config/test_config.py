"""Tests for configuration: any input gives a valid Config or a ConfigError that names the key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from hal.backends.cpu.driver import CpuOptions
from hypothesis import given
from hypothesis import strategies as st

import hal
from hal.config import (
    CacheConfig,
    CompilationConfig,
    Config,
    PhaseConfig,
    cache_folder,
    environment_mapping,
    environment_options,
    load,
    parse_json,
    read,
    read_file,
    read_model_config,
    require,
    to_mapping,
)
from hal.errors import ConfigError, UnknownKey

SIZES = st.integers(1, 1 << 16)
TEXT = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
COMPILATIONS = st.builds(
    CompilationConfig,
    compiler=TEXT,
    capture_sizes=st.none() | st.lists(SIZES, min_size=1, max_size=4).map(tuple),
    max_capture_size=st.none() | SIZES,
    on_capture_error=st.sampled_from(["raise", "eager"]),
)
CONFIGS = st.builds(
    Config,
    backend=TEXT,
    dtype=st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    strict=st.booleans(),
    compilation=COMPILATIONS,
    cache=st.builds(CacheConfig, num_tokens=SIZES, block_size=st.none() | SIZES),
    options=st.dictionaries(TEXT, JSON, max_size=3),
)
KEYS = [field.name for cls in (Config, CompilationConfig, CacheConfig) for field in attrs.fields(cls)]
# Near misses: known keys with values of every kind, so that later checks are reached too.
TABLES = st.dictionaries(st.sampled_from(KEYS) | TEXT, JSON, max_size=4)
NEAR = st.dictionaries(st.sampled_from(KEYS) | TEXT, JSON | TABLES, max_size=4)


def config_or_error(source: Any) -> Config | None:
    """Return a Config that survives a round trip, or None after a ConfigError."""
    try:
        config = load(source)
    except ConfigError:
        return None
    assert load(attrs.asdict(config)) == config
    return config


class TestRead:
    def test_the_default(self) -> None:
        assert load({}) == Config()
        assert load(Config(strict=True)) == Config(strict=True)

    @pytest.mark.parametrize(
        ("table", "problem"),
        [
            ({"backand": "cpu"}, r"unknown key 'backand' \(did you mean 'backend'\?.*config"),
            ({"cache": {"num_tokns": 1}}, r"unknown key 'num_tokns' \(did you mean 'num_tokens'\?.*config\.cache"),
            ({"cache": {"num_tokens": "4096"}}, r"expected int, found str '4096'.*config\.cache\.num_tokens"),
            ({"cache": {"num_tokens": 1.0}}, r"expected int, found float 1\.0"),
            ({"cache": {"num_tokens": True}}, r"expected int, found bool True"),
            ({"cache": {"num_tokens": None}}, r"expected int, found null"),
            ({"cache": {"num_tokens": 0}}, r"must be at least 1, not 0.*config\.cache"),
            ({"cache": None}, r"expected a table, found null.*config\.cache"),
            ({"strict": 1}, r"expected bool, found int 1.*config\.strict"),
            ({"strict": "true"}, r"expected bool, found str 'true'"),
            ({"dtype": "float64"}, r"unknown value 'float64' \(did you mean 'float16'\?.*config\.dtype"),
            ({"dtype": "half"}, r"unknown value 'half' \(did you mean 'float16'\?"),
            ({"dtype": "FP16"}, r"did you mean 'float16'\?"),
            ({"dtype": "bf16"}, r"did you mean 'bfloat16'\?"),
            ({"dtype": "torch.float"}, r"did you mean 'float32'\?"),
            ({"dtype": None}, r"unknown value None"),
            ({"backend": 3}, r"expected str, found int 3.*config\.backend"),
            ({"compilation": {"capture_sizes": 4}}, r"expected a list, found int 4"),
            ({"compilation": {"capture_sizes": "12"}}, r"expected a list, found str '12'"),
            ({"compilation": {"capture_sizes": [1, "2"]}}, r"expected int, found str '2'"),
            ({"compilation": {"capture_sizes": [1, -2]}}, r"must be at least 1, not -2"),
            ({"compilation": {"capture_sizes": []}}, r"must not be empty; leave the key out"),
            ({"compilation": {"max_capture_size": 0}}, r"must be at least 1, not 0"),
            ({"compilation": {"passes": {"add_rms_norm": "no"}}}, r"expected bool, found str 'no'"),
            ({"options": []}, r"expected a table with string keys, found list"),
            ({"options": {1: 2}}, r"expected a table with string keys"),
        ],
    )
    def test_what_is_wrong_is_named(self, table: dict[str, Any], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem) as caught:
            load(table)
        assert (caught.value.key,) == (*table,)
        assert isinstance(caught.value, UnknownKey) == ("backand" in table)

    def test_all_that_is_wrong_is_named_at_once(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load({"backend": 1, "strict": 2, "cache": {"num_tokens": 0}, "nothing": 3})
        for place in ("config.backend", "config.strict", "config.cache", "nothing"):
            assert place in caught.value.problem

    @pytest.mark.parametrize("source", [3, 2.5, ["cpu"], b"cpu", object()])
    def test_what_is_no_source(self, source: Any) -> None:
        with pytest.raises(ConfigError, match="cannot read a config from"):
            load(source)
        with pytest.raises(ConfigError, match="must be a table of keys and values"):
            read(Config, source)

    def test_an_integer_will_do_for_a_float(self) -> None:
        @attrs.frozen
        class Rope:
            theta: float

        assert read(Rope, {"theta": 10000}) == Rope(10000.0)
        with pytest.raises(ConfigError, match="required key 'theta' is missing"):
            read(Rope, {})

    @pytest.mark.parametrize(
        ("config", "problem"),
        [
            (Config(compilation=CompilationConfig(on_capture_error="Raise")), "unknown value 'Raise'.*did you mean"),
            (Config(compilation=CompilationConfig(decode=PhaseConfig(capture_sizes=4))), "expected a list, found int"),
            (Config(compilation=CompilationConfig(passes={"a": 1})), "expected bool, found int 1"),
            (Config(dtype="float64"), "unknown value 'float64'"),
            (Config(cache=CacheConfig(num_tokens=64.0)), "expected int, found float"),
            (Config(cache=None), "expected a table, found null"),
            (Config(compilation={"compilr": "graph"}), "unknown key 'compilr'"),
        ],
    )
    def test_objects_are_checked_too(self, config: Config, problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            load(config)
        with pytest.raises(ConfigError, match=problem):
            hal.open(attrs.evolve(config, backend="cpu"))
        with pytest.raises(ConfigError, match=problem):
            hal.open("cpu").configure(config)

    def test_an_object_of_tables_is_read_as_tables_are(self) -> None:
        config = Config(compilation={"capture_sizes": [1, 2]})  # type: ignore[arg-type]
        assert load(config) == Config(compilation=CompilationConfig(capture_sizes=(1, 2)))

    def test_options_stay_the_objects_that_they_are(self) -> None:
        given = {"cache": CacheConfig(), "sizes": (1, 2), "hook": print}
        assert load(Config(options=given)).options == given

    def test_the_mapping_is_left_alone(self) -> None:
        table = {"compilation": {"capture_sizes": [1, 2]}, "options": {"a": [1]}}
        before = json.dumps(table)
        load(table)
        assert json.dumps(table) == before

    @given(CONFIGS)
    def test_round_trip(self, config: Config) -> None:
        table = attrs.asdict(config)
        assert load(table) == config
        assert load(json.dumps(table)) == config

    @given(JSON | NEAR)
    def test_any_value(self, value: Any) -> None:
        if not isinstance(value, str) and value is not None:
            config_or_error(value)

    @given(NEAR)
    def test_any_json(self, value: Any) -> None:
        assert config_or_error(json.dumps(value)) == config_or_error(json.loads(json.dumps(value)))

    def test_literals_of_any_type(self) -> None:
        @attrs.frozen
        class Model:
            biased: Literal[False] = False
            groups: Literal[1, 2] = 1
            act: Literal["silu", None] = None

        given = {"biased": False, "groups": 2, "act": "silu"}
        assert read(Model, given) == Model(groups=2, act="silu")
        assert read(Model, {"act": None}) == Model()
        for values, message in (
            ({"biased": True}, r"unknown value True \(known: false\) @ config.biased"),
            ({"biased": 0}, r"unknown value 0 \(known: false\)"),
            ({"biased": "false"}, r"unknown value 'false' \(known: false\)"),
            ({"groups": True}, r"unknown value True \(known: 1, 2\)"),
            ({"groups": 1.0}, r"unknown value 1.0 \(known: 1, 2\)"),
            ({"groups": [1]}, r"unknown value \[1\] \(known: 1, 2\)"),
            ({"act": "gelu"}, r"unknown value 'gelu' \(known: \"silu\", null\)"),
        ):
            with pytest.raises(ConfigError, match=message):
                read(Model, values)


class TestText:
    def test_text_is_json_a_path_or_a_name(self, tmp_path: Path) -> None:
        content = {"backend": "cpu", "cache": {"num_tokens": 5}}
        expected = Config(backend="cpu", cache=CacheConfig(num_tokens=5))
        file = tmp_path / "config.json"
        file.write_text(json.dumps(content))
        toml = tmp_path / "config.toml"
        toml.write_text('backend = "cpu"\n[cache]\nnum_tokens = 5\n')
        for source in (content, f"  {json.dumps(content)}", str(file), file, str(toml), toml):
            assert load(source) == expected
        assert load("acme") == Config(backend="acme")

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ('{"backend": "cpu", "backend": "npu"}', "config text is not valid JSON: duplicate keys: backend"),
            ('{"cache": {"num_tokens": 1, "num_tokens": 2}}', "duplicate keys: num_tokens"),
            ("{", "is not valid JSON"),
            ("{} {}", "is not valid JSON"),
            ('{"a":' * 100_000 + "1" + "}" * 100_000, "is not valid JSON"),
            ('{"options": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}", "is not valid JSON"),
            ('{"cache": {"num_tokens": ' + "9" * 5000 + "}}", "is not valid JSON"),
            ('{"cache": {"num_tokens": NaN}}', "expected int, found float nan"),
        ],
    )
    def test_bad_json(self, text: str, problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            load(text)

    def test_json_that_is_no_object(self) -> None:
        for text in ("[]", "3", "null", '"cpu"'):
            with pytest.raises(ConfigError, match="must hold a JSON object, not"):
                parse_json(text, "here")

    def test_a_value_that_holds_itself(self) -> None:
        loop: dict[str, Any] = {}
        loop["cache"] = loop
        with pytest.raises(ConfigError, match="unknown key"):
            load(loop)

    @pytest.mark.parametrize("suffix", ["json", "toml"])
    @pytest.mark.parametrize("content", [None, b"\xff", b"{", b"[a", b'a = "', b"[[[[" * 5000])
    def test_bad_files(self, tmp_path: Path, suffix: str, content: bytes | None) -> None:
        file = tmp_path / f"config.{suffix}"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=re.escape(str(file))):
            load(file)

    def test_toml_that_gives_a_key_twice(self, tmp_path: Path) -> None:
        file = tmp_path / "config.toml"
        file.write_text("strict = true\nstrict = false\n")
        with pytest.raises(ConfigError, match="is not valid TOML"):
            read_file(file)

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        (tmp_path / "folder.json").mkdir()
        with pytest.raises(ConfigError, match="cannot read the config file"):
            load(tmp_path / "folder.json")

    @given(st.text())
    def test_any_text(self, text: str) -> None:
        config_or_error(text)
        config_or_error("{" + text)
        config_or_error(json.dumps({text: text, "options": {text: text}}))

    @given(st.text())
    def test_any_toml(self, tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
        file = tmp_path_factory.getbasetemp() / "any.toml"
        file.write_text(text, encoding="utf-8", errors="replace")
        config_or_error(file)

    @given(st.text(min_size=1).filter(lambda text: not text.lstrip().startswith("{")))
    def test_other_text_is_a_name(self, text: str) -> None:
        if "/" not in text and not Path(text).suffix:
            assert to_mapping(text) == {"backend": text}

    @pytest.mark.parametrize("name", ["config.yaml", "config", "config.json.bak", ".json"])
    def test_files_of_other_formats(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / name
        file.write_text("backend: cpu\n")
        for source in (file, str(file)):
            with pytest.raises(ConfigError, match=f"config file {re.escape(str(file))} is neither .json nor .toml"):
                load(source)
        with pytest.raises(ConfigError, match=r"config file elsewhere\.yaml is neither"):
            load("elsewhere.yaml")

    @pytest.mark.parametrize("name", ["config.JSON", "config.Toml"])
    def test_a_suffix_in_capitals(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text('{"backend": "cpu"}' if name.endswith("N") else 'backend = "cpu"')
        assert load(str(tmp_path / name)) == load(tmp_path / name) == Config(backend="cpu")

    @pytest.mark.parametrize(
        ("suffix", "text"), [("toml", "cache = {num_tokens = '5'}"), ("json", '{"cache": {"num_tokens": "5"}}')]
    )
    def test_what_is_wrong_in_a_file_is_told_with_its_name(self, tmp_path: Path, suffix: str, text: str) -> None:
        file = tmp_path / f"config.{suffix}"
        file.write_text(text)
        for source in (file, str(file)):
            with pytest.raises(
                ConfigError, match=rf"expected int, .* @ {re.escape(str(file))}\.cache\.num_tokens"
            ) as told:
                load(source)
            assert told.value.remedy == "give an integer"

    def test_the_keys_are_listed_once(self) -> None:
        with pytest.raises(ConfigError) as told:
            load({"cach": 1, "cache": {"num_tokns": 1}, "strict": 1})
        lists = re.findall(r"the keys of (\S+): ", str(told.value))
        assert lists == ["config.cache", "config"]
        assert str(told.value).count("block_size") == 1


class TestEnvironment:
    def read(self, environ: dict[str, str], *driver_names: str) -> Config:
        return read(Config, environment_mapping(environ, driver_names), "environment")

    def test_names_nest_at_two_underscores(self) -> None:
        environ = {
            "HAL_BACKEND": "cpu",
            "HAL_STRICT": "true",
            "HAL_CACHE__NUM_TOKENS": "128",
            "HAL_COMPILATION__CAPTURE_SIZES": "[1, 2]",
            "HAL_COMPILATION__ON_CAPTURE_ERROR": "eager",
            "HAL_OPTIONS": '{"cards": 2}',
            "HOME": "/",
            "HALVES": "2",
        }
        assert self.read(environ) == Config(
            backend="cpu",
            strict=True,
            compilation=CompilationConfig(capture_sizes=(1, 2), on_capture_error="eager"),
            cache=CacheConfig(num_tokens=128),
            options={"cards": 2},
        )

    def test_it_is_read_from_the_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HAL_CACHE__BLOCK_SIZE", "32")
        assert load().cache.block_size == 32

    @pytest.mark.parametrize("text", ["3", "true", "null", '"quoted"', "1e3"])
    def test_text_stays_text(self, text: str) -> None:
        assert self.read({"HAL_BACKEND": text}).backend == text

    @pytest.mark.parametrize(
        ("environ", "problem"),
        [
            ({"HAL_BACKAND": "cpu"}, "no environment variable HAL_BACKAND .did you mean 'HAL_BACKEND'"),
            ({"HAL_CHACHE_DIR": "/tmp"}, "no environment variable HAL_CHACHE_DIR .did you mean 'HAL_CACHE_DIR'"),
            ({"HAL_CACHE__NUM_TOKENS": "many"}, "expected int, found str 'many'.*environment.cache.num_tokens"),
            ({"HAL_CACHE__NUM_TOKENS": ""}, "expected int, found str ''"),
            ({"HAL_STRICT": "yes"}, "(?s)expected bool, found str 'yes'.*remedy: give true or false"),
            ({"HAL_STRICT": "2"}, "expected bool, found int 2"),
            ({"HAL_COMPILATION": "1"}, "expected a table, found int 1"),
            ({"HAL_COMPILATION__CAPTURE_SIZES": "1"}, "(?s)expected a list, found int 1.*remedy: give a list"),
            ({"HAL_CACHE": '{"num_tokens": 1, "num_tokens": 2}'}, "HAL_CACHE is not valid JSON: duplicate keys"),
            ({"HAL_CACHE": "{}", "HAL_CACHE__NUM_TOKENS": "1"}, "HAL_CACHE__NUM_TOKENS sets a key of cache"),
            ({"HAL_CACHE__NUM_TOKENS": "1", "HAL_cache": "{}"}, "HAL_cache sets cache, which another variable sets"),
            ({"HAL_STRICT": "true", "HAL_strict": "false"}, "HAL_strict sets strict, which another variable sets"),
            ({"HAL_CACHE": "7", "HAL_CACHE__NUM_TOKENS": "1"}, "HAL_CACHE__NUM_TOKENS sets a key of cache"),
            ({"HAL_": "1"}, "no environment variable HAL_ "),
            ({"HAL_CACHE__": "1"}, "unknown key ''"),
            ({"HAL_CACHE__NUM_TOKENS__DEEP": "1"}, "expected int, found dict"),
            ({"HAL_CACHE__NUM_TOKENS": "[" * 100_000}, "expected int, found str"),
        ],
    )
    def test_what_is_wrong_is_named(self, environ: dict[str, str], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            self.read(environ)

    @pytest.mark.parametrize(("text", "expected"), [("0", False), ("1", True), ("false", False), ("true", True)])
    def test_switches_are_written_with_digits_or_words(self, text: str, expected: bool) -> None:
        names = ("HAL_STRICT", "HAL_COMPILATION__DEBUG", "HAL_COMPILATION__PASSES__FUSE")
        config = self.read(dict.fromkeys(names, text))
        assert [config.strict, config.compilation.debug, *config.compilation.passes.values()] == [expected] * 3
        options = environment_options("cpu", {"HAL_CPU_PACK_WEIGHTS": text, "HAL_CPU_NATIVE": text})
        assert read(CpuOptions, options) == CpuOptions(pack_weights=expected, native=expected)
        assert {type(each) for each in attrs.astuple(read(CpuOptions, options))} == {bool, type(None)}
        with pytest.raises(ConfigError, match="expected bool, found int 1"):
            read(Config, {"strict": 1})

    def test_a_drivers_own_variables_are_left_to_it(self) -> None:
        environ = {"HAL_ACME_CARDS": "2", "HAL_ACME_PATH": "/lib", "HAL_BACKEND": "acme"}
        assert self.read(environ, "acme", "cpu") == Config(backend="acme")
        assert environment_options("acme", environ) == {"cards": 2, "path": "/lib"}
        assert environment_options("cpu", environ) == {}
        with pytest.raises(ConfigError, match="no environment variable HAL_ACME_CARDS"):
            self.read(environ, "cpu")

    def test_a_drivers_name_does_not_hide_the_configs_tables(self) -> None:
        assert self.read({"HAL_CACHE__NUM_TOKENS": "3"}, "cache").cache.num_tokens == 3
        assert environment_options("cache", {"HAL_CACHE__NUM_TOKENS": "3", "HAL_CACHE_SIZE": "4"}) == {"size": 4}
        assert environment_options("cache", {"HAL_CACHE_DIR": "/tmp"}) == {}

    @given(st.dictionaries(st.sampled_from(KEYS) | TEXT, st.text(max_size=20) | JSON.map(json.dumps), max_size=5))
    def test_any_environment(self, values: dict[str, str]) -> None:
        for prefix in ("HAL_", "HAL_CACHE__", "HAL_COMPILATION__", "HAL_OPTIONS__"):
            environ = {f"{prefix}{name.upper()}": text for name, text in values.items()}
            try:
                config = self.read({**environ, "HAL_BACKEND": "cpu"}, "cpu")
            except ConfigError:
                continue
            assert load(attrs.asdict(config)) == config


@pytest.mark.parametrize("variable", ["HAL_CACHE_DIR", "XDG_CACHE_HOME"])
def test_a_cache_in_a_home_folder_that_is_not_there(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HAL_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, "~no-such-user/cache")
    with pytest.raises(ConfigError, match="home folder that does not exist") as caught:
        cache_folder("acme")
    assert "set HAL_CACHE_DIR" in caught.value.remedy


class TestModelConfig:
    @attrs.frozen
    class Model:
        width: int
        eps: float = 1e-6

    def test_what_cannot_change_inference_is_left_out(self, caplog: pytest.LogCaptureFixture) -> None:
        table = {"width": 8, "eps": None, "use_cache": True, "architectures": ["Model"], "head_layers": None}
        assert read_model_config(self.Model, table) == self.Model(8)
        assert not caplog.records

    def test_what_is_not_read_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        read_model_config(self.Model, {"width": 8, "num_experts": 4, "attention_sinks": True})
        assert "keys that Model does not read: attention_sinks, num_experts" in caplog.text

    def test_keys_of_positions_are_named(self, caplog: pytest.LogCaptureFixture) -> None:
        """Not every model reads them."""
        beside = {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64}
        read_model_config(self.Model, {"width": 8, **beside})
        assert "does not read: original_max_position_embeddings, partial_rotary_factor" in caplog.text

    @pytest.mark.parametrize(
        ("table", "problem"),
        [
            ({}, "required key 'width' is missing"),
            ({"width": "8"}, "expected int, found str '8'.*config.json"),
            ({"width": 8, "quantization_config": {"bits": 4}}, "config.json has a quantization_config"),
        ],
    )
    def test_what_is_wrong_is_named(self, table: dict[str, Any], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            read_model_config(self.Model, table)


@pytest.mark.parametrize(("name", "value"), [("HAL_CACHE_DIR", "{folder}"), ("HAL_NPU_EMULATOR", "1")])
def test_variables_that_are_no_configuration(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other variables of hal, which the configuration must ignore."""
    monkeypatch.setenv(name, value.format(folder=tmp_path))
    assert hal.open().active


@pytest.mark.parametrize("given", [{}, {"cache": {}}, {"cache": {"block_size": None}}, {"cache": {"block_size": 16}}])
def test_an_option_of_an_engine_sets_a_key(given: dict[str, Any]) -> None:
    require(given, "cache.block_size", 16, "the engine's page_size")
    assert given == {"cache": {"block_size": 16}}


def test_auto_gives_way_to_an_option_of_an_engine() -> None:
    given = {"dtype": "auto"}
    require(given, "dtype", "float16", "the engine's dtype")
    assert given == {"dtype": "float16"}


def test_an_option_of_an_engine_that_contradicts_is_refused() -> None:
    problem = "the engine's page_size requires cache.block_size = 16, and hal's configuration has cache.block_size = 32"
    with pytest.raises(ConfigError, match=problem):
        require({"cache": {"block_size": 32}}, "cache.block_size", 16, "the engine's page_size")
