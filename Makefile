# make run: the app on http://127.0.0.1:7860     make test: ruff, mypy, pytest     make space: as a Space starts it
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: run test check install space clean

run: $(VENV)/.installed
	$(BIN)/python -m app

test: check
	$(BIN)/python -m pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its pin must not be widened by what another package asks for
$(VENV)/.installed: requirements.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

# nearly as a Space would start the folder: a clean environment, the app_file from the root; here on loopback
space: $(VENV)/.installed
	env -i PATH="$$PATH" HOME="$$HOME" TROUPE_HOST=127.0.0.1 TROUPE_PORT=7861 $(BIN)/python app/space.py & pid=$$!; \
	for i in $$(seq 120); do curl -fs http://127.0.0.1:7861/health && ok=1 && break; sleep 1; done; \
	curl -fs -o /dev/null http://127.0.0.1:7861/ || ok=; kill $$pid; wait $$pid; test "$$ok"

clean:
	rm -rf $(VENV)
