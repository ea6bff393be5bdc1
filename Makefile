# Each target does everything from nothing: virtual environment, installation, run.
PYTHON ?= python3
VENV ?= .venv
LINUX := $(filter Linux,$(shell uname -s))
# torch's CPU build: the package index has one for macOS only. Its build for Linux is for CUDA: gigabytes larger, and
# torch_npu aborts beside it. TORCH=torch==2.13.0 chooses that.
TORCH ?= torch==2.13.0$(if $(LINUX),+cpu)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# SmolLM2-135M-Instruct, which a package of the package index carries as data.
MODEL ?= checkpoints/smollm2-135m-instruct.gguf
# For torch-npu: beside it, and without CANN, `import torch` fails, and so does transformers.
NPU_VENV ?= $(VENV)/npu
# For the CUDA driver on the emulated CUDA: a separate environment with torch for CUDA.
CUDA_VENV ?= $(VENV)/cuda
# For the test that hal refuses torch-npu beside torch for CUDA.
CUDA_BUILD_VENV ?= $(VENV)/cuda-build
VLLM ?= 0.32.0
VLLM_VENV ?= $(VENV)/vllm-$(VLLM)
SGLANG ?= 0.5.23
SGLANG_VENV ?= $(VENV)/sglang-$(SGLANG)
CUDA_TESTS ?= $(wildcard tests/backends/cuda/test_cuda_gpu_*.py)

BIN = $(VENV)/bin
NPU_BIN = $(NPU_VENV)/bin
# What is imported is compiled then, and kept: pip would compile all of it, on one core, which takes as long as the rest.
PIP = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE =
# One retry: where pip cannot reach TORCH_INDEX, another source of pip's configuration may have the build.
INSTALL_TORCH = $(PIP) --retries 1 --extra-index-url $(TORCH_INDEX) $(TORCH) \
  $(if $(findstring +cpu,$(TORCH)),|| { echo "$$NO_CPU_BUILD"; $(PIP) $(TORCH:+cpu=); })
define NO_CPU_BUILD
== $(TORCH) is neither in $(TORCH_INDEX) nor in another source that pip is configured with.
== $(TORCH:+cpu=) is installed instead. If that is a build for CUDA, it takes gigabytes, the demo leaves out the
== emulated NPU, and the tests that need torch_npu fail or are skipped. To avoid that, stop here, and run make with
== TORCH_INDEX set to a mirror of the index, or PIP_FIND_LINKS to a folder with the wheel of the CPU build.
endef
export NO_CPU_BUILD
define CHECK_BUILD
import sys
from hal.backends.npu.torch_build import refused_build
refused = refused_build()
sys.exit(refused and f"== {refused.reason}: {refused.hint}")
endef
export CHECK_BUILD

.PHONY: demo chat check test test-all test-exhaustive thorough families bench lint types layers docs hooks checkpoint clean test-cuda-emulated test-cuda-build test-processors test-vllm test-sglang

# The same questions on the CPU, on an emulated NPU and on two, which must give the same answers. The NPU computes in 16 bits.
QUESTIONS = $(MODEL) --dtype float16 --chat --greedy --max-new-tokens 24 \
  --prompt 'What is the capital of France?' --prompt 'Name three colors.'
CONTINUED = checkpoints/tiny-python --dtype float16 --max-new-tokens 80 --temperature 0.85 --top-p 0.95 --seed 3 \
  --prompt 'def read_lines(path):' --prompt 'class Stack:'
DEMO ?= QUESTIONS

demo: $(VENV)/.base
	@if $(MAKE) --no-print-directory --silent $(MODEL); then $(MAKE) --no-print-directory demo-texts; else \
	  echo '== so the demo continues Python, with the small model of this repository'; \
	  $(MAKE) --no-print-directory demo-texts DEMO=CONTINUED; fi

chat: $(VENV)/.base $(MODEL)
	$(BIN)/hal chat $(MODEL)

checkpoints/smollm2-135m-instruct.gguf: | $(VENV)/.base
	@$(BIN)/python tools/checkpoints/fetch.py $@

.PHONY: demo-texts demo-npu
demo-texts:
	$(BIN)/hal generate $($(DEMO)) --backend cpu > $(VENV)/demo-cpu.txt
	@cat $(VENV)/demo-cpu.txt
ifndef LINUX
	@echo '== the emulated NPU needs Linux, so that half is left out'
else
	@if $(BIN)/python -c "$$CHECK_BUILD"; then $(MAKE) --no-print-directory demo-npu; \
	  else echo '== so the half on the emulated NPU is left out'; fi
endif

demo-npu: $(NPU_VENV)/.npu
	$(NPU_BIN)/hal generate $($(DEMO)) --backend npu --emulate > $(VENV)/demo-npu.txt
	@cat $(VENV)/demo-npu.txt
	@diff $(VENV)/demo-cpu.txt $(VENV)/demo-npu.txt || { echo '== CPU and emulated NPU: the texts differ'; exit 1; }
	@echo '== CPU and emulated NPU: the same text'
	$(NPU_BIN)/hal generate $($(DEMO)) --backend npu --emulate --data-parallel 2 > $(VENV)/demo-npus.txt
	@diff $(VENV)/demo-npu.txt $(VENV)/demo-npus.txt || { echo '== one and two emulated NPUs: the texts differ'; exit 1; }
	@echo '== one and two emulated NPUs: the same text'

# A worker for each core takes whole files, whose tests share what is dear to make. What tests/conftest.py knows of the
# last run, it uses to begin with the longest.
TEST_PYTHON = $(if $(LINUX),$(NPU_BIN),$(BIN))/python
PYTEST = $(TEST_PYTHON) -m pytest -q -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# `make test AREA=ops` runs the tests of one folder: of a room of hal/, or cpu, cuda, npu, driver, emulated-cann.
AREA ?=
FOLDER = $(or $(patsubst %/,%,$(firstword \
  $(wildcard tests/$(AREA) tests/backends/$(AREA) tests/backends/npu/$(AREA) $(AREA)/tests))),\
  $(error there is no folder of tests for AREA=$(AREA): see tests/ and tests/backends/))
# It needs a process of its own; pytest leaves it out of that of the folder it is in.
SEPARATE = tests/backends/npu/driver
RUNS = $(FOLDER) $(filter $(FOLDER)/%,$(SEPARATE)) $(if $(AREA),,$(if $(LINUX),emulated-cann/tests))

# Some of each room, of what takes no process of its own, nor a trained model for long.
UNITS = config/test_config.py device/test_closing.py::test_uses_nest_and_count_by_thread ops/test_declarations.py step nn/test_weights.py \
  drivers/test_opening.py quantization/test_quantized_models.py::test_what_is_refused \
  compile/test_passes.py compile/test_lower.py checkpoint/test_checkpoint_names.py execution/test_runner.py \
  generation/test_text.py testing/test_agreement.py bench/test_bench.py::TestTurns bench/test_bench.py::TestFloor \
  compare/test_compare.py::TestMeasures doctor/test_doctor.py::test_what_fits doctor/test_doctor.py::test_a_slow_probe_is_shown_as_such \
  quantize/test_quantize.py::test_nothing_to_scale cli/test_commands.py models/test_models.py project/test_layering.py::test_the_sources_are_layered project/test_rooms.py backends/cpu/test_graph.py \
  backends/cuda/test_cuda_choice.py backends/npu/test_npu_probe.py

# While working: under a minute on two cores.
check: $(VENV)/.dev $(VENV)/.test
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint types layers
	$(PYTEST) -m 'not thorough' $(addprefix tests/,$(UNITS)) tests/backends/cpu/test_cpu_conformance.py

test: $(VENV)/.test
	$(foreach folder,$(RUNS),$(PYTEST) -m 'not thorough' $(folder) &&) true

test-all: $(VENV)/.test
	$(foreach folder,$(RUNS),$(PYTEST) -m 'not exhaustive' $(folder) &&) true

# Every pair of what `make test-all` runs in some pairs, such as faults of a rank and points of a step.
test-exhaustive: $(VENV)/.test
	$(foreach folder,$(RUNS),$(PYTEST) -m exhaustive $(folder) &&) true

# What `make test` leaves to these: how many cases of which file, and why.
thorough: $(VENV)/.test
	@$(foreach folder,$(RUNS),$(TEST_PYTHON) -m pytest -q --collect-only -m thorough --thorough $(folder) &&) true

# On Debian, with the packages qemu-user and g++-aarch64-linux-gnu. Arm's Python and torch are downloaded.
ARM_PYTHON = $(abspath $(VENV)/arm/bin/python)
test-processors: $(VENV)/.test
	$(TEST_PYTHON) tools/processors/arm_root.py $(VENV)/arm
	$(ARM_PYTHON) -m pytest -q tests/backends/cpu/test_cpu_conformance.py -k 'devices or (operations and float32)'
	ARM_PYTHON=$(ARM_PYTHON) $(TEST_PYTHON) -m pytest -q -rs tests/backends/cpu/test_older_processors.py

# Downloads some 3 GB: no part of `make test`. CUDA_TESTS='tests/backends/cuda/test_cuda_gpu_graph.py -k memory' runs some alone,
# and not the emulator's own tests.
CUDA_PYTEST = $(CUDA_VENV)/bin/emulated-cuda pytest -q -n auto --maxprocesses 8 --dist worksteal
test-cuda-emulated: export EMULATED_CUDA_DEVICES ?= 2
test-cuda-emulated: $(CUDA_VENV)/.test
	$(if $(filter file,$(origin CUDA_TESTS)),$(CUDA_PYTEST) emulated-cuda/tests)
	PYTHONPATH=tests/backends/cuda $(CUDA_PYTEST) -p deselected_on_emulator $(CUDA_TESTS)

# Downloads some 3 GB: no part of `make test`.
test-cuda-build: $(VENV)/.test $(CUDA_BUILD_VENV)/.test
	CUDA_BUILD_PYTHON=$(abspath $(CUDA_BUILD_VENV)/bin/python) \
	  $(TEST_PYTHON) -m pytest -q tests/backends/npu/test_npu_probe.py -k a_build_for_cuda

# hal inside vLLM, built without kernels of its own: no part of `make test`, since it installs some 2 GB.
# VLLM_RUNNER=2 lets vLLM schedule for its second model runner in every test. vLLM refuses that where Triton has no device,
# unless no GPU is visible.
test-vllm: export VLLM_USE_V2_MODEL_RUNNER ?= $(if $(filter 2,$(VLLM_RUNNER)),1,0)
ifeq ($(VLLM_RUNNER),2)
test-vllm: export CUDA_VISIBLE_DEVICES =
endif
test-vllm: $(VLLM_VENV)/.test
	$(VLLM_VENV)/bin/python -m pytest -q tests/engines

# hal inside SGLang, without SGLang's kernels: no part of `make test`, since it installs some 2 GB.
test-sglang: $(SGLANG_VENV)/.test
	$(SGLANG_VENV)/bin/python -m pytest -q tests/engines

# Tries causal language models of transformers, for hours: no part of `make test`. It tries what docs/reference/families.json
# lacks; FAMILIES='qwen3 gemma2' tries these again, and without the file it tries all.
families: export TORCH_DEVICE_BACKEND_AUTOLOAD = 0
families: $(VENV)/.test
	$(BIN)/python tools/families/run.py --checks eager,graph,ranks,inductor $(FAMILIES)
	$(TEST_PYTHON) tools/families/run.py --checks npu,beside $(FAMILIES)
	$(BIN)/python tools/families/run.py --page
	git diff --exit-code docs/reference/families.json

# torch_npu does not import without CANN, and the figures are those of one thread.
bench: export TORCH_DEVICE_BACKEND_AUTOLOAD = 0
bench: export OMP_NUM_THREADS = 1
bench: $(VENV)/.test
	$(TEST_PYTHON) -m pytest -q tools/benchmarks --benchmark-only --benchmark-columns=min,median,stddev,rounds

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports
	cd emulated-cann && $(abspath $(BIN))/lint-imports

# By the Python of the tests: the tables of the NPU driver's kernels and cases need torch-npu. `.test` is made after `.dev`,
# and not beside it, because both install into the same environment.
docs: $(VENV)/.dev
	@$(MAKE) --no-print-directory $(VENV)/.test
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(TEST_PYTHON) -m sphinx -j auto -W --keep-going -n -q -b html docs docs/_build/html

hooks: $(VENV)/.dev
	$(BIN)/pre-commit install

checkpoint: $(VENV)/.test
	$(BIN)/python tools/checkpoints/train.py

clean:
	rm -rf $(VENV) docs/_build $(foreach folder,. emulated-cann emulated-cuda,$(addprefix $(folder)/,build dist *.egg-info))

# Older checkouts installed torch-npu here, and beside it `import torch` fails.
$(VENV)/.base: setup.cfg pyproject.toml
	@echo '== installing torch and hal into $(VENV), which takes minutes'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL_TORCH)
	@$(PIP) --editable '.[gguf]'
	@$(BIN)/python -m pip uninstall --quiet --quiet --yes torch-npu
	@touch $@

# It sees the packages of $(VENV), and adds torch-npu, the emulated CANN and hal. pip stops if torch-npu needs another torch than that of $(VENV),
# and would install that one as well if the command did not name it.
$(NPU_VENV)/.npu: $(VENV)/.base emulated-cann/pyproject.toml
	@echo '== installing torch-npu and the emulated CANN into $(NPU_VENV)'
	@test -x $(NPU_BIN)/python || $(BIN)/python -m venv --without-pip $(NPU_VENV)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$($(NPU_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"
	@$(NPU_BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile \
	  --editable emulated-cann --editable '.[npu]' \
	  "torch==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))')"
	@touch $@

$(VENV)/.tools: $(VENV)/.base
	$(PIP) --editable '.[test]'
	touch $@

$(VENV)/.test: $(VENV)/.tools $(if $(LINUX),$(NPU_VENV)/.npu)
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.tools

# Of the extra `test`, what these tests import. Of what FlashInfer names, only what its Python imports. numpy 2.4
# takes no array of one element for an integer, and Triton's interpreter has Inductor's loop bounds in such.
$(CUDA_VENV)/.test: PIP = $(CUDA_VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile
$(CUDA_VENV)/.test: setup.cfg pyproject.toml emulated-cuda/pyproject.toml
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(PIP) torch==2.11.0
	$(PIP) --editable emulated-cuda --editable '.[testing,cuda]' hypothesis 'numpy<2.4' pytest-benchmark pytest-xdist \
	  transformers
	$(PIP) --no-deps flashinfer-python==0.7.2.post1 apache-tvm-ffi
	$(PIP) einops ninja nvidia-ml-py requests tabulate
	touch $@

$(CUDA_BUILD_VENV)/.test: PIP = $(CUDA_BUILD_VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile
$(CUDA_BUILD_VENV)/.test: setup.cfg pyproject.toml
	test -x $(CUDA_BUILD_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_BUILD_VENV)
	$(PIP) --editable emulated-cann --editable '.[npu]' torch===2.13.0
	touch $@

# Beside a build of torch for CUDA, the tests on the emulated NPU are skipped.
WITH_TORCH_NPU = if $(1)/bin/python -c "$$CHECK_BUILD"; then $(PIP) --no-deps torch-npu==2.13.0 --editable emulated-cann; fi

# torchvision's kernels need the build of torch that it was built with.
WITH_TORCHVISION = $(PIP) --retries 1 --extra-index-url $(TORCH_INDEX) torchvision==0.28.0$(findstring +cpu,$(TORCH)) || { \
  echo '== no CPU build of torchvision was found: its build for CUDA is installed, whose kernels hal does not use'; \
  $(PIP) --no-deps torchvision==0.28.0; \
  site=$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
  cp tools/engines/torchvision_declarations.py "$$site"; \
  echo 'import torchvision_declarations' > "$$site/torchvision_declarations.pth"; }

$(VLLM_VENV)/.test: PIP = $(VLLM_VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile
$(VLLM_VENV)/.test: setup.cfg pyproject.toml tools/engines/torchvision_declarations.py
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(INSTALL_TORCH)
	$(PIP) 'setuptools<81' setuptools-scm setuptools-rust wheel packaging ninja cmake jinja2
	VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM) $(PIP) --no-build-isolation --no-binary vllm \
	  vllm==$(VLLM) torch==2.13.0
	$(call WITH_TORCHVISION,$(VLLM_VENV))
	$(PIP) --editable '.[testing]' hypothesis pytest-benchmark pytest-xdist
	$(call WITH_TORCH_NPU,$(VLLM_VENV))
	touch $@

# SGLang names another torch, and CUDA's libraries.
$(SGLANG_VENV)/.test: PIP = $(SGLANG_VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile
$(SGLANG_VENV)/.test: setup.cfg pyproject.toml tests/engines/sglang-requirements.txt tools/engines/torchvision_declarations.py
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(INSTALL_TORCH)
	$(call WITH_TORCHVISION,$(SGLANG_VENV))
	$(PIP) triton
	$(PIP) --no-deps sglang==$(SGLANG)
	$(PIP) --requirement tests/engines/sglang-requirements.txt torch==2.13.0
	$(PIP) --editable '.[testing]' hypothesis pytest-benchmark pytest-xdist torch==2.13.0
	$(call WITH_TORCH_NPU,$(SGLANG_VENV))
	touch $@
