# make demo   the main job on the built-in training: probe, search, train (about three minutes);
#             where there is no NVIDIA GPU it installs the CPU build of torch
# make test   what CI runs: ruff, mypy --strict, pytest
# make check  ruff and mypy alone
# make test-slow   the long tests: an hour and more on two free cores
# make test-gpu  what only an NVIDIA GPU runs, path by path, with a table: under ten minutes on one
# make test-gpu-fake  the same on a fake GPU, and docs/gpu.md says which lines that ran; needs a C++ compiler
# make check-all   the types of benchmarks and examples
# make docs-site  builds the pages of docs/ as a site in build/site; needs the network
# make audit  asks whether a vulnerability is known of any version in constraints.txt; needs the network
PYTHON ?= python3
BIN := .venv/bin
BUDGET ?= 2m

QUICK := -q -m "not slow and not gpu" --durations=12

.PHONY: demo test quick test-gpu test-gpu-fake test-slow check check-all docs-site audit clean

demo: .venv/.installed
	mkdir -p demo
	cd demo && ../$(BIN)/autotune probe demo
	cd demo && ../$(BIN)/autotune search --budget $(BUDGET) || [ $$? -eq 3 ]  # 3: nothing but the own settings measured
	cd demo && ../$(BIN)/autotune train --profile best.json --steps 200
	@echo
	@echo "demo/best.json says:"
	@$(BIN)/python -c "import autotune; p = autotune.Profile.load('demo/best.json'); \
	    s = p.speedup; \
	    print(f'  {p.verdict}:', 'its speed-up is not known' if s is None else f'{s.low:.3f}x to {s.high:.3f}x, point {s.estimate:.3f}x ({s.confidence_level:.1%})')"

# Every process that a test starts would compile the package's source anew.
quick test-gpu test-slow: export PYTHONDONTWRITEBYTECODE =

test: .venv/.tested
	$(MAKE) --no-print-directory -j 2 check quick

# Three processes on two cores: a third of a test is waiting for a process that starts.
quick: .venv/.tested
	$(BIN)/pytest $(QUICK) -n 3 --dist worksteal

check: .venv/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check-all: check
	for folder in benchmarks $(sort $(dir $(wildcard examples/*/*.py))); do (cd "$$folder" && "$(CURDIR)/$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" .) || exit 1; done

test-gpu: .venv/.tested
	$(BIN)/pytest -q -m gpu --durations=5

test-gpu-fake: .venv/.tested
	$(BIN)/python tests/gpu/fake/on_the_fake.py --durations=5

test-slow: .venv/.tested
	$(BIN)/pytest -q -m slow -n 2 --dist worksteal

docs-site: .venv-docs/bin/mkdocs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict --site-dir build/site

.venv-docs/bin/mkdocs:
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check mkdocs-material

audit: .venv-audit/bin/pip-audit
	.venv-audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

.venv-audit/bin/pip-audit:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --disable-pip-version-check pip-audit

clean:
	rm -rf .venv .venv-audit .venv-docs demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'autotune needs Python 3.11 or newer')"
	$(PYTHON) -m venv .venv
	index="$$($(PYTHON) .ci/torch_index.py)" && $(BIN)/pip install --quiet --disable-pip-version-check $$index -c constraints.txt -e .
	touch $@

.venv/.tested: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@
