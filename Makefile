# make run: the app on http://127.0.0.1:7860     make test: everything     make check: lint, types and the quick tests
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/pip --disable-pip-version-check
WORKERS ?= 2
SEED    ?= 1

# Tests that need neither a model nor a server, and take seconds.
MACHINES := tests/engine/core $(patsubst %,tests/grammar/test_%.py,json_schema normalise regex matchers) \
            tests/test_exports.py tests/test_layering.py

.PHONY: run test check lint tests machines test-avx2 test-arm install upgrade space soak clean

run: $(VENV)/.installed
	$(BIN)/python -m app

# Child processes of the tests would compile every module anew without its bytecode.
export PYTHONDONTWRITEBYTECODE :=

# Each worker imports everything once, so there are as many as cores. mypy runs beside them.
test: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory -j2 lint tests

check: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory -j2 lint machines

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

tests: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS)

machines: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 $(MACHINES)

# as a processor with AVX2 and no AVX-512 runs the tests; TESTS=tests/kernels picks some
test-avx2: $(VENV)/.installed-dev
	ATEN_CPU_CAPABILITY=avx2 OPENBLAS_CORETYPE=Haswell ONEDNN_MAX_CPU_ISA=AVX2 \
	  $(BIN)/python -m pytest -n $(WORKERS) --native-arch x86-64-v3 $(TESTS)

# the kernels' tests on 64-bit ARM under qemu-user, which take 3 minutes; ARM=armv8.6-a+dotprod+bf16+i8mm has more instructions
ARM ?= armv8-a
test-arm: $(VENV)/.installed-dev
	NATIVE_ARM=$(ARM) $(BIN)/python -m pytest -n 0 tests/kernels/test_paged_attention.py tests/kernels/test_elementwise.py \
	  tests/kernels/cpu/test_int8_cache.py $(patsubst %,tests/kernels/cpu/test_native_%.py,attention experts layers linear lora sampling)

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its pin must not be widened by what another package asks for
$(VENV)/.installed: requirements.txt pyproject.toml | $(VENV)/bin/python
	$(PIP) install --quiet "$$(grep '^torch==' requirements.txt)"
	$(PIP) install --quiet -r requirements.txt
	$(PIP) install --quiet --no-deps -e .
	touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(PIP) install --quiet -r requirements-dev.txt
	touch $@

# Raise every pin but torch's to the newest release that the others allow, then run the tests.
upgrade: $(VENV)/.installed-dev
	sed -n 's/^\([a-z0-9-]*\)==.*/\1/p' requirements.txt requirements-dev.txt | grep -v '^torch$$' | \
	  xargs $(PIP) install --quiet --upgrade "$$(grep '^torch==' requirements.txt)"
	for file in requirements.txt requirements-dev.txt; do \
	  $(PIP) freeze | awk -F== 'NR == FNR { name = tolower($$1); gsub("_", "-", name); version[name] = $$2; next } \
	    /^[a-z0-9-]+==/ && $$1 != "torch" { $$0 = $$1 "==" version[$$1] } { print }' - $$file > $$file.new && mv $$file.new $$file; \
	done
	sed -i "s/^sdk_version: .*/sdk_version: $$(sed -n 's/^gradio==//p' requirements.txt)/" README.md
	touch $(VENV)/.installed $(VENV)/.installed-dev
	$(MAKE) test

# nearly as a Space would start the folder: a clean environment, the app_file from the root; here on loopback
space: $(VENV)/.installed
	env -i PATH="$$PATH" HOME="$$HOME" TROUPE_HOST=127.0.0.1 TROUPE_PORT=7861 $(BIN)/python app/space.py & pid=$$!; \
	for i in $$(seq 120); do curl -fs http://127.0.0.1:7861/health && ok=1 && break; sleep 1; done; \
	curl -fs -o /dev/null http://127.0.0.1:7861/ || ok=; kill $$pid; wait $$pid; test "$$ok"

# five minutes of everything at once by a random seed, then what is left and what has changed; SOAK=--seconds=60 is shorter;
# then the longer runs that the tests leave out
soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.soak --seed $(SEED) $(SOAK)
	$(BIN)/python -m pytest -n $(WORKERS) -m soak
	TESTS_THOROUGH=1 $(BIN)/python -m pytest -n $(WORKERS) tests/grammar tests/app/test_linear_time.py tests/engine/worker/test_drafts.py

clean:
	rm -rf $(VENV)
